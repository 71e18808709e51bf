# SPDX-License-Identifier: Apache-2.0
"""A tiny server for tests of the suite itself: discovery, health, load, and a Generate that counts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from openengine.v1 import discovery_pb2, generate_pb2, lifecycle_pb2, model_pb2, observability_pb2
from openengine.v1.service_pb2_grpc import OpenEngineServicer, add_OpenEngineServicer_to_server

MODEL = "fake-model"


class FakeEngine(OpenEngineServicer):
    """Answers each request with the tokens 1 … max_tokens; `token` is what it wants to be called with."""

    def __init__(self, token: str = "") -> None:
        self.token = token
        self.running = 0
        self.calls = 0

    async def _admit(self, context: Any) -> None:
        self.calls += 1
        given = dict(context.invocation_metadata()).get("authorization", "")
        if self.token and given != f"Bearer {self.token}":
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "no valid token")

    async def GetEngineInfo(self, request: Any, context: Any) -> discovery_pb2.EngineInfo:
        await self._admit(context)
        return discovery_pb2.EngineInfo(
            engine_name="fake",
            engine_version="1",
            role=discovery_pb2.ENGINE_ROLE_AGGREGATED,
            instance_id="fake-1",
            supported_models=[MODEL],
            schema_revision=1,
            minimum_client_revision=1,
            schema_release="v1.0.0",
        )

    async def GetModelInfo(self, request: Any, context: Any) -> model_pb2.ModelInfo:
        if request.model != MODEL:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"{request.model!r} is unknown")
        return model_pb2.ModelInfo(
            model_id=MODEL,
            supports_text_input=True,
            supports_token_ids_input=False,
            generation=model_pb2.GenerationCapabilities(),
        )

    async def Health(self, request: Any, context: Any) -> lifecycle_pb2.HealthResponse:
        return lifecycle_pb2.HealthResponse(state=lifecycle_pb2.HEALTH_STATE_READY)

    async def GetLoad(self, request: Any, context: Any) -> observability_pb2.LoadInfo:
        load = observability_pb2.LoadInfo(instance_id="fake-1", queued_requests=0)
        load.running_requests = self.running
        return load

    async def Generate(
        self, request: generate_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[generate_pb2.GenerateResponse]:
        count = request.stopping.max_tokens or 8
        self.running += 1
        try:
            for number in range(1, count + 1):
                info = generate_pb2.TokenInfo(token_id=number)
                token = generate_pb2.TokenOutput(output_index=0, tokens=[info], text=f"{number} ")
                yield generate_pb2.GenerateResponse(request_id=request.request_id, token=token)
                await asyncio.sleep(0.001)
            yield generate_pb2.GenerateResponse(
                request_id=request.request_id,
                finished=generate_pb2.GenerationFinished(
                    output_index=0, reason=generate_pb2.FINISH_REASON_LENGTH
                ),
                usage=generate_pb2.Usage(prompt_tokens=3, completion_tokens=count, total_tokens=count + 3),
            )
        finally:
            self.running -= 1


def fake_engine(token: str = "") -> FakeEngine:
    """A fake engine; what it leaves out of the service stays UNIMPLEMENTED."""
    return FakeEngine(token)  # type: ignore[abstract]


class Served:
    """A fake engine on a port; `stop` takes it away in the middle of a run."""

    def __init__(self, engine: FakeEngine, server: grpc.aio.Server, port: int) -> None:
        self.engine = engine
        self.target = f"127.0.0.1:{port}"
        self._server = server
        self._stopping: asyncio.Future[None] | None = None

    async def stop(self) -> None:
        """Stop the server; once, because grpc crashes when it is told so again in the meantime."""
        if self._stopping is None:
            self._stopping = asyncio.ensure_future(self._server.stop(0))
        await asyncio.shield(self._stopping)


@asynccontextmanager
async def serving(engine: FakeEngine | None = None) -> AsyncIterator[Served]:
    """Serve a fake engine on a free port."""
    engine = engine or fake_engine()
    server = grpc.aio.server()
    add_OpenEngineServicer_to_server(engine, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield Served(engine, server, port)
    finally:
        await server.stop(0)
