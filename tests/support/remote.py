"""Servers in processes of their own, and a client of each, for tests that need more than one engine."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import grpc

from openengine.v1 import discovery_pb2, service_pb2_grpc
from tests.support import cpu_env
from tests.support.server import Server
from tests.support.wire import PATIENCE_S, Wire


def server(engine: str, model: str, flags: Sequence[str], env: Mapping[str, str] | None = None) -> Server:
    """A server that is not started; `flags` come behind those of `cpu_env`, and override them."""
    return Server(engine, [*cpu_env.flags(engine, model), *flags], {**cpu_env.env(engine), **(env or {})})


@contextlib.contextmanager
def running(*servers: Server) -> Iterator[None]:
    """All of them READY, having started at the same time; the logs are kept only when something failed."""
    for one in servers:
        one.start()
    try:
        for one in servers:
            one.wait_ready()
        yield
    finally:
        for one in servers:
            one.stop()
    for one in servers:
        one.log.unlink()


@contextlib.asynccontextmanager
async def client(target: str) -> AsyncIterator[Wire]:
    """A client of the server at `target`; what it has in common with one in this process is its wire."""
    async with grpc.aio.insecure_channel(target) as channel:
        stub: Any = service_pb2_grpc.OpenEngineStub(channel)
        info = await stub.GetEngineInfo(discovery_pb2.GetEngineInfoRequest(), timeout=PATIENCE_S)
        description = SimpleNamespace(model_id=info.supported_models[0])
        yield Wire(None, cast(Any, None), cast(Any, description), stub, target)
