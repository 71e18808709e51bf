"""The engine's load, as SGLang's schedulers publish it in shared memory after each step."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Mapping
from typing import Any

from openengine_adapters.engine import LoadSnapshot, RankLoad

ATTEMPTS = 5
"""Tries to read while a scheduler writes; a write takes microseconds."""


class LoadBoard:
    """The last load of each data-parallel rank.

    SGLang's own reader would wait for a scheduler that was stopped in the middle of a write, and with it the whole
    server; this one keeps what it had.
    """

    def __init__(self, manager: Any, page_size: int) -> None:
        self._manager = manager
        self._reader = manager.load_snapshot_reader
        self._page_size = page_size
        self._last: dict[int, Any] = {}
        self._steps = 0
        self._progress: object = None

    def snapshot(self) -> LoadSnapshot:
        """The load of every rank after its last step."""
        self._read()
        taken_at = max((load.timestamp for load in self._last.values()), default=0) or time.time()
        return LoadSnapshot([self._rank(load) for _, load in sorted(self._last.items())], int(taken_at * 1e9))

    def loads(self) -> Mapping[int, Any]:
        """What SGLang itself publishes, by rank."""
        self._read()
        return self._last

    def steps(self, *, compiling: bool) -> int:
        """Signs of life so far: outputs that came, and steps of a scheduler that has work.

        An idle scheduler publishes as well, which says nothing about a request that got lost on its way, so that
        only a working one counts; `compiling` says that its work is a guide to compile, which it does not count.
        """
        self._read()
        progress = (
            self._manager.last_receive_tstamp,
            [
                load.timestamp
                for load in self._last.values()
                if compiling or load.num_running_reqs or load.num_waiting_reqs
            ],
        )
        if progress != self._progress:
            self._progress = progress
            self._steps += 1
        return self._steps

    def busy_ranks(self) -> dict[int, int]:
        """The time of the last step, in nanoseconds, of each rank that ran or queued something after it."""
        return {
            rank: int(load.timestamp * 1e9)
            for rank, load in self.loads().items()
            if load.num_running_reqs or load.num_waiting_reqs
        }

    def _rank(self, load: Any) -> RankLoad:
        return RankLoad(
            rank=load.dp_rank,
            running_requests=load.num_running_reqs,
            queued_requests=load.num_waiting_reqs,
            used_kv_blocks=-(-load.num_used_tokens // self._page_size),
            total_kv_blocks=load.max_total_num_tokens // self._page_size,
            running_tokens=load.num_used_tokens,
            waiting_tokens=max(0, load.num_total_tokens - load.num_used_tokens),
        )

    def _read(self) -> None:
        for _ in range(ATTEMPTS):
            loads = self._try_read()
            if loads is not None:
                self._last.update((load.dp_rank, load) for load in loads)
                return

    def _try_read(self) -> list[Any] | None:
        reader = self._reader
        if hasattr(reader, "poll"):  # several nodes: what came over the network goes to shared memory first
            reader.poll()
            reader = reader._shm_reader
        if not reader._attach():
            return None
        try:
            fcntl.flock(reader.fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        try:
            slots = [reader._read_slot(rank) for rank in range(reader.dp_size)]
        finally:
            fcntl.flock(reader.fd, fcntl.LOCK_UN)
        return [slot for slot in slots if slot is not None]
