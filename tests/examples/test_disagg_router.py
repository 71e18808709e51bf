"""The disaggregated router on two reference servers is one aggregated server to its caller (PD-02)."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc

from examples.disagg_router import Router
from openengine.v1 import discovery_pb2, generate_pb2
from openengine_adapters.reference.engine import ReferenceEngine
from openengine_adapters.reference.settings import Settings
from tests.support.wire import Answer, Wire, serving

PROMPT = "The old house by the river was small, and every morning"


@contextlib.asynccontextmanager
async def routed() -> AsyncIterator[tuple[Router, Wire]]:
    """A router, and its prefill server."""
    async with (
        serving(ReferenceEngine(Settings(role=discovery_pb2.ENGINE_ROLE_PREFILL))) as prefill,
        serving(ReferenceEngine(Settings(role=discovery_pb2.ENGINE_ROLE_DECODE))) as decode,
        grpc.aio.insecure_channel(prefill.target) as one,
        grpc.aio.insecure_channel(decode.target) as other,
    ):
        router = Router(one, other)
        await router.start()
        yield router, prefill


def request(wire: Wire, **fields: Any) -> generate_pb2.GenerateRequest:
    fields.setdefault("stopping", generate_pb2.StoppingOptions(max_tokens=8))
    return wire.request(PROMPT, **fields)


async def answered(router: Router, asked: generate_pb2.GenerateRequest) -> Answer:
    return Answer([response async for response in router.generate(asked)])


async def test_the_answer_is_the_aggregated_one() -> None:
    async with serving(ReferenceEngine(Settings())) as plain:
        expected = await plain.generate(PROMPT)
    async with routed() as (router, prefill):
        answer = await answered(router, request(prefill))
        assert answer.first.ids == expected.first.ids
        assert answer.usage.completion_tokens == expected.usage.completion_tokens
        assert prefill.engine.open_sessions() == 0


async def test_prompt_logprobs_come_from_the_prefill_server() -> None:
    response = generate_pb2.ResponseOptions(return_prompt_logprobs=True)
    async with routed() as (router, prefill):
        answer = await answered(router, request(prefill, response=response))
        assert answer.prompt
        assert answer.first.ids


async def test_a_caller_that_leaves_leaves_no_session() -> None:
    async with routed() as (router, prefill):
        stream = router.generate(request(prefill))
        await anext(stream)
        await stream.aclose()
        assert prefill.engine.open_sessions() == 0
