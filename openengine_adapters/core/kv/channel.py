"""One data-parallel rank: the index of its cache, and the journal that its subscribers read."""

from __future__ import annotations

import asyncio
import logging
import time

from openengine.v1 import kv_pb2
from openengine_adapters.core.errors import EngineFailure
from openengine_adapters.core.journal import Cursor, Journal
from openengine_adapters.core.kv.index import BlockIndex
from openengine_adapters.core.kv.messages import CLEARED, HashEncoder, event_message
from openengine_adapters.core.kv.native import Event, Removed, Stored, decode
from openengine_adapters.core.kv.stats import RankStats

log = logging.getLogger(__name__)

KEPT_BATCHES = 8192
KEPT_BYTES = 64 * 1024 * 1024
"""What a rank keeps for replay and for slow subscribers: so many batches, of so many bytes together."""

SNAPSHOT_REST = 10
"""After a snapshot was made, so many times as long passes before the next: those who wait share it."""

Response = kv_pb2.SubscribeKvEventsResponse


class Channel:
    """What the engine published, in order, from one side; snapshots and cursors on the other.

    Positions in the journal are the engine's own sequence numbers. `last_payload` is the newest batch as it came, by
    which a replay shows that it belongs to the same history.
    """

    def __init__(self, rank: int, encode: HashEncoder) -> None:
        self.rank = rank
        self.last_payload: bytes | None = None
        self.stats = RankStats(rank)
        self._encode = encode
        self._index = BlockIndex(encode)
        self._journal = self._new_journal(0)
        self._timestamp_ns = 0
        self._snapshot: Response | None = None
        self._making: asyncio.Future[None] | None = None
        self._rested_at = 0.0
        self._ready = asyncio.Event()

    # ------------------------------------------------------------------------------------- the engine's side

    @property
    def next(self) -> int:
        """The sequence number that has to come next."""
        return self._journal.next

    def apply(self, number: int, payload: bytes) -> None:
        """Take in the batch numbered `next`."""
        assert number == self.next
        batch = decode(payload)
        message = kv_pb2.KvEventBatch(
            sequence_number=number, timestamp_unix_nanos=batch.timestamp_ns, data_parallel_rank=self.rank
        )
        for event in batch.events:
            try:
                message.events.append(event_message(event, self._encode))
            except Exception:  # values of a type that the contract has no place for
                batch.skipped.events += 1
                continue
            self._index.apply(event, message.events[-1])
            self._count(event)
        if batch.skipped.payloads or batch.skipped.events:
            log.warning(
                "rank %d: KV batch %d is not understood in full: %s", self.rank, number, batch.skipped
            )
        self.last_payload = payload
        self._timestamp_ns = batch.timestamp_ns
        self.stats.batches += 1
        self.stats.skipped.add(batch.skipped)
        self.stats.lag_s = max(0.0, time.time() - batch.timestamp_ns / 1e9)
        self._journal.append(Response(batch=message), len(payload))

    def _count(self, event: Event) -> None:
        if isinstance(event, Stored):
            self.stats.stored_blocks += len(event.hashes)
        elif isinstance(event, Removed):
            self.stats.removed_blocks += len(event.hashes)
        else:
            self.stats.cleared += 1

    def restart(self, number: int, reason: str) -> None:
        """The history before `number` is unknown: end the subscribers' streams and begin anew (KVE-02)."""
        log.warning("rank %d: KV events begin anew at %d: %s", self.rank, number, reason)
        self.stats.restarts += 1
        self._ready.clear()
        self._journal.close(
            EngineFailure(
                f"the KV events of rank {self.rank} are no longer continuous: {reason}; "
                "subscribe again with include_snapshot",
                retryable=True,
                details={"reason": "kv_events_lost", "field": "data_parallel_ranks", "value": self.rank},
            )
        )
        self._journal = self._new_journal(number)
        self._index.restart(complete=number == 0)
        self._snapshot = None
        self.last_payload = None

    def synchronised(self) -> None:
        """All that the publisher still had is in the index: subscriptions may begin."""
        if not self._ready.is_set():
            self._ready.set()
            log.info(
                "rank %d: %d blocks known, next KV batch is %d%s",
                self.rank, len(self._index), self.next, "" if self._index.complete else "; the history is not complete",
            )  # fmt: skip

    def close(self, failure: EngineFailure) -> None:
        """End every subscription, now and later ones too."""
        self._journal.close(failure)

    # --------------------------------------------------------------------------------- the subscribers' side

    async def wait_ready(self) -> None:
        """Wait until subscriptions may begin."""
        await self._ready.wait()

    @property
    def replayable(self) -> int:
        """The oldest sequence number that a subscription may begin at (KVE-03)."""
        return self._journal.replayable

    def cursor(self, number: int) -> Cursor[Response]:
        """Read from `number` on."""
        return Cursor(self._journal, number)

    async def snapshot(self) -> tuple[Response | None, int]:
        """The cache's content as one batch, and the number of the batch after it (KVE-04).

        The batch clears, then stores each copy of each block. There is none before the engine's first batch, which
        is then all the content there is.
        """
        while self.next:
            if self._snapshot is None or self._snapshot.batch.sequence_number + 1 != self.next:
                if self._making is None:
                    loop = asyncio.get_running_loop()
                    self._making = loop.create_future()
                    loop.call_at(self._rested_at, self._make_snapshot, self._making)
                await asyncio.shield(self._making)
            if self._snapshot is not None:  # else the history began anew in the meantime
                return self._snapshot, self._snapshot.batch.sequence_number + 1
        return None, 0

    def _make_snapshot(self, made: asyncio.Future[None]) -> None:
        clock = asyncio.get_running_loop().time
        began = clock()
        self._making = None
        try:
            self._snapshot = self._take_snapshot() if self.next else None
        except Exception as error:
            made.set_exception(error)
        else:
            made.set_result(None)
        self._rested_at = clock() + SNAPSHOT_REST * (clock() - began)

    def _take_snapshot(self) -> Response:
        head = kv_pb2.KvEventBatch(
            sequence_number=self.next - 1,
            timestamp_unix_nanos=self._timestamp_ns,
            data_parallel_rank=self.rank,
            events=[CLEARED],
        )
        snapshot = Response(batch=head)
        snapshot.batch.MergeFromString(b"".join(self._index.records()))
        return snapshot

    def read_stats(self) -> RankStats:
        """The counters, with those that say "now" brought up to date."""
        self.stats.blocks = len(self._index)
        self.stats.complete = self._index.complete
        self.stats.unknown_removals = self._index.unknown_removals
        self.stats.next_sequence_number = self.next
        return self.stats

    def _new_journal(self, begin: int) -> Journal[Response]:
        return Journal(begin, max_items=KEPT_BATCHES, max_bytes=KEPT_BYTES)
