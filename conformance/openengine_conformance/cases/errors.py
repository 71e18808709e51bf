# SPDX-License-Identifier: Apache-2.0
"""Failures: one transport for each, and nothing that a client sends may hurt the server."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from openengine.v1 import (
    discovery_pb2,
    generate_pb2,
    kv_pb2,
    lifecycle_pb2,
    lora_pb2,
    model_pb2,
    observability_pb2,
    tasks_pb2,
)
from openengine_conformance import needs
from openengine_conformance.case import case
from openengine_conformance.checks import Code, Refused, expect, expect_clean_status, expect_in
from openengine_conformance.context import Context

METHODS = (
    *(
        "Generate",
        "Embed",
        "Classify",
        "Score",
        "GetEngineInfo",
        "GetModelInfo",
        "GetLoad",
        "Health",
        "Abort",
    ),
    *("LoadLora", "UnloadLora", "ListLoras", "GetKvConnectorInfo", "GetKvEventSources"),
)
"""Every method but those whose stream stays open, and Drain, of which any bytes may be a valid request."""

MARKER = "zebra-crossing-4711"
FUZZED_REQUESTS = 60


@case(
    "errors.bytes",
    "Bytes that are no protobuf end with a status, and the server goes on.",
    "ERR-05",
    "ERR-01",
)
async def arbitrary_bytes(ctx: Context) -> None:
    source = random.Random(1)
    for method in METHODS:
        for payload in (b"\xff\xff\xff\xff", b"\x0a\xff\xff\xff\xff\x0f", source.randbytes(200)):
            refused = await ctx.raw(method, payload)
            if refused is not None:
                code = refused.code
                expect(
                    code is not Code.UNAVAILABLE,
                    f"{method} with arbitrary bytes is UNAVAILABLE: {refused.details}",
                )
    await ctx.call(ctx.rpc.GetEngineInfo, discovery_pb2.GetEngineInfoRequest())


@case(
    "errors.empty_messages",
    "An empty message is served or refused with a fitting status by every method.",
    "ERR-05",
    "ERR-01",
)
async def empty_messages(ctx: Context) -> None:
    """UNKNOWN and INTERNAL would mean that an exception escaped."""
    rpc = ctx.rpc
    calls: list[Callable[[], object]] = [
        lambda: ctx.refused(rpc.Generate, generate_pb2.GenerateRequest(), *CLIENT_ERRORS),
        lambda: ctx.refused(rpc.Embed, tasks_pb2.EmbedRequest(), *CLIENT_ERRORS),
        lambda: ctx.refused(rpc.Classify, tasks_pb2.ClassifyRequest(), *CLIENT_ERRORS),
        lambda: ctx.refused(rpc.Score, tasks_pb2.ScoreRequest(), *CLIENT_ERRORS),
        lambda: ctx.refused(rpc.GetModelInfo, model_pb2.GetModelInfoRequest(), *CLIENT_ERRORS),
        lambda: ctx.refused(rpc.Abort, lifecycle_pb2.AbortRequest(), *CLIENT_ERRORS),
        lambda: ctx.refused(rpc.LoadLora, lora_pb2.LoadLoraRequest(), *CLIENT_ERRORS),
        lambda: ctx.refused(rpc.UnloadLora, lora_pb2.UnloadLoraRequest(), *CLIENT_ERRORS),
        lambda: ctx.call(rpc.GetEngineInfo, discovery_pb2.GetEngineInfoRequest()),
        lambda: ctx.call(rpc.GetLoad, observability_pb2.GetLoadRequest()),
        lambda: ctx.call(rpc.Health, lifecycle_pb2.HealthRequest()),
        lambda: ctx.call(rpc.GetKvConnectorInfo, kv_pb2.GetKvConnectorInfoRequest()),
        lambda: ctx.call(rpc.GetKvEventSources, kv_pb2.GetKvEventSourcesRequest()),
    ]
    for call in calls:
        await call()  # type: ignore[misc]  # each is a coroutine of its own type


CLIENT_ERRORS = (Code.INVALID_ARGUMENT, Code.FAILED_PRECONDITION, Code.NOT_FOUND)


@case(
    "errors.every_method",
    "Every method of the contract is implemented, or its absence is not announced by discovery.",
    "ERR-01",
)
async def every_method(ctx: Context) -> None:
    for method in METHODS:
        refused = await ctx.raw(method, b"")
        if refused is not None:
            expect(refused.code is not Code.UNIMPLEMENTED, f"{method} is UNIMPLEMENTED: {refused.details}")


@case(
    "errors.fuzzed_requests",
    "Random well-formed requests are served or refused with a client's status, and none is left behind.",
    "ERR-05",
    "GEN-10",
    needs=[needs.GENERATES],
    exclusive=True,
    timeout=60,
)
async def fuzzed_requests(ctx: Context) -> None:
    """The same requests in every run: a failure can be repeated."""
    source = random.Random(7)
    for _ in range(FUZZED_REQUESTS):
        request = ctx.request(max_tokens=1)
        scramble(request, source)
        request.request_id, request.model = ctx.new_id(), ctx.offer.model
        request.stopping.max_tokens = min(request.stopping.max_tokens, 2)
        stream = ctx.open(request)
        code = await stream.outcome()
        allowed = (Code.OK, *CLIENT_ERRORS, Code.OUT_OF_RANGE, Code.RESOURCE_EXHAUSTED)
        expect_in(code, allowed, f"the status ({stream.details})")
    await ctx.until(ctx.idle, "a request is left behind", within=3)
    await ctx.still_serves()


@case(
    "errors.unary_refusals",
    "A unary call that fails ends with a status and an explanation.",
    "ERR-01",
    "ERR-06",
)
async def unary_refusals(ctx: Context) -> None:
    request = model_pb2.GetModelInfoRequest(model="no-such-model")
    message = await ctx.refused(ctx.rpc.GetModelInfo, request, Code.NOT_FOUND)
    expect(
        "no-such-model" in message, f"the message does not say which model is unknown: {message}", "ERR-06"
    )


@case(
    "errors.no_prompt_in_messages",
    "A refusal does not repeat the prompt, and shows nothing of the server's insides.",
    "ERR-06",
    needs=[needs.TAKES_PROMPTS, needs.TEXT],
)
async def no_prompt_in_messages(ctx: Context) -> None:
    bad = [
        generate_pb2.GenerateRequest(sampling=generate_pb2.SamplingParams(top_p=7)),
        generate_pb2.GenerateRequest(guided=generate_pb2.GuidedDecoding(json_schema="{")),
        generate_pb2.GenerateRequest(lora_name="no-such-adapter"),
        generate_pb2.GenerateRequest(response=generate_pb2.ResponseOptions(prompt_logprob_start=10**6)),
    ]
    for change in bad:
        request = ctx.request(f"My password is {MARKER}.", max_tokens=1)
        request.MergeFrom(change)
        stream = ctx.open(request)
        if await stream.outcome() is not Code.OK:
            expect(MARKER not in stream.details, f"the message repeats the prompt: {stream.details}")
            expect_clean_status(stream.status or Code.UNKNOWN, stream.details)


@case(
    "errors.refused_before_any_event",
    "What is refused is refused with a status alone: no response comes first.",
    "ERR-01",
    needs=[needs.TAKES_PROMPTS],
)
async def refused_before_any_event(ctx: Context) -> None:
    for change in (
        generate_pb2.GenerateRequest(sampling=generate_pb2.SamplingParams(temperature=-1)),
        generate_pb2.GenerateRequest(stopping=generate_pb2.StoppingOptions(max_tokens=2, min_tokens=3)),
        generate_pb2.GenerateRequest(guided=generate_pb2.GuidedDecoding(regex="(")),
        generate_pb2.GenerateRequest(kv=generate_pb2.KvOptions(data_parallel_rank=10**6)),
    ):
        request = ctx.request()
        request.MergeFrom(change)
        await ctx.refused(ctx.rpc.Generate, request, Code.INVALID_ARGUMENT)


@case(
    "errors.model_still_known",
    "After all refusals the server still answers every question of discovery.",
    "ERR-05",
)
async def model_still_known(ctx: Context) -> None:
    for _ in range(3):
        try:
            await ctx.call(ctx.rpc.GetModelInfo, model_pb2.GetModelInfoRequest(model="\x00"))
        except Refused as refused:
            expect_in(refused.code, CLIENT_ERRORS, "the status of an odd model name")
    await ctx.call(ctx.rpc.GetModelInfo, model_pb2.GetModelInfoRequest(model=ctx.offer.model))


_NUMBERS = (0, 1, 2, 3, 7, 40, 255, 2**31 - 1)
_REALS = (0.0, 0.5, 1.0, 1.5, 2.0, -1.0, 1e30)
_TEXTS = ("", "a", " ", "\x00", "é☕", "x" * 300, "(", "{}")


def scramble(message: Message, source: random.Random, depth: int = 0) -> None:
    """Set random fields of a message to random values, odd ones more often than sound ones."""
    for field in message.DESCRIPTOR.fields:
        if source.random() > 0.25 or (
            field.message_type is not None and field.message_type.GetOptions().map_entry
        ):
            continue
        if field.message_type is not None:
            if depth < 4 and field.message_type.full_name.startswith("openengine."):
                target = getattr(message, field.name)
                inner = target.add() if field.is_repeated else target
                if not field.is_repeated:
                    inner.SetInParent()
                scramble(inner, source, depth + 1)
        elif field.is_repeated:
            getattr(message, field.name).extend(_scalar(field, source) for _ in range(source.randrange(3)))
        else:
            setattr(message, field.name, _scalar(field, source))


def _scalar(field: Any, source: random.Random) -> object:
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_BOOL:
            return source.random() < 0.5
        case FieldDescriptor.CPPTYPE_DOUBLE | FieldDescriptor.CPPTYPE_FLOAT:
            return source.choice(_REALS)
        case FieldDescriptor.CPPTYPE_STRING:
            text = source.choice(_TEXTS)
            return text.encode() if field.type == FieldDescriptor.TYPE_BYTES else text
        case FieldDescriptor.CPPTYPE_ENUM:
            return source.randrange(4)
        case _:
            return source.choice(_NUMBERS)
