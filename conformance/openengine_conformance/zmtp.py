# SPDX-License-Identifier: Apache-2.0
"""Just enough of ZMTP 3 to be a plain ZMQ subscriber: the suite has no dependency for one case."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

_GREETING = b"\xff" + b"\0" * 8 + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" * 32
_MORE, _LONG, _COMMAND = 1, 2, 4
_LONGEST_FRAME = 64 * 1024 * 1024


class NotZmq(Exception):
    """The peer does not speak ZMTP 3, or has gone."""


class Subscriber:
    """One SUB socket on one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def handshake(self, topic: bytes) -> None:
        """Greet, agree on no security, and subscribe."""
        self._writer.write(_GREETING)
        greeting = await self._reader.readexactly(64)
        if greeting[0] != 0xFF or greeting[9] & 1 == 0 or greeting[10] < 3:
            raise NotZmq(f"the greeting is {greeting[:12].hex(' ')}")
        self._command(b"READY", _property(b"Socket-Type", b"SUB"))
        flags, body = await self._frame()
        if not flags & _COMMAND or not body.startswith(b"\x05READY"):
            raise NotZmq(f"the first frame is {body[:20]!r}")
        self._write(0, b"\x01" + topic)

    async def message(self) -> list[bytes]:
        """Return the frames of the next message."""
        frames = []
        while True:
            flags, body = await self._frame()
            if flags & _COMMAND:
                continue
            frames.append(body)
            if not flags & _MORE:
                return frames

    async def _frame(self) -> tuple[int, bytes]:
        flags = (await self._reader.readexactly(1))[0]
        size = int.from_bytes(await self._reader.readexactly(8 if flags & _LONG else 1))
        if size > _LONGEST_FRAME:
            raise NotZmq(f"a frame says that it has {size} bytes")
        return flags, await self._reader.readexactly(size)

    def _command(self, name: bytes, body: bytes) -> None:
        self._write(_COMMAND, bytes([len(name)]) + name + body)

    def _write(self, flags: int, body: bytes) -> None:
        self._writer.write(bytes([flags, len(body)]) + body)


def _property(name: bytes, value: bytes) -> bytes:
    return bytes([len(name)]) + name + len(value).to_bytes(4) + value


@contextlib.asynccontextmanager
async def subscribe(host: str, port: int, topic: str) -> AsyncIterator[Subscriber]:
    """Connect to a publisher. Raises `OSError` or `NotZmq` when there is none."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        subscriber = Subscriber(reader, writer)
        try:
            await subscriber.handshake(topic.encode())
            yield subscriber
        except asyncio.IncompleteReadError:
            raise NotZmq("the publisher closed the connection") from None
    finally:
        writer.close()
