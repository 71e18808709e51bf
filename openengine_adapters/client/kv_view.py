"""The content of a server's prefix cache, as far as its KV events tell."""

from __future__ import annotations

import time
from collections import Counter
from typing import TypeAlias

from openengine.v1 import kv_pb2

# A block may be in several media and cache groups at once, and several times in each.
_Place: TypeAlias = tuple[int, int]


class RankView:
    """One rank's cache: feed it every batch in order, then look at it."""

    def __init__(self) -> None:
        self.sequence_number: int | None = None
        self.skipped = 0  # sequence numbers that never came
        self.batches = 0
        self.stored = 0
        self.removed = 0
        self.cleared = 0
        self.lag: float | None = None  # seconds from the last batch's timestamp to its arrival
        self._copies: dict[bytes, Counter[_Place]] = {}
        self._parent: dict[bytes, bytes] = {}

    def apply(self, batch: kv_pb2.KvEventBatch) -> None:
        """Take one batch in."""
        if self.sequence_number is not None:
            self.skipped += max(0, batch.sequence_number - self.sequence_number - 1)
        self.sequence_number = batch.sequence_number
        self.batches += 1
        if batch.timestamp_unix_nanos:
            self.lag = max(0.0, time.time() - batch.timestamp_unix_nanos / 1e9)
        for event in batch.events:
            match event.WhichOneof("event"):
                case "block_stored":
                    self._store(event.block_stored)
                case "block_removed":
                    self._remove(event.block_removed)
                case "all_blocks_cleared":
                    self.cleared += 1
                    self._copies.clear()
                    self._parent.clear()

    @property
    def blocks(self) -> int:
        """Distinct blocks in the cache."""
        return len(self._copies)

    def chains(self) -> tuple[int, int]:
        """Return how many prefixes end somewhere, and the blocks of the longest one."""
        present = self._copies.keys()
        parents = {self._parent.get(block) for block in present}
        depths: dict[bytes, int] = {}
        for block in present:
            path: list[bytes] = []
            at: bytes | None = block
            while at is not None and at in present and at not in depths:
                depths[at] = 0  # a loop would be the server's fault, and must not be ours
                path.append(at)
                at = self._parent.get(at)
            depth = depths.get(at, 0) if at is not None else 0
            for below in reversed(path):
                depth += 1
                depths[below] = depth
        return len(present - parents), max(depths.values(), default=0)

    def _store(self, event: kv_pb2.BlockStored) -> None:
        parent = event.parent_block_hash.value if event.HasField("parent_block_hash") else None
        for block in event.block_hashes:
            self._copies.setdefault(block.value, Counter())[event.medium, event.group_idx] += 1
            if parent is not None:
                self._parent[block.value] = parent
            parent = block.value
        self.stored += len(event.block_hashes)

    def _remove(self, event: kv_pb2.BlockRemoved) -> None:
        place = event.medium, event.group_idx
        for block in event.block_hashes:
            copies = self._copies.get(block.value, Counter())
            copies[place] -= 1
            if copies[place] <= 0:
                del copies[place]
            if not copies:
                self._copies.pop(block.value, None)
                self._parent.pop(block.value, None)
        self.removed += len(event.block_hashes)


class CacheView:
    """All ranks of one subscription."""

    def __init__(self) -> None:
        self.ranks: dict[int, RankView] = {}

    def apply(self, batch: kv_pb2.KvEventBatch) -> None:
        """Take one batch in, whichever rank it is of."""
        self.ranks.setdefault(batch.data_parallel_rank, RankView()).apply(batch)
