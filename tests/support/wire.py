"""What tests need of the wire: a server in this process, and whole requests as one value."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest

from openengine.v1 import generate_pb2, inputs_pb2, service_pb2_grpc
from openengine_adapters.core.kv.plane import KvOptions
from openengine_adapters.core.servicer import OpenEngineServicer
from openengine_adapters.core.watchdog import Limits
from openengine_adapters.engine import Engine, EngineDescription
from openengine_adapters.server import Server

PATIENCE_S = 120.0
"""Longest wait for one request; the real engines share two cores with whatever else runs."""

_numbers = itertools.count()


@dataclass
class Output:
    """One sequence, put together from its deltas."""

    text: str = ""
    tokens: list[generate_pb2.TokenInfo] = field(default_factory=list)
    finished: generate_pb2.GenerationFinished | None = None

    @property
    def ids(self) -> list[int]:
        return [token.token_id for token in self.tokens]

    @property
    def record_text(self) -> str:
        return "".join(token.token for token in self.tokens)

    @property
    def reason(self) -> int:
        assert self.finished is not None
        return self.finished.reason

    @property
    def stop(self) -> generate_pb2.StopMatch:
        assert self.finished is not None
        return self.finished.stop_match


@dataclass
class Answer:
    """One whole stream."""

    responses: list[generate_pb2.GenerateResponse]

    def __post_init__(self) -> None:
        self.outputs: dict[int, Output] = {}
        for response in self.responses:
            event = response.WhichOneof("event")
            if event == "token":
                output = self.outputs.setdefault(response.token.output_index, Output())
                output.text += response.token.text
                output.tokens += response.token.tokens
            elif event == "finished":
                self.outputs.setdefault(response.finished.output_index, Output()).finished = response.finished

    @property
    def first(self) -> Output:
        return self.outputs[0]

    @property
    def usage(self) -> generate_pb2.Usage:
        assert [r.HasField("usage") for r in self.responses] == [False] * (len(self.responses) - 1) + [True]
        return self.responses[-1].usage

    @property
    def prompt(self) -> list[generate_pb2.TokenInfo]:
        (prompt,) = [r.prompt for r in self.responses if r.WhichOneof("event") == "prompt"]
        assert self.responses[0].WhichOneof("event") == "prompt"
        return list(prompt.tokens)


@dataclass
class Wire:
    """A client of one served engine."""

    engine: Any
    servicer: OpenEngineServicer
    description: EngineDescription
    stub: Any
    target: str

    def request(
        self, prompt: str | list[int] = "The capital of France is", **fields: Any
    ) -> generate_pb2.GenerateRequest:
        """A request with an id of its own. Sampling is greedy unless `sampling` says otherwise."""
        fields.setdefault("request_id", f"request-{next(_numbers)}")
        fields.setdefault("model", self.description.model_id)
        fields.setdefault("sampling", generate_pb2.SamplingParams(temperature=0.0))
        if isinstance(prompt, str):
            fields["prompt"] = prompt
        else:
            fields["token_ids"] = inputs_pb2.TokenIds(ids=prompt)
        return generate_pb2.GenerateRequest(**fields)

    async def generate(
        self, prompt: str | list[int] = "The capital of France is", max_tokens: int = 8, **fields: Any
    ) -> Answer:
        """Run one request to its end."""
        fields.setdefault("stopping", generate_pb2.StoppingOptions(max_tokens=max_tokens))
        async with asyncio.timeout(PATIENCE_S):
            return Answer([response async for response in self.stub.Generate(self.request(prompt, **fields))])

    async def accepted(self, prompt: str | list[int] = "The capital of France is", **fields: Any) -> Any:
        """Start a request and return its call once it is accepted."""
        call = self.stub.Generate(self.request(prompt, **fields))
        async with asyncio.timeout(PATIENCE_S):
            await call.initial_metadata()
        return call

    async def refused(
        self, prompt: str | list[int] = "The capital of France is", **fields: Any
    ) -> tuple[grpc.StatusCode, str]:
        """The status of a request that must be refused before any event."""
        fields.setdefault("stopping", generate_pb2.StoppingOptions(max_tokens=4))
        responses: list[Any] = []
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async with asyncio.timeout(PATIENCE_S):
                responses += [
                    response async for response in self.stub.Generate(self.request(prompt, **fields))
                ]
        assert responses == []
        return caught.value.code(), caught.value.details() or ""

    async def until_idle(self) -> None:
        """Wait until neither the table nor the engine has a request left."""
        async with asyncio.timeout(PATIENCE_S):
            while len(self.servicer.requests) or self.engine.unfinished():
                await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def serving(
    engine: Engine, limits: Limits | None = None, kv: KvOptions | None = None
) -> AsyncIterator[Wire]:
    """Serve `engine` in this process on a free loopback port."""
    servicer = OpenEngineServicer(engine, "test-instance", "v1", limits, kv=kv)
    server = Server(servicer, "127.0.0.1", 0)
    port = await server.start()
    description = await engine.start()
    servicer.opened(description)
    watch = asyncio.create_task(servicer.watchdog.run())
    target = f"127.0.0.1:{port}"
    try:
        async with grpc.aio.insecure_channel(target) as channel:
            yield Wire(engine, servicer, description, service_pb2_grpc.OpenEngineStub(channel), target)
    finally:
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        await servicer.closed()
        await server.stop(0)
        await engine.stop()
