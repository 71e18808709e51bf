# SPDX-License-Identifier: Apache-2.0
"""ResponseOptions for the prompt: its records, their log-probabilities and candidates."""

from __future__ import annotations

from openengine.v1 import generate_pb2
from openengine_conformance import needs
from openengine_conformance.case import case
from openengine_conformance.cases.response_options import (
    EVERYTHING,
    ROUNDING,
    expect_whole_vocabulary,
    explicit,
    of_prompt,
    records_of_prompt,
    run_with,
    top,
)
from openengine_conformance.checks import Code, expect, expect_close, expect_equal
from openengine_conformance.context import Context

Options = generate_pb2.ResponseOptions


@case(
    "response_options.prompt_records",
    "Prompt records come once, before any token, one for each prompt token; the first has no score.",
    "RESP-01",
    "RESP-03",
    needs=[needs.GENERATES, needs.PROMPT_LOGPROBS],
)
async def prompt_records(ctx: Context) -> None:
    stream = await run_with(ctx, of_prompt())
    records = records_of_prompt(stream)
    usage = stream.usage or generate_pb2.Usage()
    expect_equal(len(records), usage.prompt_tokens, "the number of prompt records")
    if stream.request.HasField("token_ids"):
        sent = list(stream.request.token_ids.ids)
        expect_equal([record.token_id for record in records], sent, "the list of prompt token ids")
    expect_equal(stream.responses[0].WhichOneof("event"), "prompt", "the first event")
    expect(not records[0].HasField("logprob"), "the first prompt token has a logprob")


@case(
    "response_options.no_prompt_records",
    "Prompt records don't come unasked.",
    "RESP-01",
    needs=[needs.GENERATES],
)
async def no_prompt_records(ctx: Context) -> None:
    for options in (Options(), Options(return_prompt_logprobs=False)):
        stream = await run_with(ctx, options, max_tokens=1)
        expect(stream.prompt is None, "a PromptOutput came that was not asked for")


@case(
    "response_options.prompt_records_of_cached",
    "A prompt that is cached has the same prompt records as before.",
    "RESP-01",
    needs=[needs.GENERATES, needs.PROMPT_LOGPROBS],
    exclusive=True,
)
async def prompt_records_of_cached(ctx: Context) -> None:
    prompt = ctx.unique_prompt(max(ctx.offer.info.kv_block_size, 16) + 8)
    first = await ctx.generate(ctx.request(prompt, max_tokens=1, response=of_prompt()))
    again = await ctx.generate(ctx.request(prompt, max_tokens=1, response=of_prompt()))
    before, after = records_of_prompt(first), records_of_prompt(again)
    expect_equal(len(after), len(before), "the number of prompt records of a repeated prompt")
    for one, other in zip(before[1:], after[1:], strict=True):
        expect_close(
            other.logprob, one.logprob, ROUNDING, f"the logprob of prompt token {one.token_id}", "RESP-09"
        )


@case(
    "response_options.prompt_start",
    "prompt_logprob_start leaves out the positions before it, and changes nothing else.",
    "RESP-02",
    needs=[needs.GENERATES, needs.PROMPT_LOGPROBS],
    exclusive=True,
)
async def prompt_start(ctx: Context) -> None:
    whole = records_of_prompt(await run_with(ctx, of_prompt()))
    for start in (0, 1, 3):
        part = records_of_prompt(await run_with(ctx, of_prompt(start=start)))
        expected = [record.token_id for record in whole[start:]]
        expect_equal([r.token_id for r in part], expected, f"the list of prompt ids from {start} on")
        for one, other in zip(whole[start:], part, strict=True):
            if one.HasField("logprob"):
                what = f"the logprob of prompt token {one.token_id} from start {start}"
                expect(other.HasField("logprob"), f"{what} is absent")
                expect_close(other.logprob, one.logprob, ROUNDING, what)


@case(
    "response_options.prompt_start_beyond",
    "A prompt_logprob_start beyond the prompt is INVALID_ARGUMENT.",
    "RESP-02",
    needs=[needs.GENERATES, needs.PROMPT_LOGPROBS],
)
async def prompt_start_beyond(ctx: Context) -> None:
    for start in (1000, 2**31):
        request = ctx.request(response=of_prompt(start=start))
        await ctx.refused(ctx.rpc.Generate, request, Code.INVALID_ARGUMENT, names="prompt_logprob_start")


@case(
    "response_options.prompt_top_n",
    "Every prompt record but the first has exactly the N best candidates, best first.",
    "RESP-04",
    needs=[needs.GENERATES, needs.PROMPT_TOP_N],
)
async def prompt_top_n(ctx: Context) -> None:
    for count in {1, ctx.offer.top_n(prompt=True, wanted=3)}:
        for record in records_of_prompt(await run_with(ctx, of_prompt(top(count))))[1:]:
            expect_equal(
                len(record.candidates), count, f"the number of candidates of token {record.token_id}"
            )


@case(
    "response_options.prompt_token_ids",
    "Explicit prompt candidates come back exactly, in the order asked.",
    "RESP-05",
    needs=[needs.GENERATES, needs.PROMPT_TOKEN_IDS],
)
async def prompt_token_ids(ctx: Context) -> None:
    asked = [70, 40, 55]
    for record in records_of_prompt(await run_with(ctx, of_prompt(explicit(*asked))))[1:]:
        expect_equal([c.token_id for c in record.candidates], asked, "the list of candidates")


@case(
    "response_options.prompt_all",
    "`all` gives the whole vocabulary at each prompt position: its probabilities sum to 1.",
    "RESP-06",
    needs=[needs.GENERATES, needs.PROMPT_ALL],
)
async def prompt_all(ctx: Context) -> None:
    stream = await ctx.generate(ctx.request([40, 41, 42], max_tokens=1, response=of_prompt(EVERYTHING)))
    for record in records_of_prompt(stream)[1:]:
        expect_whole_vocabulary(record)
