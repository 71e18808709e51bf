"""Runtime events out of the load that SGLang's schedulers publish after each step. Keys: core/runtime_events.py.

SGLang tells nobody of a step, so its shared memory is looked at every few milliseconds while somebody subscribes. One
FORWARD_PASS covers what was done since the look before, which is one step unless steps are shorter than that. What
SGLang does not count is left out: generated tokens, and how many requests a step computed prompts of.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from openengine.v1 import observability_pb2 as obs
from openengine_adapters.engine import RuntimeEvent
from openengine_adapters.sglang.load import LoadBoard

LOOK_S = 0.005

Sink = Callable[[RuntimeEvent], None]


class StepEvents:
    """Tells one sink what changes, until it is stopped."""

    def __init__(self, board: LoadBoard, sink: Sink) -> None:
        self._board = board
        self._sink = sink
        self._last: dict[int, Any] = dict(board.loads())
        self._told: dict[tuple[int, int], tuple[int, ...]] = {}
        self._steps: dict[int, int] = {}
        self._timer = self._look_soon()

    def stop(self) -> None:
        """Look no more."""
        self._timer.cancel()

    def _look_soon(self) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(LOOK_S, self._look)

    def _look(self) -> None:
        self._timer = self._look_soon()
        for rank, load in self._board.loads().items():
            last = self._last.get(rank)
            if last is None or load.timestamp != last.timestamp:
                self._last[rank] = load
                if last is not None:
                    self._compare(rank, last, load)

    def _compare(self, rank: int, last: Any, load: Any) -> None:
        tokens, duration_us = _done_since(last, load)
        if load.num_running_reqs or tokens or duration_us:
            self._steps[rank] = step = self._steps.get(rank, 0) + 1
            values = {"duration_us": duration_us} if duration_us else {}
            self._emit(obs.RUNTIME_EVENT_TYPE_FORWARD_PASS, rank, step=step, prompt_tokens=tokens, **values)
        running, waiting = load.num_running_reqs, load.num_waiting_reqs
        if self._is_news(rank, obs.RUNTIME_EVENT_TYPE_BATCH, running):
            self._emit(obs.RUNTIME_EVENT_TYPE_BATCH, rank, running=running)
        if self._is_news(rank, obs.RUNTIME_EVENT_TYPE_QUEUE, running, waiting):
            self._emit(obs.RUNTIME_EVENT_TYPE_QUEUE, rank, running=running, waiting=waiting)

    def _is_news(self, rank: int, kind: int, *values: int) -> bool:
        known, self._told[rank, kind] = self._told.get((rank, kind)), values
        return known != values

    def _emit(self, kind: obs.RuntimeEventType.ValueType, rank: int, **values: int) -> None:
        attributes = {"rank": str(rank)} | {key: str(value) for key, value in values.items()}
        self._sink(RuntimeEvent(kind, time.time_ns(), attributes))


def _done_since(last: Any, load: Any) -> tuple[int, int]:
    """Prompt tokens computed, and microseconds spent on them and on decoding, as far as SGLang times it."""
    decoded_us = (load.decode_moments or [0.0] * 3)[2] - (last.decode_moments or [0.0] * 3)[2]
    return (
        load.total_prefill_uncached_tokens - last.total_prefill_uncached_tokens,
        round(load.total_prefill_busy_us - last.total_prefill_busy_us + decoded_us),
    )
