"""GetLoad: the engine's own snapshot, shared by all pollers (LOAD-01 … LOAD-04)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from openengine.v1 import observability_pb2
from openengine_adapters.engine import Engine, LoadSnapshot, RankLoad

FRESH_S = 0.05
"""How old, in seconds, an answer may be beyond the engine's last step (LOAD-04)."""

_RANK_FIELDS = (
    "running_requests",
    "queued_requests",
    "used_kv_blocks",
    "total_kv_blocks",
    "prefill_batch_size",
    "decode_batch_size",
)
_TOTAL_FIELDS = (*_RANK_FIELDS, "running_tokens", "waiting_tokens")


class LoadReader:
    """Reads the engine's load at most once in 50 ms, whatever the number of pollers."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = asyncio.Lock()
        self._read_at = float("-inf")
        self._snapshot: LoadSnapshot | None = None

    async def read(self) -> LoadSnapshot:
        """Return a snapshot no older than `FRESH_S`."""
        async with self._lock:
            now = asyncio.get_running_loop().time()
            if self._snapshot is None or now - self._read_at >= FRESH_S:
                self._snapshot = await self._engine.load()
                self._read_at = now
            return self._snapshot


def load_info(
    snapshot: LoadSnapshot, instance_id: str, active_kv_sessions: int | None, per_rank: bool
) -> observability_pb2.LoadInfo:
    """Build the answer; totals are sums over the ranks, so both always agree (LOAD-02)."""
    info = observability_pb2.LoadInfo(
        instance_id=instance_id,
        timestamp_unix_nanos=snapshot.taken_at,
        active_kv_sessions=active_kv_sessions,
        attributes=dict(snapshot.attributes),
    )
    for name in _TOTAL_FIELDS:
        total = _sum(getattr(rank, name) for rank in snapshot.ranks)
        if total is not None:
            setattr(info, name, total)
    if per_rank:
        info.ranks.extend(_rank_info(rank) for rank in snapshot.ranks)
    return info


def _rank_info(rank: RankLoad) -> observability_pb2.RankLoadInfo:
    info = observability_pb2.RankLoadInfo(data_parallel_rank=rank.rank)
    for name in _RANK_FIELDS:
        value = getattr(rank, name)
        if value is not None:
            setattr(info, name, value)
    return info


def _sum(values: Iterable[int | None]) -> int | None:
    """The sum, None when one of the values is unknown: a part is not the whole."""
    known = list(values)
    if not known or None in known:
        return None
    return sum(value for value in known if value is not None)
