"""The engine's load, as vLLM's scheduler reports it after each step."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.metrics.stats import IterationStats, SchedulerStats

from openengine_adapters.engine import LoadSnapshot, RankLoad
from openengine_adapters.vllm.steps import StepEvents


class LoadBoard:
    """The last scheduler statistics of each data-parallel rank.

    vLLM calls a stat logger for each rank after each of its steps, on the event loop, and not at all while it
    is idle; the last call of a busy period says zero. `events` is told of each step while somebody wants to know.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.events: StepEvents | None = None
        self._steps: Counter[int] = Counter()
        self._stats: dict[int, SchedulerStats] = {}
        self._detailed = False
        self._taken_at = time.time_ns()

    def logger(self, config: VllmConfig, engine_index: int = 0) -> StatLoggerBase:
        """vLLM's factory for one rank's logger."""
        self._detailed = bool(config.observability_config.enable_logging_iteration_details)
        return _RankLogger(self, engine_index)

    def record(self, rank: int, stats: SchedulerStats, outputs: IterationStats | None) -> None:
        """Note one step of one rank."""
        self.steps += 1
        self._steps[rank] += 1
        self._stats[rank] = stats
        self._taken_at = time.time_ns()
        if self.events is not None:
            self.events.record(rank, self._steps[rank], stats, outputs)

    def steps_of(self, rank: int) -> int:
        """Steps of one rank so far."""
        return self._steps[rank]

    def snapshot(self, ranks: range, total_kv_blocks: int | None) -> LoadSnapshot:
        """The load of every rank; vLLM's block total is the sum over the ranks, and tells no more (LOAD-03)."""
        totals: list[int | None] = [None] * len(ranks)
        if total_kv_blocks is not None:
            each, more = divmod(total_kv_blocks, len(ranks))
            totals = [each + (place < more) for place in range(len(ranks))]
        loads = [self._rank(rank, total) for rank, total in zip(ranks, totals, strict=True)]
        return LoadSnapshot(loads, self._taken_at)

    def _rank(self, rank: int, total_kv_blocks: int | None) -> RankLoad:
        stats = self._stats.get(rank)
        if stats is None:
            # No step yet: the engine has done nothing, and zero is what it holds.
            used = None if total_kv_blocks is None else 0
            return RankLoad(
                rank=rank,
                running_requests=0,
                queued_requests=0,
                used_kv_blocks=used,
                total_kv_blocks=total_kv_blocks,
            )
        used = None if total_kv_blocks is None else round(stats.kv_cache_usage * total_kv_blocks)
        prefill, decode = self._batch_sizes(stats)
        return RankLoad(
            rank=rank,
            running_requests=stats.num_running_reqs,
            queued_requests=stats.num_waiting_reqs + stats.num_skipped_waiting_reqs,
            used_kv_blocks=used,
            total_kv_blocks=total_kv_blocks,
            prefill_batch_size=prefill,
            decode_batch_size=decode,
        )

    def _batch_sizes(self, stats: SchedulerStats) -> tuple[int | None, int | None]:
        """Requests that the last step computed prompts of, and decoded, where vLLM counts them."""
        if not self._detailed:
            return None, None
        details = stats.iteration_details
        if details is None or not stats.num_running_reqs:
            return 0, 0
        return details.num_ctx_requests, details.num_generation_requests


class _RankLogger(StatLoggerBase):  # type: ignore[misc]  # untyped where vLLM is not installed
    def __init__(self, board: LoadBoard, rank: int) -> None:
        self._board = board
        self._rank = rank

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        if scheduler_stats is not None:
            self._board.record(self._rank, scheduler_stats, iteration_stats)

    def log_engine_initialized(self) -> None:
        """Nothing to say at start."""
