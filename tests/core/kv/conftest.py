"""A served engine whose KV events come from a publisher that the test controls."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest

from openengine.v1 import kv_pb2, service_pb2_grpc
from openengine_adapters.core.kv.plane import KvOptions
from openengine_adapters.core.servicer import OpenEngineServicer
from openengine_adapters.core.watchdog import Limits
from openengine_adapters.engine import KvEventPublisher, Parallelism
from openengine_adapters.server import Server
from tests.core.fake_engine import FakeEngine
from tests.core.kv.publisher import FakePublisher, publishing

SOON_S = 10.0


class KvEngine(FakeEngine):
    """A fake engine with KV events."""

    def __init__(self, publishers: Sequence[KvEventPublisher], **changes: object) -> None:
        super().__init__(parallelism=Parallelism(data_parallel_size=len(publishers) or 1), **changes)
        self._publishers = publishers

    def kv_event_publishers(self) -> Sequence[KvEventPublisher]:
        return self._publishers


@dataclass
class KvServed:
    """A server and a client stub."""

    servicer: OpenEngineServicer
    stub: Any
    target: str
    calls: list[Any] = field(default_factory=list)

    async def subscribe(self, **fields: Any) -> Subscriber:
        """An accepted subscription."""
        call = self.stub.SubscribeKvEvents(kv_pb2.SubscribeKvEventsRequest(**fields))
        async with asyncio.timeout(SOON_S):
            await call.initial_metadata()
        return Subscriber(call)

    async def refused(self, **fields: Any) -> tuple[grpc.StatusCode, str]:
        """The status of a subscription that must be refused."""
        call = self.stub.SubscribeKvEvents(kv_pb2.SubscribeKvEventsRequest(**fields))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(call.read(), SOON_S)
        return caught.value.code(), caught.value.details() or ""


@dataclass
class Subscriber:
    """One subscription, read by the test."""

    call: Any

    async def read(self) -> kv_pb2.SubscribeKvEventsResponse:
        async with asyncio.timeout(SOON_S):
            response = await self.call.read()
        assert response is not grpc.aio.EOF
        return response  # type: ignore[no-any-return]

    async def batch(self) -> kv_pb2.KvEventBatch:
        response = await self.read()
        assert response.HasField("batch"), response
        return response.batch

    async def batches(self, upto: int) -> list[kv_pb2.KvEventBatch]:
        """Every batch up to the one numbered `upto`."""
        found = [await self.batch()]
        while found[-1].sequence_number < upto:
            found.append(await self.batch())
        return found

    async def error(self) -> Any:
        """The EngineError that must come, after any batches, and end the stream with OK."""
        while (response := await self.read()).HasField("batch"):
            pass
        async with asyncio.timeout(SOON_S):
            assert await self.call.read() is grpc.aio.EOF
            assert await self.call.code() == grpc.StatusCode.OK
        return response.error


@contextlib.asynccontextmanager
async def kv_serving(
    publishers: Sequence[KvEventPublisher], options: KvOptions | None = None, limits: Limits | None = None
) -> AsyncIterator[KvServed]:
    """Serve an engine with these publishers."""
    engine = KvEngine(publishers)
    servicer = OpenEngineServicer(engine, "instance-1", "v1", limits or Limits(period_s=0.02), kv=options)
    server = Server(servicer, "127.0.0.1", 0)
    port = await server.start()
    servicer.opened(await engine.start())
    watch = asyncio.create_task(servicer.watchdog.run())
    engine.dead = False
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield KvServed(servicer, service_pb2_grpc.OpenEngineStub(channel), f"127.0.0.1:{port}")
    finally:
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        await servicer.closed()
        await server.stop(0)


@pytest.fixture
async def publisher() -> AsyncIterator[FakePublisher]:
    async with publishing() as one:
        yield one


@pytest.fixture
async def kv(publisher: FakePublisher) -> AsyncIterator[KvServed]:
    """A server that follows `publisher` and is connected to it."""
    async with kv_serving([publisher.describe()]) as served:
        await publisher.subscribed()
        yield served
