"""The sessions that a prefill server holds, from PrefillReady to their end (PD-04)."""

from __future__ import annotations

import asyncio
import enum
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

log = logging.getLogger(__name__)

REMEMBERED = 16384
"""Ended ids kept, so that aborting one again is no error; the oldest goes first."""

Held = TypeVar("Held")


class End(enum.Enum):
    """How a session ended."""

    FETCHED = "fetched"  # the decode engine has the blocks
    RELEASED = "released"  # aborted, or its client went away
    EXPIRED = "expired"  # no decode server came in time
    ABANDONED = "abandoned"  # the decode server that came went away without the blocks


class Attach(enum.Enum):
    """What a decode server that wants to attach is told."""

    ATTACHED = "attached"
    GONE = "gone"
    TAKEN = "taken"
    CHANGED = "changed"


@dataclass(slots=True)
class _Session(Generic[Held]):
    checksum: str
    call_id: str
    held: Held
    expiry: asyncio.TimerHandle
    detach: Callable[[End], None] | None = None


@dataclass(slots=True)
class SessionTable(Generic[Held]):
    """Open sessions by id. `held` is whatever the adapter needs to free one.

    One that no decode server attaches to within `ttl` seconds ends by itself, and so does one whose decode server
    is still attached after `attached_ttl`. `on_attach` lets the engine keep what it holds from then on, and says
    whether it still has it. `on_end` hears of every end, and frees the engine's side of it; it runs in a task that the
    table owns.
    """

    ttl: float
    on_end: Callable[[Held, End], Awaitable[None]]
    attached_ttl: float
    on_attach: Callable[[Held], Awaitable[bool]] | None = None
    _open: dict[str, _Session[Held]] = field(default_factory=dict)
    _by_call: dict[str, str] = field(default_factory=dict)
    _ended: OrderedDict[str, None] = field(default_factory=OrderedDict)
    _ending: set[asyncio.Task[None]] = field(default_factory=set)

    def __len__(self) -> int:
        return len(self._open)

    def open(self, session_id: str, checksum: str, call_id: str, held: Held) -> None:
        """Hold a session for the decode server that will come with this checksum."""
        self._open[session_id] = _Session(checksum, call_id, held, self._expiry(session_id, self.ttl))
        self._by_call[call_id] = session_id

    async def attach(self, session_id: str, checksum: str, detach: Callable[[End], None]) -> Attach:
        """Hand a session to a decode server. From then on it ends when that server leaves, or stays too long.

        `detach` is called when the session ends, to send the server away if it is still there.
        """
        session = self._open.get(session_id)
        if session is None:
            return Attach.GONE
        if session.checksum != checksum:
            return Attach.CHANGED
        if session.detach is not None:
            return Attach.TAKEN
        session.detach = _stay  # taken, but not yet attached
        session.expiry.cancel()
        session.expiry = self._expiry(session_id, self.attached_ttl)
        if not await self._keep(session.held):
            self.end(session_id, End.EXPIRED)
        if self._open.get(session_id) is not session:
            return Attach.GONE
        session.detach = detach
        return Attach.ATTACHED

    def end(self, session_id: str, how: End) -> bool | None:
        """End a session: True when it was open, False when it had ended, None when it is unknown."""
        session = self._open.pop(session_id, None)
        if session is None:
            return False if session_id in self._ended else None
        session.expiry.cancel()
        if session.detach is not None:
            session.detach(how)
        self._by_call.pop(session.call_id, None)
        self._ended[session_id] = None
        while len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)
        task = asyncio.get_running_loop().create_task(self._free(session.held, how), name="session-end")
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        return True

    def end_call(self, call_id: str) -> None:
        """End the session of a call whose client never got to know it."""
        if (session_id := self._by_call.get(call_id)) is not None:
            self.end(session_id, End.RELEASED)

    def end_all(self) -> None:
        """End every session; a decode server that is attached to one is sent away."""
        for session_id in list(self._open):
            self.end(session_id, End.RELEASED)

    async def settled(self) -> None:
        """Wait until the engine's side of every ended session is freed."""
        if self._ending:
            await asyncio.wait(self._ending)  # which leaves them running when its caller gives up

    async def close(self) -> None:
        """Forget all sessions; the engine stops, and with it whatever it holds."""
        for session in self._open.values():
            session.expiry.cancel()
        self._open.clear()
        self._by_call.clear()
        for task in list(self._ending):
            task.cancel()
        await asyncio.gather(*self._ending, return_exceptions=True)

    async def _keep(self, held: Held) -> bool:
        try:
            return self.on_attach is None or await self.on_attach(held)
        except Exception:
            log.warning("the engine does not say whether it holds a session's blocks", exc_info=True)
            return False

    def _expiry(self, session_id: str, seconds: float) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(seconds, self.end, session_id, End.EXPIRED)

    async def _free(self, held: Held, how: End) -> None:
        try:
            await self.on_end(held, how)
        except Exception:
            # The engine's own lease frees it later.
            log.warning("a session's blocks could not be freed at once", exc_info=True)


def _stay(how: End) -> None:
    """Nobody is to be sent away yet."""
