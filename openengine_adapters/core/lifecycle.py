"""Which phase the server is in, and what that phase lets in."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable

import grpc

from openengine_adapters.core.errors import EngineDied, Rejected


class Phase(enum.Enum):
    """STARTING until the engine takes requests, then READY; DRAINING and DEAD are one-way."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"


class Lifecycle:
    """The server's phase. Listeners hear every change, on the event loop."""

    def __init__(self) -> None:
        self.phase = Phase.STARTING
        self.died: EngineDied | None = None
        self.dead = asyncio.Event()
        self._listeners: list[Callable[[Phase], None]] = []

    def listen(self, listener: Callable[[Phase], None]) -> None:
        """Call `listener` after each change of phase."""
        self._listeners.append(listener)

    def ready(self) -> None:
        """The engine takes requests."""
        self._enter(Phase.READY)

    def drain(self) -> None:
        """Take no new work from now on (DRAIN-02)."""
        if self.phase is not Phase.DEAD:
            self._enter(Phase.DRAINING)

    def die(self, why: EngineDied) -> None:
        """The engine is gone (ERR-04)."""
        if self.died is None:
            self.died = why
            self.dead.set()
            self._enter(Phase.DEAD)

    def require_started(self) -> None:
        """Raise `Rejected` UNAVAILABLE while the engine is not up (DISC-13, ERR-04)."""
        if self.phase is Phase.STARTING:
            raise Rejected(
                grpc.StatusCode.UNAVAILABLE,
                "the engine is starting and loads its model; ask Health, then try again",
            )
        if self.phase is Phase.DEAD:
            raise Rejected(grpc.StatusCode.UNAVAILABLE, f"the engine is not running: {self.died}")

    def require_open(self) -> None:
        """Raise `Rejected` UNAVAILABLE unless new inference work is taken (GEN-05)."""
        self.require_started()
        if self.phase is Phase.DRAINING:
            raise Rejected(
                grpc.StatusCode.UNAVAILABLE,
                "the server is draining and takes no new work; use another replica",
            )

    def _enter(self, phase: Phase) -> None:
        if phase is self.phase:
            return
        self.phase = phase
        for listener in self._listeners:
            listener(phase)
