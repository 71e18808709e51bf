# SPDX-License-Identifier: Apache-2.0
"""What a Generate request must hold, ids, priority, and the moment of acceptance."""

from __future__ import annotations

import asyncio
import statistics

from openengine.v1 import generate_pb2
from openengine_conformance import needs, probes
from openengine_conformance.case import case
from openengine_conformance.checks import Code, expect, expect_equal, skip
from openengine_conformance.context import TEXT_PROMPT, Context
from openengine_conformance.saturation import end_all, expect_first_to_start, fill, on_one_rank

OUTSIDE_VOCABULARY = 2**32 - 1
LONGEST_FILLED_CONTEXT = 200_000
SOONEST_TELLING_TOKEN = 0.015
"""Seconds: a first token that comes sooner can't be told from the headers."""

LARGEST_HEADERS_SHARE = 0.9
"""Of the time to the first token; sent together, they arrive together."""


@case(
    "generate_request.no_id",
    "An empty request_id is INVALID_ARGUMENT.",
    "GEN-01",
    needs=[needs.TAKES_PROMPTS],
)
async def no_id(ctx: Context) -> None:
    request = ctx.request()
    request.request_id = ""
    await ctx.refused(ctx.rpc.Generate, request, Code.INVALID_ARGUMENT, names="request_id")


@case(
    "generate_request.no_model", "An empty model is INVALID_ARGUMENT.", "GEN-01", needs=[needs.TAKES_PROMPTS]
)
async def no_model(ctx: Context) -> None:
    request = ctx.request()
    request.model = ""
    await ctx.refused(ctx.rpc.Generate, request, Code.INVALID_ARGUMENT, names="model")


@case(
    "generate_request.unknown_model", "An unknown model is NOT_FOUND.", "GEN-01", needs=[needs.TAKES_PROMPTS]
)
async def unknown_model(ctx: Context) -> None:
    request = ctx.request()
    request.model = "no-such-model"
    await ctx.refused(ctx.rpc.Generate, request, Code.NOT_FOUND)


@case(
    "generate_request.no_input",
    "A request with neither prompt nor token_ids is INVALID_ARGUMENT.",
    "GEN-02",
    needs=[needs.TAKES_PROMPTS],
)
async def no_input(ctx: Context) -> None:
    request = ctx.request()
    request.ClearField("prompt")
    request.ClearField("token_ids")
    await ctx.refused(ctx.rpc.Generate, request, Code.INVALID_ARGUMENT, names="prompt|token_ids|input")


@case(
    "generate_request.empty_prompt",
    "An empty prompt is INVALID_ARGUMENT, and the engine survives it.",
    "GEN-02",
    "GEN-10",
    needs=[needs.TAKES_PROMPTS],
)
async def empty_prompt(ctx: Context) -> None:
    request = ctx.request("")
    expect_equal(request.WhichOneof("input"), "prompt", "the input that was set")
    await ctx.refused(ctx.rpc.Generate, request, Code.INVALID_ARGUMENT, names="prompt")
    if ctx.offer.role_name == "AGGREGATED":
        await ctx.still_serves("GEN-10")


@case(
    "generate_request.empty_token_ids",
    "An empty list of token ids is INVALID_ARGUMENT.",
    "GEN-02",
    needs=[needs.TAKES_PROMPTS],
)
async def empty_token_ids(ctx: Context) -> None:
    request = ctx.request()
    request.token_ids.SetInParent()
    await ctx.refused(ctx.rpc.Generate, request, Code.INVALID_ARGUMENT, names="token_ids")


@case(
    "generate_request.id_outside_vocabulary",
    "A token id outside the vocabulary is INVALID_ARGUMENT, naming the id, and the engine survives it.",
    "GEN-03",
    "GEN-10",
    needs=[needs.GENERATES, needs.TOKEN_IDS],
)
async def id_outside_vocabulary(ctx: Context) -> None:
    request = ctx.request([40, OUTSIDE_VOCABULARY, 41])
    await ctx.refused(ctx.rpc.Generate, request, Code.INVALID_ARGUMENT, names=str(OUTSIDE_VOCABULARY))
    await ctx.still_serves("GEN-10")


@case(
    "generate_request.prompt_too_long",
    "A prompt that fills the whole context is INVALID_ARGUMENT, stating both lengths.",
    "GEN-03",
    needs=[needs.TAKES_PROMPTS, needs.TOKEN_IDS, needs.CONTEXT_LENGTH],
)
async def prompt_too_long(ctx: Context) -> None:
    longest = ctx.offer.info.max_context_length
    if longest > LONGEST_FILLED_CONTEXT:
        skip(f"a prompt of {longest} tokens is too long to send")
    for length in (longest, longest + 7):
        request = ctx.request([40] * length)
        message = await ctx.refused(ctx.rpc.Generate, request, Code.INVALID_ARGUMENT)
        for number in (length, longest):
            expect(str(number) in message, f"the message does not state the length {number}: {message}")


@case(
    "generate_request.duplicate_id",
    "An id that is in flight is refused ALREADY_EXISTS, and its first request goes on.",
    "GEN-04",
    needs=[needs.GENERATES],
)
async def duplicate_id(ctx: Context) -> None:
    running = await ctx.started(ctx.endless())
    again = ctx.request()
    again.request_id = running.id
    await ctx.refused(ctx.rpc.Generate, again, Code.ALREADY_EXISTS)
    await running.wait_tokens(len(running.first.records) + 2)


@case(
    "generate_request.id_free_after_end",
    "An id is free again as soon as its stream has ended.",
    "GEN-04",
    needs=[needs.GENERATES],
)
async def id_free_after_end(ctx: Context) -> None:
    request = ctx.request(max_tokens=2)
    for _ in range(3):
        await ctx.generate(request)


@case(
    "generate_request.id_free_after_abort",
    "An id is free again straight after an Abort.",
    "GEN-04",
    "ABORT-02",
    needs=[needs.GENERATES],
)
async def id_free_after_abort(ctx: Context) -> None:
    running = await ctx.started(ctx.endless())
    await ctx.abort(running.id)
    again = ctx.request(max_tokens=2)
    again.request_id = running.id
    await ctx.generate(again)
    await running.drain()


@case(
    "generate_request.refused_id_stays_free",
    "A refused request does not hold its id.",
    "GEN-04",
    "ERR-05",
    needs=[needs.GENERATES],
)
async def refused_id_stays_free(ctx: Context) -> None:
    bad = ctx.request(max_tokens=0)
    await ctx.refused(ctx.rpc.Generate, bad, Code.INVALID_ARGUMENT)
    good = ctx.request(max_tokens=2)
    good.request_id = bad.request_id
    await ctx.generate(good)


@case(
    "generate_request.text_equals_token_ids",
    "The token ids of a prompt give the same greedy output as its text.",
    "GEN-06",
    needs=[needs.GENERATES, needs.TEXT, needs.TOKEN_IDS, needs.PROMPT_LOGPROBS],
    exclusive=True,
)
async def text_equals_token_ids(ctx: Context) -> None:
    ids = await probes.prompt_ids(ctx, TEXT_PROMPT)
    by_text = await ctx.generate(ctx.steady(TEXT_PROMPT))
    by_ids = await ctx.generate(ctx.steady(ids))
    expect_equal(by_ids.first.ids, by_text.first.ids, "the output for the token ids")
    expect_equal(by_ids.first.text, by_text.first.text, "the text for the token ids")


@case(
    "generate_request.metadata",
    "Trace headers and other metadata, in the message and in gRPC, change nothing in the output.",
    "GEN-07",
    needs=[needs.GENERATES],
    exclusive=True,
)
async def metadata(ctx: Context) -> None:
    expected = await probes.baseline(ctx)
    trace = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "tracestate": "a=b"}
    request = ctx.steady(
        max_tokens=probes.BASELINE_TOKENS, metadata={**trace, "tenant": "blue", "traceparent2": "x"}
    )
    stream = await ctx.generate(request, metadata=list(trace.items()))
    expect_equal(stream.first.ids, expected.first.ids, "the output with metadata")
    broken = ctx.request(max_tokens=1, metadata={"traceparent": "not a trace", "tracestate": "\n"})
    await ctx.generate(broken)


async def _headers_share(ctx: Context, tokens: int) -> float | None:
    """The time to the headers as a share of that to the first token; None if the token comes too soon to tell."""
    stream = ctx.open(ctx.request(ctx.unique_prompt(tokens), max_tokens=1))
    await stream.accepted()
    await stream.rest()
    headers, first = stream.headers_at or 0, stream.first_at or 0
    return None if first < SOONEST_TELLING_TOKEN else headers / first


@case(
    "generate_request.accepted_before_first_token",
    "Initial metadata comes at acceptance, well before the first token.",
    "GEN-08",
    needs=[needs.GENERATES],
    exclusive=True,
)
async def accepted_before_first_token(ctx: Context) -> None:
    """Headers of a server that sends them with the first token arrive when the token does, every time."""
    longest = ctx.offer.info.max_context_length or 256
    for tokens in (16, 128, 512):
        shares = [await _headers_share(ctx, min(tokens, longest // 2)) for _ in range(5)]
        telling = [share for share in shares if share is not None]
        if len(telling) < len(shares):
            continue
        share = statistics.median(telling)
        problem = f"half the time initial metadata took {share:.0%} or more of the time to the first token"
        expect(share < LARGEST_HEADERS_SHARE, problem)
        return
    skip("the first token comes too soon to tell it from the headers")


@case(
    "generate_request.queued_is_accepted",
    "A request that waits in the queue has its initial metadata before it has a token.",
    "GEN-08",
    needs=[needs.GENERATES],
    exclusive=True,
    timeout=60,
)
async def queued_is_accepted(ctx: Context) -> None:
    fillers = await fill(ctx)
    queued = ctx.open(on_one_rank(ctx, ctx.request(max_tokens=2)))
    async with asyncio.timeout(5):
        await queued.accepted()
    await end_all(ctx, fillers)
    await queued.rest()


@case(
    "generate_request.priority_order",
    "Of two waiting requests the one with the larger priority gets its first token first.",
    "GEN-09",
    needs=[needs.GENERATES, needs.PRIORITY],
    exclusive=True,
    timeout=60,
)
async def priority_order(ctx: Context) -> None:
    """Fill every slot, let a low and a high one wait, then free one slot."""
    fillers = await fill(ctx, priority=100)
    low = ctx.open(on_one_rank(ctx, ctx.endless(priority=-5)))
    await low.accepted()
    high = ctx.open(on_one_rank(ctx, ctx.endless(priority=5)))
    await high.accepted()

    async def both_wait() -> bool:
        return (await ctx.load()).queued_requests >= 2

    await ctx.until(both_wait, "queued_requests did not count the two waiting requests", "LOAD-01", within=5)
    await ctx.abort(fillers[0].id)
    await expect_first_to_start(high, low)
    await end_all(ctx, [*fillers, low, high])


@case(
    "generate_request.priority_served",
    "A request with a priority, negative ones included, is served.",
    "GEN-09",
    needs=[needs.GENERATES, needs.PRIORITY],
)
async def priority_served(ctx: Context) -> None:
    await ctx.generate_all(*(ctx.request(max_tokens=2, priority=value) for value in (-3, 0, 7)))


@case(
    "generate_request.hostile_text",
    "Prompts of odd characters are served or rejected INVALID_ARGUMENT, and the engine goes on serving.",
    "GEN-10",
    "ERR-05",
    needs=[needs.GENERATES, needs.TEXT],
)
async def hostile_text(ctx: Context) -> None:
    for text in (
        " ",
        "\n",
        "\t \n",
        "\x00",
        "\u200b",
        "\ufeff",
        "\U0010ffff",
        "e\u0301" * 20,
        "<|endoftext|>",
        "</s>",
    ):
        await _served_or_rejected(ctx, ctx.request(text, max_tokens=1))
    await ctx.still_serves()


@case(
    "generate_request.hostile_numbers",
    "Numbers at the ends of their types are served or rejected INVALID_ARGUMENT, and the engine goes on serving.",
    "GEN-10",
    "ERR-05",
    needs=[needs.GENERATES],
)
async def hostile_numbers(ctx: Context) -> None:
    big = 2**32 - 1
    for change in (
        generate_pb2.GenerateRequest(sampling=generate_pb2.SamplingParams(top_k=2**31 - 1)),
        generate_pb2.GenerateRequest(sampling=generate_pb2.SamplingParams(num_sequences=big)),
        generate_pb2.GenerateRequest(sampling=generate_pb2.SamplingParams(temperature=1e300)),
        generate_pb2.GenerateRequest(sampling=generate_pb2.SamplingParams(temperature=1e-300)),
        generate_pb2.GenerateRequest(sampling=generate_pb2.SamplingParams(repetition_penalty=1e308)),
        generate_pb2.GenerateRequest(stopping=generate_pb2.StoppingOptions(min_tokens=big)),
        generate_pb2.GenerateRequest(
            stopping=generate_pb2.StoppingOptions(conditions=[generate_pb2.StopCondition(stop_token_id=big)])
        ),
        generate_pb2.GenerateRequest(response=generate_pb2.ResponseOptions(prompt_logprob_start=big)),
        generate_pb2.GenerateRequest(kv=generate_pb2.KvOptions(data_parallel_rank=big)),
        generate_pb2.GenerateRequest(kv=generate_pb2.KvOptions(cache_salt="")),
        generate_pb2.GenerateRequest(kv=generate_pb2.KvOptions(cache_salt="\x00" * 100)),
        generate_pb2.GenerateRequest(priority=-(2**31)),
        generate_pb2.GenerateRequest(priority=2**31 - 1),
    ):
        request = ctx.request(max_tokens=1, temperature=1.0)
        request.MergeFrom(change)
        await _served_or_rejected(ctx, request)
    await ctx.still_serves()


@case(
    "generate_request.long_ids",
    "Request ids of any form are taken whole and echoed exactly.",
    "STREAM-01",
    "GEN-10",
    needs=[needs.GENERATES],
)
async def long_ids(ctx: Context) -> None:
    for suffix in ("x" * 500, " with spaces ", "ünïcödé-🦜", "a/b?c=d&e", "\t"):
        request = ctx.request(max_tokens=1)
        request.request_id += suffix
        await ctx.generate(request)


async def _served_or_rejected(ctx: Context, request: generate_pb2.GenerateRequest) -> None:
    stream = ctx.open(request)
    if (code := await stream.outcome()) is not Code.OK:
        expect_equal(code, Code.INVALID_ARGUMENT, f"the status ({stream.details})")
