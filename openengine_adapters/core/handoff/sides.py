"""The two sides of a hand-over, and what a disaggregated engine says of sessions, whichever engine it is (PD-04)."""

from __future__ import annotations

import abc
from typing import Any, Generic, TypeVar

from openengine.v1 import discovery_pb2, kv_pb2
from openengine_adapters.core.handoff.decoding import Decoding
from openengine_adapters.core.handoff.desk import SessionDesk
from openengine_adapters.core.handoff.roles import HandOffWanted
from openengine_adapters.core.handoff.sessions import End, SessionTable
from openengine_adapters.engine import Lora, StartupError

Held = TypeVar("Held")


class PrefillSide(abc.ABC, Generic[Held]):
    """The sessions of a prefill server, and its desk. `at` is where that is, with its port once it is open.

    A session waits for its decode server `timeout` seconds, by default as long as the operator wants.
    """

    role = discovery_pb2.ENGINE_ROLE_PREFILL

    def __init__(self, wanted: HandOffWanted, host: str, timeout: float | None = None) -> None:
        self.at = (host, wanted.port)
        self.sessions: SessionTable[Held] = SessionTable(
            wanted.timeout if timeout is None else timeout, self.free, wanted.attached_timeout, self.keep
        )
        self._desk = SessionDesk(self.sessions)

    async def open_desk(self) -> None:
        """Answer decode servers from now on. Raises `StartupError`."""
        host, port = self.at
        try:
            self.at = (host, await self._desk.start(host, port))
        except OSError as error:
            raise StartupError(
                f"decode servers cannot be answered on {host}:{port} ({error.strerror}); "
                "set --kv-session-port to a free one, and the host to one of this machine's"
            ) from error

    async def stop(self) -> None:
        """Close the desk and forget the sessions."""
        await self._desk.stop()
        await self.sessions.close()

    async def release(self, session_id: str) -> bool | None:
        """End a session; on return the engine has been told. See `HandsOffKv.release_session`."""
        released = self.sessions.end(session_id, End.RELEASED)
        await self.sessions.settled()
        return released

    async def keep(self, held: Held) -> bool:
        """Have the engine keep what a session needs while a decode server is attached; False when that is gone."""
        return True

    async def without(self, lora: Lora) -> None:
        """Return once no session needs the adapter; one that only holds blocks needs none."""

    @abc.abstractmethod
    async def free(self, held: Held, how: End) -> None:
        """Have the engine free what an ended session held."""


class DecodeSide(abc.ABC):
    """The requests of a decode server that wait for their blocks."""

    role = discovery_pb2.ENGINE_ROLE_DECODE

    def __init__(self, wanted: HandOffWanted) -> None:
        self.decoding = Decoding(wanted.transfer_timeout)

    @abc.abstractmethod
    def read(self, session: kv_pb2.KvSessionRef) -> Any:
        """Check a session completely, and return what it says. Raises `Rejected` (PD-03, PD-07)."""


class Sessions:
    """The part of an engine that is `HandsOffKv`, whatever its role."""

    _hand_off: PrefillSide[Any] | DecodeSide | None = None

    def check_session(self, session: kv_pb2.KvSessionRef) -> None:
        """Check a session before anything else is done with the request."""
        assert isinstance(self._hand_off, DecodeSide)  # the core asks decode engines only
        self._hand_off.read(session)

    async def release_session(self, session_id: str) -> bool | None:
        """End a session and free what it holds."""
        return await self._hand_off.release(session_id) if isinstance(self._hand_off, PrefillSide) else None

    async def end_sessions(self) -> None:
        """End every session; on return the engine has been told."""
        if isinstance(self._hand_off, PrefillSide):
            self._hand_off.sessions.end_all()
            await self._hand_off.sessions.settled()

    async def lora_unused(self, lora: Lora) -> None:
        """Return once no session needs the adapter."""
        if isinstance(self._hand_off, PrefillSide):
            await self._hand_off.without(lora)

    def open_sessions(self) -> int:
        """Sessions that no decode server is done with yet."""
        return len(self._hand_off.sessions) if isinstance(self._hand_off, PrefillSide) else 0
