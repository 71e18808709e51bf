"""A publisher of KV events that does what a test tells it: loses, forgets, restarts."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack
import zmq
import zmq.asyncio

from openengine_adapters.engine import KvEventPublisher

END = b"\xff" * 8


def stored(
    *hashes: int | bytes | str, parent: int | bytes | str | None = None, size: int = 2, **more: Any
) -> dict[str, Any]:
    """A BlockStored as vLLM writes it; the tokens of a block follow from its hash."""
    tokens = [
        (value if isinstance(value, int) else len(value)) % 1000 + at
        for value in hashes
        for at in range(size)
    ]
    return {
        "type": "BlockStored",
        "block_hashes": list(hashes),
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": size,
        "lora_id": None,
        "medium": "GPU",
        **more,
    }


def removed(*hashes: int | bytes | str, **more: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU", **more}


def cleared() -> dict[str, Any]:
    return {"type": "AllBlocksCleared"}


def payload(*events: Any, rank: int = 0, at: float | None = None) -> bytes:
    return bytes(msgpack.packb([time.time() if at is None else at, list(events), rank]))


@dataclass
class FakePublisher:
    """Publishes from number 0; `kept` is what it can replay, `mute` what a replay leaves out."""

    context: zmq.asyncio.Context
    rank: int = 0
    topic: str = ""
    replays: bool = True
    next: int = 0
    kept: list[tuple[int, bytes]] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)
    mute: set[int] = field(default_factory=set)
    sent: list[tuple[int, bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._pub = self.context.socket(zmq.XPUB)
        self._pub.set_hwm(0)
        self._router = self.context.socket(zmq.ROUTER)
        self._router.set_hwm(0)
        self._ports = [socket.bind_to_random_port("tcp://127.0.0.1") for socket in (self._pub, self._router)]

    def describe(self, **changes: Any) -> KvEventPublisher:
        values: dict[str, Any] = {
            "rank": self.rank,
            "endpoint": f"tcp://127.0.0.1:{self._ports[0]}",
            "replay_endpoint": f"tcp://127.0.0.1:{self._ports[1]}" if self.replays else "",
            "topic": self.topic,
            "buffer_steps": 1000,
            "hwm": 2000,
            "max_queue_size": 3000,
        }
        return KvEventPublisher(**(values | changes))

    async def subscribed(self) -> None:
        """Wait until a subscriber is connected, so that nothing published from now on misses it."""
        async with asyncio.timeout(10):
            await self._pub.recv()

    async def publish(self, *events: Any, raw: bytes | None = None) -> int:
        """Publish one batch and return its number."""
        number, data = self._enter(events, raw)
        self.kept.append((number, data))
        await self._send(number, data)
        return number

    def lose(self, *events: Any) -> int:
        """A batch that never reaches a subscriber, but can be replayed."""
        number, data = self._enter(events, None)
        self.kept.append((number, data))
        return number

    def skip(self) -> int:
        """A number that is used up and gone."""
        number, _ = self._enter((), None)
        return number

    def forget(self, before: int) -> None:
        """Keep no batch below `before`."""
        self.kept = [(number, data) for number, data in self.kept if number >= before]

    def restart(self) -> None:
        """Begin anew at 0, as another process at the same address would."""
        self.next, self.kept = 0, []

    async def resend(self, number: int) -> None:
        """Send a batch again."""
        await self._send(number, dict(self.kept)[number])

    def _enter(self, events: Sequence[Any], raw: bytes | None) -> tuple[int, bytes]:
        number, self.next = self.next, self.next + 1
        return number, payload(*events, rank=self.rank) if raw is None else raw

    async def _send(self, number: int, data: bytes) -> None:
        self.sent.append((number, data))
        await self._pub.send_multipart((self.topic.encode(), number.to_bytes(8), data))

    async def serve(self) -> None:
        """Answer replay requests until cancelled."""
        while True:
            client, _, start = await self._router.recv_multipart()
            self.asked.append(int.from_bytes(start))
            mute, self.mute = self.mute, set()
            for number, data in list(self.kept):
                if number >= int.from_bytes(start) and number not in mute:
                    await self._router.send_multipart(
                        (client, b"", self.topic.encode(), number.to_bytes(8), data)
                    )
            await self._router.send_multipart((client, b"", b"", END, b""))

    def close(self) -> None:
        self._pub.close(linger=0)
        self._router.close(linger=0)


@contextlib.asynccontextmanager
async def publishing(**settings: Any) -> AsyncIterator[FakePublisher]:
    """A running publisher."""
    context = zmq.asyncio.Context()
    publisher = FakePublisher(context, **settings)
    serving = asyncio.create_task(publisher.serve())
    try:
        yield publisher
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        publisher.close()
        context.destroy(linger=0)
