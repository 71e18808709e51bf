"""One slow loop that notices what no request can notice by itself: death, a hang, a reader that stopped."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from openengine.v1 import errors_pb2
from openengine_adapters.core.errors import EngineDied, EngineFailure
from openengine_adapters.core.lifecycle import Lifecycle
from openengine_adapters.core.requests import RequestTable
from openengine_adapters.engine import Engine, RunsRanks

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Limits:
    """Time limits in seconds: `stall_s` for a reader that stopped (STREAM-10), `hang_s` for an engine (ERR-07)."""

    stall_s: float = 30.0
    hang_s: float = 60.0
    period_s: float = 0.5


class Watchdog:
    """Watches the engine and the readers; ends requests when one of them is beyond help."""

    def __init__(self, engine: Engine, requests: RequestTable, lifecycle: Lifecycle, limits: Limits) -> None:
        self._engine = engine
        self._requests = requests
        self._lifecycle = lifecycle
        self._limits = limits
        self._progress: dict[str, tuple[int, float]] = {}

    async def run(self) -> None:
        """Watch until cancelled or until the engine is dead."""
        loop = asyncio.get_running_loop()
        while self._lifecycle.died is None:
            try:
                self._look(loop.time())
            except Exception:
                # Whatever the engine's innards say now, its death must still be seen later.
                log.exception("the watchdog could not look")
            await asyncio.sleep(self._limits.period_s)

    def _look(self, now: float) -> None:
        try:
            self._engine.check()
        except EngineDied as death:
            self.declare_dead(death)
            return
        self._look_for_hang(now)
        self._look_for_stalled_readers(now)

    def declare_dead(self, death: EngineDied) -> None:
        """End every request with `death`, once."""
        if self._lifecycle.died is None:
            log.error("engine died: %s (%d requests in flight)", death, len(self._requests))
        self._lifecycle.die(death)
        self._requests.interrupt_all(death)

    def _look_for_hang(self, now: float) -> None:
        before = self._progress
        self._progress = {
            who: before[who] if who in before and before[who][0] == steps else (steps, now)
            for who, steps in self._at_work().items()
        }
        for who, (_, since) in self._progress.items():
            if now - since > self._limits.hang_s:
                self.declare_dead(
                    EngineDied(
                        f"{who} made no step for {self._limits.hang_s:g} s with requests unfinished; "
                        "its requests are lost, retry on another replica"
                    )
                )
                return

    def _at_work(self) -> dict[str, int]:
        """The steps so far of what has something to do: the engine, and each of its ranks that tells of itself."""
        if not self._engine.unfinished():
            return {}
        ranks = self._engine.ranks_at_work() if isinstance(self._engine, RunsRanks) else {}
        return {"the engine": self._engine.steps()} | {
            f"rank {rank} of the engine": steps for rank, steps in ranks.items()
        }

    def _look_for_stalled_readers(self, now: float) -> None:
        for request in self._requests:
            since = request.writing_since
            if since is not None and now - since > self._limits.stall_s:
                log.warning("request %s: the client stopped reading; ending it", request.request_id)
                request.interrupt(
                    EngineFailure(
                        f"the client read nothing for {self._limits.stall_s:g} s",
                        code=errors_pb2.ERROR_CODE_OVERLOADED,
                        retryable=True,
                    ),
                    force=True,
                )
