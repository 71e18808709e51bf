# SPDX-License-Identifier: Apache-2.0
"""The grammar of the response stream, each rule looked at on streams of every kind.

`stream_rules` checks all of them on every stream that any case reads; here each has a case of its own, so that a
report shows which one broke.
"""

from __future__ import annotations

import asyncio

from openengine.v1 import generate_pb2
from openengine_conformance import needs, probes
from openengine_conformance.case import case
from openengine_conformance.checks import Code, expect, expect_equal, expect_in, skip
from openengine_conformance.context import Context
from openengine_conformance.stream import Stream

TOKENS = 6


async def _streams(ctx: Context) -> list[Stream]:
    """Streams of every kind that the server offers, read whole and not judged; made once in a run."""

    async def find_out() -> list[Stream]:
        sampling, response = generate_pb2.SamplingParams, generate_pb2.ResponseOptions
        requests = [ctx.steady(max_tokens=TOKENS), ctx.request(max_tokens=1), ctx.request(temperature=None)]
        if ctx.offer.max_sequences > 1:
            count = min(ctx.offer.max_sequences, 3)
            requests.append(
                ctx.steady(max_tokens=TOKENS, temperature=1.0, sampling=sampling(num_sequences=count))
            )
            # Outputs that end at different times show most about usage and indexes.
            requests.append(ctx.request(max_tokens=16, temperature=1.0, sampling=sampling(num_sequences=2)))
        if ctx.offer.generation.output_logprobs.supported:
            requests.append(ctx.steady(max_tokens=TOKENS, response=response(return_output_logprobs=True)))
        if ctx.offer.generation.prompt_logprobs.supported:
            requests.append(ctx.steady(max_tokens=TOKENS, response=response(return_prompt_logprobs=True)))
        return list(await asyncio.gather(*(ctx.open(request).drain() for request in requests)))

    streams = await ctx.session.learn("streams of every kind", find_out)
    for stream in streams:
        if stream.exchange not in ctx.exchanges:
            ctx.exchanges.append(stream.exchange)
    return streams


@case(
    "generate_stream.echo",
    "Every response echoes the request's id and sets exactly one event.",
    "STREAM-01",
    needs=[needs.GENERATES],
)
async def echo(ctx: Context) -> None:
    for stream in await _streams(ctx):
        expect(stream.responses, "a stream had no response")
        stream.check("STREAM-01")


@case(
    "generate_stream.output_index",
    "Tokens and finishes carry output_index, zero included, and the indexes are 0 to n-1.",
    "STREAM-02",
    needs=[needs.GENERATES],
)
async def output_index(ctx: Context) -> None:
    for stream in await _streams(ctx):
        stream.check("STREAM-02")
        count = stream.request.sampling.num_sequences or 1
        expect_equal(sorted(stream.outputs), list(range(count)), "the list of output indexes")


@case(
    "generate_stream.deltas",
    "Each TokenOutput holds only what is new; nothing is sent twice.",
    "STREAM-03",
    needs=[needs.GENERATES],
    exclusive=True,
)
async def deltas(ctx: Context) -> None:
    """Records and text of a run of known length must equal those of runs that are cut off at each length."""
    whole = await ctx.open(ctx.steady(max_tokens=TOKENS)).drain()
    whole.check("STREAM-03")
    expect_equal(len(whole.first.ids), TOKENS, "the number of token records")
    half = await ctx.open(ctx.steady(max_tokens=TOKENS // 2)).drain()
    expect_equal(len(half.first.ids), TOKENS // 2, "the number of token records of a shorter run")
    beginning = whole.first.text.startswith(half.first.text.rstrip(probes.UNSHOWABLE))
    expect(
        beginning,
        f"the text {whole.first.text!r} does not begin with that of a shorter run, {half.first.text!r}",
    )
    for stream in await _streams(ctx):
        stream.check("STREAM-03")


@case(
    "generate_stream.finished_once",
    "Each output has exactly one GenerationFinished, and nothing of it comes afterwards.",
    "STREAM-04",
    needs=[needs.GENERATES],
)
async def finished_once(ctx: Context) -> None:
    for stream in await _streams(ctx):
        stream.check("STREAM-04")
        for index, output in stream.outputs.items():
            expect(output.finished is not None, f"output {index} has no GenerationFinished")


@case(
    "generate_stream.error_is_last",
    "After an EngineError nothing follows, and the status is OK.",
    "STREAM-05",
    "ERR-01",
    "ERR-02",
    "ERR-03",
    needs=[needs.GENERATES],
)
async def error_is_last(ctx: Context) -> None:
    """A healthy server gives no error to look at; one with an injected fault does."""
    failed = [stream for stream in await _streams(ctx) if stream.error is not None]
    if not failed:
        skip("no request failed; run this case against a server with an injected fault")
    for stream in failed:
        for rule in ("STREAM-05", "STREAM-06", "ERR-01", "ERR-02", "ERR-03"):
            stream.check(rule)
        expect_equal(stream.status, Code.OK, "the status after an EngineError")
        expect_equal(stream.responses[-1].WhichOneof("event"), "error", "the last event")


@case(
    "generate_stream.usage_on_last",
    "Usage is on the final response, always, and on no other.",
    "STREAM-06",
    needs=[needs.GENERATES],
)
async def usage_on_last(ctx: Context) -> None:
    for stream in await _streams(ctx):
        stream.check("STREAM-06")
        for number, response in enumerate(stream.responses, start=1):
            last = number == len(stream.responses)
            where = f"response {number} of {len(stream.responses)}"
            expect(response.HasField("usage") == last, f"{where} {'lacks' if last else 'carries'} usage")


@case(
    "generate_stream.usage_sums",
    "Usage adds up: total is prompt plus completion over all outputs, cached and reasoning are subsets.",
    "STREAM-07",
    needs=[needs.GENERATES],
)
async def usage_sums(ctx: Context) -> None:
    for stream in await _streams(ctx):
        stream.check("STREAM-07")
        usage = stream.usage or generate_pb2.Usage()
        expect(usage.prompt_tokens > 0, "prompt_tokens is 0")
        if stream.request.stopping.ignore_eos and stream.error is None:
            count = (stream.request.sampling.num_sequences or 1) * stream.request.stopping.max_tokens
            expect_equal(usage.completion_tokens, count, "completion_tokens over all outputs")


@case(
    "generate_stream.cached_tokens",
    "cached_prompt_tokens of a repeated prompt is above zero, and below the prompt's length.",
    "STREAM-07",
    needs=[needs.GENERATES],
    exclusive=True,
)
async def cached_tokens(ctx: Context) -> None:
    prompt = ctx.unique_prompt(await probes.require_cache_reports(ctx))
    for run in range(2):
        stream = await ctx.generate(ctx.request(prompt, max_tokens=1))
        count = probes.cached(stream)
        expect(count is not None, "cached_prompt_tokens is absent, though other requests report it")
        known = (count or 0) > probes.CHANCE
        expect(known == bool(run), f"run {run + 1} of a new prompt has {count} cached tokens")


@case(
    "generate_stream.ends_with_terminal",
    "A stream never ends OK without a GenerationFinished for each output.",
    "STREAM-08",
    needs=[needs.GENERATES],
)
async def ends_with_terminal(ctx: Context) -> None:
    for stream in await _streams(ctx):
        stream.check("STREAM-08")
        expect_equal(stream.status, Code.OK, "the status of a served request")


@case(
    "generate_stream.reasons",
    "An output that was not aborted finishes STOP or LENGTH.",
    "STREAM-09",
    needs=[needs.GENERATES],
)
async def reasons(ctx: Context) -> None:
    usual = (generate_pb2.FINISH_REASON_STOP, generate_pb2.FINISH_REASON_LENGTH)
    for stream in await _streams(ctx):
        stream.check("STREAM-09")
        for output in stream.outputs.values():
            if output.finished is not None:
                expect_in(output.finished.reason, usual, "the finish reason")


@case(
    "generate_stream.interleaved",
    "Requests that run at the same time don't mix: each stream is that of its own request.",
    "STREAM-01",
    "STREAM-03",
    needs=[needs.GENERATES],
    exclusive=True,
)
async def interleaved(ctx: Context) -> None:
    prompts = [ctx.unique_prompt(8 + extra) for extra in range(4)]
    streams = await ctx.generate_all(*(ctx.steady(prompt, max_tokens=TOKENS) for prompt in prompts))
    lengths = [(stream.usage or generate_pb2.Usage()).prompt_tokens for stream in streams]
    if ctx.offer.info.supports_token_ids_input:
        expect_equal(lengths, [len(prompt) for prompt in prompts], "the list of prompt_tokens")
    expect_equal([len(stream.first.ids) for stream in streams], [TOKENS] * 4, "the numbers of records")


@case(
    "generate_stream.stalled_reader",
    "A client that stops reading loses its request after the server's limit, and the id is free again.",
    "STREAM-10",
    needs=[needs.GENERATES, needs.STALL_LIMIT],
    exclusive=True,
    timeout=90,
)
async def stalled_reader(ctx: Context) -> None:
    """The client's window is too small for the output, so the server's writes get stuck."""
    async with ctx.connect(tiny_window=True) as stalled:
        stream = ctx.open(ctx.endless(), via=stalled)
        await stream.accepted()

        async def ended() -> bool:
            probe = ctx.request(max_tokens=1)
            probe.request_id = stream.id
            return await ctx.open(probe).outcome() is Code.OK

        await ctx.until(
            ended, "the stalled request's id was not freed", within=ctx.options.stall_limit + 10, every=0.5
        )
        await ctx.until(ctx.idle, "the stalled request still runs", within=2)


@case(
    "generate_stream.cancel_frees_slot",
    "A client that cancels frees the engine's slot within a second.",
    "STREAM-11",
    needs=[needs.GENERATES],
    exclusive=True,
)
async def cancel_frees_slot(ctx: Context) -> None:
    stream = await ctx.started(ctx.endless())
    stream.cancel()
    await _freed(ctx, stream)


@case(
    "generate_stream.deadline_frees_slot",
    "A deadline that expires frees the engine's slot within a second.",
    "STREAM-11",
    needs=[needs.GENERATES],
    exclusive=True,
)
async def deadline_frees_slot(ctx: Context) -> None:
    stream = ctx.open(ctx.endless(), timeout=0.8)
    if await stream.outcome() is not Code.DEADLINE_EXCEEDED:
        skip("the longest request is over before its deadline")
    await _freed(ctx, stream)


@case(
    "generate_stream.cancel_while_queued",
    "A client that goes away before the first token leaves nothing behind.",
    "STREAM-11",
    needs=[needs.GENERATES],
    exclusive=True,
)
async def cancel_while_queued(ctx: Context) -> None:
    streams = [ctx.open(ctx.endless()) for _ in range(4)]
    for stream in streams:
        stream.cancel()
    await ctx.until(ctx.idle, "a request that was cancelled at once still runs", within=2)


async def _freed(ctx: Context, stream: Stream) -> None:
    await ctx.until(ctx.idle, "running_requests did not return to 0", within=1.5)
    again = ctx.request(max_tokens=1)
    again.request_id = stream.id
    await ctx.generate(again)
