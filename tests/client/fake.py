"""A scripted server: each test says what every RPC answers, and sees what it was asked."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import Message

from openengine.v1 import discovery_pb2, service_pb2_grpc

MODEL = "tiny"
RELEASE = "d0f29fec31f31db5cfd49cf3e0f67da84d10c709"


def engine_info(**changes: Any) -> discovery_pb2.EngineInfo:
    values: dict[str, Any] = {
        "engine_name": "fake",
        "engine_version": "1.2.3",
        "role": discovery_pb2.ENGINE_ROLE_AGGREGATED,
        "instance_id": "i-1",
        "supported_models": [MODEL],
        "parallelism": {"tensor_parallel_size": 2, "data_parallel_rank": 0},
        "kv_connector": {"enabled": False},
        "schema_revision": 1,
        "minimum_client_revision": 1,
        "schema_release": RELEASE,
    }
    return discovery_pb2.EngineInfo(**(values | changes))


@dataclass(frozen=True)
class Status:
    """A non-OK end of a call."""

    code: grpc.StatusCode
    message: str = ""


class Hang:
    """A call that does not go on; the server notes when it is cancelled."""


HANG = Hang()
Script = Message | Status | Hang | list[Any] | Callable[[Any], Any]


@dataclass
class FakeServer:
    """What to answer, by RPC: a message, a `Status`, `HANG`, a list of these for a stream, or a function of the
    request that returns one of them.
    """

    answers: dict[str, Script] = field(default_factory=lambda: {"GetEngineInfo": engine_info()})
    target: str = ""
    requests: dict[str, list[Any]] = field(default_factory=dict)
    metadata: list[tuple[str, str]] = field(default_factory=list)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    server: grpc.aio.Server | None = None

    async def stop(self) -> None:
        """Go away at once, with everything that runs."""
        assert self.server
        await self.server.stop(0)

    def last(self, rpc: str) -> Any:
        return self.requests[rpc][-1]

    async def respond(self, rpc: str, request: Any, context: Any) -> AsyncGenerator[Any, None]:
        self.requests.setdefault(rpc, []).append(request)
        self.metadata = list(context.invocation_metadata())
        script = self.answers.get(rpc, Status(grpc.StatusCode.UNIMPLEMENTED, f"{rpc} is not scripted"))
        if callable(script):
            script = script(request)
        steps = script if isinstance(script, list) else [script]
        try:
            for step in steps:
                if isinstance(step, Status):
                    await context.abort(step.code, step.message)
                elif isinstance(step, float):
                    await asyncio.sleep(step)
                elif isinstance(step, Hang):
                    await asyncio.sleep(60)
                else:
                    yield step
        except (asyncio.CancelledError, GeneratorExit):
            # A quick client cancels while the response before the hang is still being written.
            if any(isinstance(step, Hang) for step in steps):
                self.cancelled.set()
            raise


def _servicer(fake: FakeServer) -> service_pb2_grpc.OpenEngineServicer:
    def unary(rpc: str) -> Callable[..., Awaitable[Any]]:
        async def answer(self: Any, request: Any, context: Any) -> Any:
            async with contextlib.aclosing(fake.respond(rpc, request, context)) as steps:
                return await anext(steps)

        return answer

    def stream(rpc: str) -> Callable[..., AsyncIterator[Any]]:
        async def answer(self: Any, request: Any, context: Any) -> AsyncIterator[Any]:
            async with contextlib.aclosing(fake.respond(rpc, request, context)) as steps:
                async for step in steps:
                    yield step

        return answer

    streams = ("Generate", "Drain", "SubscribeKvEvents", "SubscribeRuntimeEvents")
    rpcs = [name for name in vars(service_pb2_grpc.OpenEngineServicer) if name[0].isupper()]
    methods = {rpc: stream(rpc) if rpc in streams else unary(rpc) for rpc in rpcs}
    return type("Scripted", (service_pb2_grpc.OpenEngineServicer,), methods)()  # type: ignore[no-any-return]


@contextlib.asynccontextmanager
async def serving(fake: FakeServer) -> AsyncIterator[FakeServer]:
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1)])
    service_pb2_grpc.add_OpenEngineServicer_to_server(_servicer(fake), server)
    port = server.add_insecure_port("127.0.0.1:0")
    fake.target = f"127.0.0.1:{port}"
    fake.server = server
    await server.start()
    try:
        yield fake
    finally:
        await server.stop(None)
