"""Keeps a channel equal to its publisher: no batch missing, none twice, and no loss unsaid (KVE-02)."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from openengine_adapters.core.kv.channel import Channel
from openengine_adapters.core.kv.source import NativeSource, ReplayUnavailable

log = logging.getLogger(__name__)

IDLE_S = 5.0
"""After so long without a batch the publisher is asked whether that is true."""

TAKEN_AT_ONCE = 64
"""Batches taken in before other tasks get their turn."""

_RESTARTED = "the engine's publisher was restarted"


class _OtherHistory(Exception):
    """The publisher does not have our newest batch as we know it."""


class Follower:
    """Follows one publisher until cancelled.

    A replay is always asked to begin with the newest batch that we have. Finding it there, unchanged, proves that what
    follows continues our history; a publisher that was restarted has another batch under that number, or none.
    """

    def __init__(self, source: NativeSource, channel: Channel, idle_s: float = IDLE_S) -> None:
        self._source = source
        self._channel = channel
        self._idle_s = idle_s
        self._newest_live = -1

    async def run(self) -> None:
        """Follow the publisher from the beginning of its history."""
        await self._synchronise()
        while True:
            if await self._source.wait(self._idle_s):
                await self._take()
            else:
                await self._ask_whether_idle()

    # ------------------------------------------------------------------------------------------ live batches

    async def _take(self) -> None:
        for _ in range(TAKEN_AT_ONCE):
            message = self._source.take()
            if message is None:
                return
            await self._accept(*message)
        await asyncio.sleep(0)

    async def _accept(self, number: int, payload: bytes) -> None:
        channel = self._channel
        if number <= self._newest_live:
            await self._begin_anew(_RESTARTED, number)
        elif number > channel.next:
            await self._close_gap(number)
        self._newest_live = number
        if number > channel.next:
            channel.restart(number, "what came before was lost")
            channel.synchronised()
        if number == channel.next:  # else a replay has brought it already
            channel.apply(number, payload)

    async def _close_gap(self, number: int) -> None:
        channel, first = self._channel, self._channel.next
        channel.stats.gaps += 1
        try:
            hole = await self._catch_up()
        except _OtherHistory:
            await self._begin_anew(_RESTARTED, number)
        except ReplayUnavailable:
            await self._begin_anew(f"batches {first} to {number - 1} were lost", number)
        else:
            if hole is None and channel.next >= number:
                channel.stats.repaired += 1
                log.info("rank %d: repaired the KV batches %d to %d", channel.rank, first, number - 1)
            else:
                await self._begin_anew(f"the engine no longer has batch {channel.next}", number)

    async def _ask_whether_idle(self) -> None:
        """A loss at the end of the sequence, and a restart, show only when asked for."""
        try:
            hole = await self._catch_up()
        except ReplayUnavailable:
            return
        except _OtherHistory:
            await self._begin_anew(_RESTARTED, 0)
        else:
            if hole is not None:
                await self._begin_anew(f"the engine no longer has batch {self._channel.next}", hole)

    # ----------------------------------------------------------------------------------------------- replays

    async def _begin_anew(self, reason: str, number: int) -> None:
        """Give up what is known; `number` is where to begin when nothing can be replayed."""
        self._channel.restart(0 if self._source.replayable else number, reason)
        self._newest_live = -1
        await self._synchronise()

    async def _synchronise(self) -> None:
        """Take in all that the publisher still has, from behind the last hole in it."""
        channel = self._channel
        with contextlib.suppress(ReplayUnavailable):
            while True:
                try:
                    hole = await self._catch_up()
                except _OtherHistory:
                    channel.restart(0, _RESTARTED)
                    continue
                if hole is None:
                    break
                channel.restart(hole, f"the engine no longer has batch {channel.next}")
        channel.synchronised()

    async def _catch_up(self) -> int | None:
        """Take in what is missing; the number behind a hole that the publisher has itself, None without one."""
        while True:
            before = self._channel.next
            try:
                hole = await self._replay()
            except ReplayUnavailable:
                # A long replay can lose messages, its end included; what came is a beginning.
                if self._channel.next == before:
                    raise
                continue
            if hole is None or self._channel.next == before:
                return hole

    async def _replay(self) -> int | None:
        """Take in one replay up to its first hole; return the number behind that, None when there is none."""
        channel, known, hole = self._channel, self._channel.last_payload, None
        start = channel.next if known is None else channel.next - 1
        async with contextlib.aclosing(self._source.replay(start)) as replies:
            async for number, payload in replies:
                if known is not None:
                    if (number, payload) != (start, known):
                        raise _OtherHistory
                    known = None
                    continue
                if channel.last_payload is None and number > channel.next:
                    channel.restart(number, f"the engine no longer has batch {channel.next}")
                if number == channel.next and hole is None:
                    channel.apply(number, payload)
                elif number > channel.next and hole is None:
                    hole = number
        if known is not None and await self._has_history():
            raise _OtherHistory
        return hole

    async def _has_history(self) -> bool:
        """Whether the publisher can replay anything at all."""
        async with contextlib.aclosing(self._source.replay(0)) as replies:
            async for _ in replies:
                return True
        return False
