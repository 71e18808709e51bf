"""A task server in a process of its own, and its client."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping

import grpc

from openengine.v1 import observability_pb2, service_pb2_grpc
from openengine_adapters.engine import EngineDescription
from tests.support.server import serving
from tests.support.tasks.cases import model
from tests.support.wire import PATIENCE_S, Wire


@contextlib.asynccontextmanager
async def served_apart(
    engine: str, name: str, *flags: str, env: Mapping[str, str] | None = None
) -> AsyncIterator[Wire]:
    """Serve a model in float32, so that it agrees with the reference to many digits.

    There is no engine to look into: the wire's `engine` and `servicer` are None.
    """
    folder = str(model(name))
    starting = serving(engine, name, ["--dtype", "float32", *flags], env)
    server = await asyncio.to_thread(starting.__enter__)
    try:
        about = EngineDescription(engine_name=engine, engine_version="", model_id=folder, vocab_size=0)
        async with grpc.aio.insecure_channel(server.target) as channel:
            stub = service_pb2_grpc.OpenEngineStub(channel)
            yield Wire(engine=None, servicer=None, description=about, stub=stub, target=server.target)  # type: ignore[arg-type]
    finally:
        await asyncio.to_thread(starting.__exit__, None, None, None)


async def load(wire: Wire) -> int:
    """Requests that the engine runs or has waiting."""
    found = await wire.stub.GetLoad(observability_pb2.GetLoadRequest())
    return int(found.running_requests + found.queued_requests)


async def until_idle(wire: Wire) -> None:
    """Wait until the engine has no request left."""
    async with asyncio.timeout(PATIENCE_S):
        while await load(wire):
            await asyncio.sleep(0.02)
