"""A served fake engine, on a free loopback port."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest

from openengine.v1 import generate_pb2, inputs_pb2, service_pb2_grpc
from openengine_adapters.core.servicer import OpenEngineServicer
from openengine_adapters.core.watchdog import Limits
from openengine_adapters.server import Server
from tests.core.fake_engine import FakeEngine

SOON_S = 10.0


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition, at most `SOON_S`."""
    async with asyncio.timeout(SOON_S):
        while not condition():
            await asyncio.sleep(0.005)


@dataclass
class Served:
    """A server, its engine and a client stub."""

    engine: FakeEngine
    servicer: OpenEngineServicer
    server: Server
    stub: Any
    target: str
    statuses: dict[str, grpc.StatusCode] = field(default_factory=dict)

    def request(self, request_id: str = "r1", **fields: object) -> generate_pb2.GenerateRequest:
        """A small valid request, with `fields` over it."""
        values: dict[str, Any] = {"request_id": request_id, "model": "fake-model", **fields}
        if not {"prompt", "token_ids"} & set(values):
            values["token_ids"] = inputs_pb2.TokenIds(ids=[1, 2, 3])
        return generate_pb2.GenerateRequest(**values)

    async def collect(self, request: generate_pb2.GenerateRequest) -> list[generate_pb2.GenerateResponse]:
        """Every response of one request."""
        async with asyncio.timeout(SOON_S):
            return [response async for response in self.stub.Generate(request)]

    async def refused(self, call: Any) -> tuple[grpc.StatusCode, str]:
        """The status of a call that must be refused, with no response before it."""
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            pytest.fail(f"not refused: {await self._answer(call)}")
        return caught.value.code(), caught.value.details() or ""

    async def _answer(self, call: Any) -> Any:
        async with asyncio.timeout(SOON_S):
            return [response async for response in call] if hasattr(call, "__aiter__") else await call

    async def accepted(self, request: generate_pb2.GenerateRequest) -> Any:
        """Start a request and wait for its initial metadata, which says that it was accepted."""
        call = self.stub.Generate(request)
        async with asyncio.timeout(SOON_S):
            await call.initial_metadata()
        return call


@contextlib.asynccontextmanager
async def serve(
    engine: FakeEngine, limits: Limits | None = None, *, opened: bool = True
) -> AsyncIterator[Served]:
    """Serve `engine`; not `opened` is a server whose engine is still starting."""
    servicer = OpenEngineServicer(engine, "instance-1", "v1", limits or Limits(period_s=0.02))
    server = Server(servicer, "127.0.0.1", 0)
    port = await server.start()
    if opened:
        servicer.opened(await engine.start())
    watch = asyncio.create_task(servicer.watchdog.run())
    target = f"127.0.0.1:{port}"
    try:
        async with grpc.aio.insecure_channel(target) as channel:
            yield Served(engine, servicer, server, service_pb2_grpc.OpenEngineStub(channel), target)
    finally:
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        await server.stop(0)


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    """A ready server over a fake engine."""
    async with serve(FakeEngine()) as one:
        yield one
