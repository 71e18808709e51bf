"""KV events over ZMQ, in the wire format that vLLM and SGLang publish.

A PUB socket sends `[topic, sequence number as 8 bytes big-endian, msgpack batch]`. A ROUTER socket answers
`[empty, first number]` with `[empty, topic, number, batch]` for each batch still kept, and an end marker.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgpack
import zmq
import zmq.asyncio

from openengine_adapters.engine import KvEventPublisher
from openengine_adapters.reference.cache import CacheEvent, as_wire

HWM = 100_000
"""Batches that ZMQ keeps for a slow subscriber before it drops."""

_END = b"\xff" * 8


class Publisher:
    """The publisher of one data-parallel rank; its last `buffer_steps` batches can be asked for again."""

    def __init__(self, rank: int, host: str, block_size: int, buffer_steps: int) -> None:
        self._rank = rank
        self._block_size = block_size
        self._next = 0
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=buffer_steps)
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._pub.set_hwm(HWM)
        self._router = zmq.asyncio.Context.shadow(self._context.underlying).socket(zmq.ROUTER)
        self._router.set_hwm(0)  # a replay is bounded by the buffer, and must not be cut
        self._every_interface = host in ("", "*", "0.0.0.0", "::")
        bound = "*" if self._every_interface else host
        self._ports = [_bind(socket, bound) for socket in (self._pub, self._router)]
        self._host = "127.0.0.1" if self._every_interface else host

    def describe(self) -> KvEventPublisher:
        """What a local client connects to."""
        endpoint, replay_endpoint = [f"tcp://{self._host}:{port}" for port in self._ports]
        return KvEventPublisher(
            rank=self._rank,
            endpoint=endpoint,
            replay_endpoint=replay_endpoint,
            buffer_steps=self._kept.maxlen,
            hwm=HWM,
            max_queue_size=HWM,
            every_interface=self._every_interface,
        )

    def publish(self, events: Sequence[CacheEvent]) -> None:
        """Send one batch; never blocks."""
        number = self._next.to_bytes(8)
        batch = msgpack.packb(
            [time.time(), [as_wire(event, self._block_size) for event in events], self._rank]
        )
        self._next += 1
        self._kept.append((number, batch))
        self._pub.send_multipart((b"", number, batch))

    async def serve_replay(self) -> None:
        """Answer replay requests until cancelled; a malformed one is passed over."""
        while True:
            frames = await self._router.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != 8:
                continue
            client, _, first = frames
            for number, batch in [entry for entry in self._kept if entry[0] >= first]:
                await self._router.send_multipart((client, b"", b"", number, batch))
            await self._router.send_multipart((client, b"", b"", _END, b""))

    def close(self) -> None:
        """Close the sockets. Safe to call twice."""
        self._pub.close(linger=0)
        self._router.close(linger=0)
        self._context.destroy(linger=0)


def _bind(socket: zmq.Socket[Any], host: str) -> int:
    """Bind to a free port and return it."""
    return socket.bind_to_random_port(f"tcp://{host}")
