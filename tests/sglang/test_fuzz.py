"""Arbitrary valid requests to the real engine: refused or served, and it goes on as before (ERR-05, GEN-10)."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import Any

import grpc
import pytest

from openengine.v1 import generate_pb2, inputs_pb2
from tests.support.fuzz import fill
from tests.support.wire import PATIENCE_S, Wire

pytestmark = pytest.mark.asyncio(loop_scope="session")

ROUNDS, AT_ONCE = 25, 16
REFUSALS = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.NOT_FOUND,
)
PARTS: tuple[Any, ...] = (
    "sampling",
    "stopping",
    "response",
    "kv",
    "guided",
    "media",
    "lora_name",
    "priority",
)

Guided = generate_pb2.GuidedDecoding
GUIDES = (
    Guided(regex="ab"),
    Guided(ebnf_grammar="root ::= root"),
    Guided(json_schema='{"type": "integer"}'),
    Guided(choice=generate_pb2.ChoiceConstraint(choices=["yes", "no"])),
)
"""They compile; each ends soon or allows nothing, whatever else the request asks for."""


def _request(wire: Wire, chance: random.Random) -> generate_pb2.GenerateRequest:
    """Mostly valid: every part is left out often, so that much of it reaches the engine."""
    request = fill(generate_pb2.GenerateRequest(), chance, density=chance.choice((0.1, 0.25, 0.5)))
    request.request_id, request.model = f"fuzz-{chance.random()}", wire.description.model_id
    for part in PARTS:
        if chance.random() < 0.5:
            request.ClearField(part)
    if chance.random() < 0.7:
        request.token_ids.CopyFrom(inputs_pb2.TokenIds(ids=[chance.randrange(49152) for _ in range(4)]))
    if chance.random() < 0.5:
        request.sampling.ClearField("seed")
    if chance.random() < 0.3:
        request.guided.CopyFrom(chance.choice(GUIDES))
    request.stopping.max_tokens = min(request.stopping.max_tokens or 4, 16)
    request.sampling.num_sequences = min(request.sampling.num_sequences or 1, 4)
    return request


async def test_arbitrary_requests_leave_the_engine_as_it_was(tiny: Wire) -> None:
    """Nothing kills, hangs or leaks; INTERNAL would be a bug of ours."""
    before = (await tiny.generate()).first.ids
    chance = random.Random(11)
    served = 0

    async def one() -> None:
        nonlocal served
        request = _request(tiny, chance)
        call = tiny.stub.Generate(request)
        responses = []
        with contextlib.suppress(grpc.aio.AioRpcError):
            async with asyncio.timeout(PATIENCE_S):
                responses = [response async for response in call]
        code = await call.code()
        if code is grpc.StatusCode.OK:
            last = responses[-1]
            if last.WhichOneof("event") != "finished":
                # A guide that allows nothing shows only when a token is sampled.
                assert last.error.details["field"].startswith("guided."), str(request)
            served += 1
        else:
            assert code in REFUSALS, f"{code} {await call.details()} for {request}"
            assert responses == []

    for _ in range(ROUNDS):
        await asyncio.gather(*(one() for _ in range(AT_ONCE)))
    await tiny.until_idle()
    assert served > 20
    assert (await tiny.generate()).first.ids == before
