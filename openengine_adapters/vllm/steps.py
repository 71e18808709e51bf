"""Runtime events out of vLLM's statistics of each step. Keys: core/runtime_events.py.

vLLM counts what a step computes of prompts, and how long the model runs, only with its own flag
--enable-logging-iteration-details; without it those keys are left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from vllm.v1.metrics.stats import IterationStats, SchedulerStats

from openengine.v1 import observability_pb2 as obs
from openengine_adapters.engine import RuntimeEvent

Sink = Callable[[RuntimeEvent], None]


class StepEvents:
    """Turns the statistics of steps into events for one sink."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._queue: dict[int, tuple[int, int]] = {}
        self._batch: dict[int, dict[str, int]] = {}

    def record(self, rank: int, step: int, stats: SchedulerStats, outputs: IterationStats | None) -> None:
        """Tell what one step of a rank did."""
        batch = _batch(stats, outputs)
        if batch != self._batch.get(rank):
            self._batch[rank] = batch
            self._emit(obs.RUNTIME_EVENT_TYPE_BATCH, rank, **batch)
        details = stats.iteration_details
        if outputs is not None or stats.num_running_reqs or details is not None:
            self._emit(obs.RUNTIME_EVENT_TYPE_FORWARD_PASS, rank, step=step, **_forward(details, outputs))
        for transfer in _transfers(stats.kv_connector_stats or {}):
            self._emit(obs.RUNTIME_EVENT_TYPE_TRANSFER, rank, **transfer)
        queue = stats.num_running_reqs, stats.num_waiting_reqs + stats.num_skipped_waiting_reqs
        if queue != self._queue.get(rank):
            self._queue[rank] = queue
            self._emit(obs.RUNTIME_EVENT_TYPE_QUEUE, rank, running=queue[0], waiting=queue[1])

    def _emit(self, kind: obs.RuntimeEventType.ValueType, rank: int, **values: object) -> None:
        attributes = {"rank": str(rank)} | {key: str(value) for key, value in values.items()}
        self._sink(RuntimeEvent(kind, time.time_ns(), attributes))


def _batch(stats: SchedulerStats, outputs: IterationStats | None) -> dict[str, int]:
    """Requests in the batch; those that decode are known without details too, as long as they put something out."""
    batch = {"running": stats.num_running_reqs}
    if (details := stats.iteration_details) is not None:
        batch |= {"prefill": details.num_ctx_requests, "decode": details.num_generation_requests}
    else:
        batch["decode"] = 0 if outputs is None else len(outputs.inter_token_latencies_iter)
    return batch


def _forward(details: Any, outputs: IterationStats | None) -> dict[str, int]:
    values = {"generated_tokens": 0, "generated_requests": 0}
    if outputs is not None:
        firsts, others = outputs.time_to_first_tokens_iter, outputs.inter_token_latencies_iter
        values = {
            "generated_tokens": outputs.num_generation_tokens,
            "generated_requests": len(firsts) + len(others),
        }
    if details is not None:
        values |= {
            "duration_us": round(details.elapsed_ms * 1000),
            "prompt_tokens": details.num_ctx_tokens,
            "prompt_requests": details.num_ctx_requests,
        }
    return values


def _transfers(stats: Mapping[str, Any]) -> Iterator[dict[str, object]]:
    """The transfers of NIXL's statistics, also where a MultiConnector has them below its own."""
    for value in stats.values():
        if isinstance(value, Mapping):
            yield from _transfers(value)
    durations, sizes = stats.get("transfer_duration"), stats.get("bytes_transferred")
    if isinstance(durations, list) and isinstance(sizes, list):
        for seconds, size in zip(durations, sizes, strict=False):
            yield {"event": "transferred", "bytes": size, "duration_us": round(seconds * 1e6)}
    failed = stats.get("num_failed_transfers")
    if isinstance(failed, list):
        for _ in range(sum(failed)):
            yield {"event": "failed"}
