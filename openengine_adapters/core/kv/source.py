"""The sockets towards one native publisher: SUB for what is new, DEALER for what was."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator
from typing import Any

import zmq
import zmq.asyncio

from openengine_adapters.engine import KvEventPublisher

LIVE_HWM = 100_000
"""Live messages that ZMQ keeps for us; it drops beyond, which shows as a gap and is repaired."""

REPLAY_SILENCE_S = 5.0
"""How long a publisher may be silent in the middle of a replay."""

YIELD_EVERY = 64
"""Replayed batches taken in before other tasks get their turn."""

_END = b"\xff" * 8


class ReplayUnavailable(Exception):
    """The replay socket does not answer, or there is none."""


class NativeSource:
    """Subscribes to one publisher from the moment it is made. `close` when done."""

    def __init__(self, context: zmq.asyncio.Context, publisher: KvEventPublisher) -> None:
        self._context = context
        self._publisher = publisher
        self._live: zmq.asyncio.Socket = context.socket(zmq.SUB)
        self._live.set(zmq.RCVHWM, LIVE_HWM)
        self._live.subscribe(publisher.topic)
        self._live.connect(publisher.endpoint)
        # The plain face of the same socket, to take what is there without a task switch for each message.
        self._taking: zmq.Socket[bytes] = zmq.Socket.shadow(self._live.underlying)

    @property
    def replayable(self) -> bool:
        """Whether the publisher has a replay socket."""
        return bool(self._publisher.replay_endpoint)

    async def wait(self, timeout_s: float) -> bool:
        """Wait for a live batch; False when none came in time.

        Polling first is essential: cancelling a pending receive can lose a message.
        """
        return bool(await self._live.poll(round(timeout_s * 1000)))

    def take(self) -> tuple[int, bytes] | None:
        """The next live batch, number and payload, or None when there is none at the moment."""
        while True:
            try:
                frames = self._taking.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return None
            if len(frames) >= 2 and len(frames[-2]) == 8:
                return int.from_bytes(frames[-2]), frames[-1]

    async def replay(self, start: int) -> AsyncGenerator[tuple[int, bytes], None]:
        """Yield the batches that the publisher still has from `start` on. Raises `ReplayUnavailable`.

        A publisher can send so much at once that ZMQ drops some of it: the caller has to look for holes.
        """
        if not self.replayable:
            raise ReplayUnavailable
        # A socket of its own for each replay, so that nothing of an earlier one can come in between.
        asking: Any = self._context.socket(zmq.DEALER)
        with contextlib.closing(asking):
            asking.set(zmq.LINGER, 0)
            asking.set_hwm(0)
            asking.connect(self._publisher.replay_endpoint)
            await asking.send_multipart((b"", start.to_bytes(8)))
            for count in itertools.count(1):
                if not await asking.poll(round(REPLAY_SILENCE_S * 1000)):
                    raise ReplayUnavailable
                # Older releases leave the topic out; number and payload come last in all of them.
                frames = await asking.recv_multipart()
                if len(frames) < 2 or len(frames[-2]) != 8:
                    continue
                if frames[-2] == _END:
                    return
                yield int.from_bytes(frames[-2]), frames[-1]
                if count % YIELD_EVERY == 0:
                    await asyncio.sleep(0)  # neither call above gives way while there is something to read

    def close(self) -> None:
        """Close the socket. Safe to call twice."""
        self._live.close(linger=0)
