"""All ranks together: followers that run as long as the server is open, and the two RPCs on top of them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass

import grpc
import zmq.asyncio

from openengine.v1 import errors_pb2, kv_pb2
from openengine_adapters.core.errors import EngineFailure, Rejected, invalid
from openengine_adapters.core.journal import Cursor, read
from openengine_adapters.core.kv import discovery
from openengine_adapters.core.kv.channel import Channel, Response
from openengine_adapters.core.kv.discovery import Reachable
from openengine_adapters.core.kv.follower import Follower
from openengine_adapters.core.kv.messages import HASH_ENCODERS
from openengine_adapters.core.kv.source import NativeSource
from openengine_adapters.core.kv.stats import RankStats
from openengine_adapters.engine import KvEventPublisher

log = logging.getLogger(__name__)

READY_S = 5.0
"""How long a subscription waits for an index that is being rebuilt."""

RETRY_S = 1.0
"""Pause before a follower that failed unexpectedly is started again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvOptions:
    """How KV events are offered: `source` is one of `discovery.SOURCES`, `hash_encoding` one of `HASH_ENCODERS`."""

    source: str = "grpc"
    hash_encoding: str = "native"


class KvPlane:
    """Off until it is opened with an engine's publishers."""

    def __init__(self, options: KvOptions) -> None:
        self._options = options
        self._publishers: Sequence[KvEventPublisher] = ()
        self._channels: dict[int, Channel] = {}
        self._followers: list[asyncio.Task[None]] = []
        self._context: zmq.asyncio.Context | None = None

    def open(self, publishers: Sequence[KvEventPublisher]) -> None:
        """Subscribe to every publisher, for as long as the plane is open."""
        if not publishers:
            return
        self._publishers = sorted(publishers, key=lambda publisher: publisher.rank)
        self._context = zmq.asyncio.Context()
        encode = HASH_ENCODERS[self._options.hash_encoding]
        discovery.warn_of_unreachable(self._options.source, self._publishers)
        for publisher in self._publishers:
            channel = self._channels[publisher.rank] = Channel(publisher.rank, encode)
            self._followers.append(
                asyncio.create_task(
                    _follow(self._context, publisher, channel), name=f"kv-events-{publisher.rank}"
                )
            )

    def fail(self, failure: EngineFailure) -> None:
        """End every subscription with `failure` (ERR-04)."""
        for channel in self._channels.values():
            channel.close(failure)

    async def close(self) -> None:
        """Stop following. Safe to call twice."""
        for task in self._followers:
            task.cancel()
        await asyncio.gather(*self._followers, return_exceptions=True)
        self._followers.clear()
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None

    def stats(self) -> list[RankStats]:
        """The counters of every rank."""
        return [channel.read_stats() for channel in self._channels.values()]

    def sources(
        self, request: kv_pb2.GetKvEventSourcesRequest, ranks: range, reachable: Reachable
    ) -> kv_pb2.GetKvEventSourcesResponse:
        """Answer GetKvEventSources; none while KV events are off. Raises `Rejected` for an unknown rank (KVS-01)."""
        wanted = _checked_ranks(request.data_parallel_ranks, ranks)
        return discovery.sources(self._options.source, self._publishers, wanted, reachable)

    async def admit(self, request: kv_pb2.SubscribeKvEventsRequest) -> Subscription:
        """Check a subscription and wait until it can begin. Raises `Rejected` (KVE-03, KVE-06)."""
        if not self._channels:
            raise Rejected(
                grpc.StatusCode.UNIMPLEMENTED,
                "this server publishes no KV events; start it with --kv-events",
            )
        start = request.start_sequence_number
        if request.include_snapshot and start:
            raise invalid(
                "start_sequence_number", "does not go with include_snapshot, which holds all that was before"
            )
        channels = [
            self._channels[rank] for rank in _checked_ranks(request.data_parallel_ranks, list(self._channels))
        ]
        await _wait_ready(channels)
        for channel in channels:
            if start and not channel.replayable <= start <= channel.next:
                raise Rejected(
                    grpc.StatusCode.OUT_OF_RANGE,
                    f"rank {channel.rank} can be replayed from {channel.replayable} to {channel.next}; "
                    "subscribe with include_snapshot instead",
                    field="start_sequence_number",
                    limit=channel.replayable,
                    value=start,
                )
        return Subscription(channels, request.include_snapshot, start)


class Subscription:
    """One admitted subscription; counted while it is entered."""

    def __init__(self, channels: Sequence[Channel], snapshot: bool, start: int) -> None:
        self._channels = channels
        # With a snapshot the position comes with it, when it is taken.
        self._cursors = [] if snapshot else [channel.cursor(start or channel.next) for channel in channels]

    def __enter__(self) -> Subscription:
        for channel in self._channels:
            channel.stats.subscribers += 1
        return self

    def __exit__(self, *_: object) -> None:
        for channel in self._channels:
            channel.stats.subscribers -= 1

    async def responses(self) -> AsyncGenerator[Response, None]:
        """The snapshots, if wanted, then every batch. Ends only by an `EngineFailure`."""
        cursors: list[Cursor[Response]] = self._cursors
        if not cursors:
            for channel in self._channels:
                snapshot, following = await channel.snapshot()
                cursors.append(channel.cursor(following))
                if snapshot is not None:
                    yield snapshot
        try:
            async with contextlib.aclosing(read(cursors)) as batches:
                async for batch in batches:
                    yield batch
        except EngineFailure as failure:
            if failure.code == errors_pb2.ERROR_CODE_OVERLOADED:
                for channel in self._channels:
                    channel.stats.overloaded += 1
            raise


async def _follow(context: zmq.asyncio.Context, publisher: KvEventPublisher, channel: Channel) -> None:
    while True:
        source = NativeSource(context, publisher)
        try:
            await Follower(source, channel).run()
        except Exception:
            log.exception("rank %d: following the KV events failed", publisher.rank)
            channel.restart(0, "following them failed")
        finally:
            source.close()
        await asyncio.sleep(RETRY_S)


async def _wait_ready(channels: Sequence[Channel]) -> None:
    try:
        async with asyncio.timeout(READY_S):
            for channel in channels:
                await channel.wait_ready()
    except TimeoutError:
        raise Rejected(
            grpc.StatusCode.UNAVAILABLE, "the KV events are being synchronised with the engine; try again"
        ) from None


def _checked_ranks(asked: Iterable[int], known: Sequence[int]) -> list[int]:
    """The ranks asked for, each once; all of them when none is named."""
    wanted = list(dict.fromkeys(asked)) or list(known)
    for rank in wanted:
        if rank not in known:
            raise invalid(
                "data_parallel_ranks", f"{rank} is not one of {', '.join(map(str, known))}", value=rank
            )
    return wanted
