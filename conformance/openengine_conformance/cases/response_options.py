# SPDX-License-Identifier: Apache-2.0
"""ResponseOptions: prompt records, log-probabilities and candidates."""

from __future__ import annotations

import math

from openengine.v1 import generate_pb2, inputs_pb2, model_pb2
from openengine_conformance import needs, probes
from openengine_conformance.case import case
from openengine_conformance.checks import Code, Refused, expect, expect_close, expect_equal, skip
from openengine_conformance.context import Context
from openengine_conformance.stream import Stream

Options = generate_pb2.ResponseOptions
Selection = generate_pb2.CandidateTokenSelection
Mode = model_pb2.CandidateTokenSelectionMode
OUTSIDE_VOCABULARY = 2**32 - 1
ROUNDING = 0.25
"""How far two computations of one log-probability in low precision may lie apart."""


def top(count: int) -> generate_pb2.CandidateTokenSelection:
    """The N best candidates."""
    return Selection(top_n=count)


def explicit(*ids: int) -> generate_pb2.CandidateTokenSelection:
    """Exactly these candidates."""
    return Selection(token_ids=inputs_pb2.TokenIds(ids=ids))


EVERYTHING = Selection(all=generate_pb2.AllCandidates())


def of_output(selection: generate_pb2.CandidateTokenSelection | None = None) -> generate_pb2.ResponseOptions:
    """Output log-probabilities, with these candidates."""
    return Options(return_output_logprobs=True, output_candidates=selection)


def of_prompt(
    selection: generate_pb2.CandidateTokenSelection | None = None, start: int | None = None
) -> generate_pb2.ResponseOptions:
    """Prompt log-probabilities, with these candidates."""
    return Options(return_prompt_logprobs=True, prompt_candidates=selection, prompt_logprob_start=start)


async def run_with(ctx: Context, options: generate_pb2.ResponseOptions, max_tokens: int = 4) -> Stream:
    """Run the standard prompt with these options."""
    return await ctx.generate(ctx.steady(max_tokens=max_tokens, response=options))


def records_of_prompt(stream: Stream) -> list[generate_pb2.TokenInfo]:
    """The records of the PromptOutput, which must have come."""
    expect(stream.prompt is not None, "no PromptOutput came", "RESP-01")
    return list(stream.prompt.tokens) if stream.prompt else []


# ------------------------------------------------------------------------------------------------- prompt


# ------------------------------------------------------------------------------------------------- output


@case(
    "response_options.output_logprobs",
    "With output log-probabilities on, every record has one, greedy records are of rank 1, and none has candidates.",
    "RESP-03",
    "RESP-09",
    needs=[needs.GENERATES, needs.OUTPUT_LOGPROBS],
)
async def output_logprobs(ctx: Context) -> None:
    stream = await run_with(ctx, of_output())
    for record in stream.first.records:
        expect(record.HasField("logprob"), f"the record of token {record.token_id} has no logprob")
        expect(not record.candidates, "candidates came that were not asked for", "RESP-04")
        if record.HasField("rank"):
            expect_equal(record.rank, 1, "the rank of a greedy token", "RESP-09")


@case(
    "response_options.logprobs_off",
    "Without the flag, the output is the same and no candidates come.",
    "RESP-03",
    needs=[needs.GENERATES, needs.OUTPUT_LOGPROBS],
    exclusive=True,
)
async def logprobs_off(ctx: Context) -> None:
    off, on = await run_with(ctx, Options(return_output_logprobs=False)), await run_with(ctx, of_output())
    expect_equal(on.first.ids, off.first.ids, "the greedy output with log-probabilities")
    expect(
        not any(record.candidates for record in off.first.records), "candidates came that were not asked for"
    )


@case(
    "response_options.output_top_n",
    "top_n gives exactly the N best candidates, best first, of which a greedy token is the first.",
    "RESP-04",
    "RESP-09",
    needs=[needs.GENERATES, needs.OUTPUT_TOP_N],
)
async def output_top_n(ctx: Context) -> None:
    for count in {1, ctx.offer.top_n(prompt=False, wanted=2), ctx.offer.top_n(prompt=False, wanted=5)}:
        for record in (await run_with(ctx, of_output(top(count)))).first.records:
            expect_equal(len(record.candidates), count, f"the number of candidates for top_n {count}")
            best = record.candidates[0]
            expect_close(
                best.logprob,
                record.logprob,
                1e-3,
                "the best candidate's logprob of a greedy token",
                "RESP-09",
            )


@case(
    "response_options.sampled_outside_top_n",
    "A sampled token that is not among the N best is not added to them.",
    "RESP-04",
    needs=[needs.GENERATES, needs.OUTPUT_TOP_N],
)
async def sampled_outside_top_n(ctx: Context) -> None:
    """At a high temperature some tokens are not the best one; their record has one candidate all the same."""
    sampled = ctx.steady(max_tokens=12, temperature=1.8, response=of_output(top(1)))
    stream = await ctx.generate(sampled)
    for record in stream.first.records:
        expect_equal(len(record.candidates), 1, f"the number of candidates of token {record.token_id}")
        is_best = record.candidates[0].token_id == record.token_id
        if record.HasField("rank"):
            expect(
                (record.rank == 1) == is_best, f"token {record.token_id} has rank {record.rank}", "RESP-09"
            )
    if all(record.candidates[0].token_id == record.token_id for record in stream.first.records):
        skip("every sampled token was the best one")


@case(
    "response_options.top_zero",
    "top_n 0 gives no candidates.",
    "RESP-04",
    needs=[needs.GENERATES, needs.OUTPUT_TOP_N],
)
async def top_zero(ctx: Context) -> None:
    for record in (await run_with(ctx, of_output(top(0)))).first.records:
        expect_equal(len(record.candidates), 0, "the number of candidates for top_n 0")
        expect(record.HasField("logprob"), "the record has no logprob", "RESP-03")


@case(
    "response_options.max_top_n",
    "max_top_n is served, and one more is rejected by name, for prompt and output each.",
    "RESP-04",
    "MODEL-06",
    "MODEL-07",
    needs=[needs.GENERATES],
)
async def max_top_n(ctx: Context) -> None:
    limits = {side: ctx.offer.logprobs(prompt=side == "prompt") for side in ("prompt", "output")}
    limits = {
        side: limit for side, limit in limits.items() if limit.supported and limit.HasField("max_top_n")
    }
    if not limits:
        skip("no max_top_n is reported")
    for side, limit in limits.items():
        form = of_prompt if side == "prompt" else of_output
        await run_with(ctx, form(top(limit.max_top_n)), max_tokens=1)
        over = ctx.request(response=form(top(limit.max_top_n + 1)))
        await ctx.refused(ctx.rpc.Generate, over, Code.INVALID_ARGUMENT, names=f"top_n|{side}_candidates")


@case(
    "response_options.output_token_ids",
    "Explicit output candidates come back exactly, in the order asked, with their own ranks.",
    "RESP-05",
    needs=[needs.GENERATES, needs.OUTPUT_TOKEN_IDS],
    exclusive=True,
)
async def output_token_ids(ctx: Context) -> None:
    greedy = (await probes.baseline(ctx)).first.ids[0]
    asked = [token for token in (70, 40, 55) if token != greedy] + [greedy]
    record = (await run_with(ctx, of_output(explicit(*asked)), max_tokens=1)).first.records[0]
    expect_equal([c.token_id for c in record.candidates], asked, "the list of candidates")
    chosen = record.candidates[-1]
    expect_close(chosen.logprob, record.logprob, 1e-3, "the candidate logprob of the chosen token")
    for candidate in record.candidates:
        if candidate.HasField("rank"):
            best = candidate.token_id == greedy
            expect((candidate.rank == 1) == best, f"candidate {candidate.token_id} has rank {candidate.rank}")


@case(
    "response_options.bad_token_ids",
    "Candidate ids that repeat or lie outside the vocabulary are INVALID_ARGUMENT.",
    "RESP-05",
    needs=[needs.GENERATES],
)
async def bad_token_ids(ctx: Context) -> None:
    forms = []
    if ctx.offer.selects(Mode.CANDIDATE_TOKEN_SELECTION_MODE_TOKEN_IDS, prompt=False):
        forms.append((of_output, "output_candidates"))
    if ctx.offer.selects(Mode.CANDIDATE_TOKEN_SELECTION_MODE_TOKEN_IDS, prompt=True):
        forms.append((of_prompt, "prompt_candidates"))
    if not forms:
        skip("TOKEN_IDS is not advertised for any candidates")
    for form, name in forms:
        for ids in ([40, 41, 40], [40, OUTSIDE_VOCABULARY]):
            request = ctx.request(response=form(explicit(*ids)))
            await ctx.refused(ctx.rpc.Generate, request, Code.INVALID_ARGUMENT, names=f"{name}|token_ids")
    await ctx.still_serves("GEN-10")


@case(
    "response_options.output_all",
    "`all` gives the whole vocabulary: dense ids whose probabilities sum to 1.",
    "RESP-06",
    needs=[needs.GENERATES, needs.OUTPUT_ALL],
)
async def output_all(ctx: Context) -> None:
    stream = await run_with(ctx, of_output(EVERYTHING), max_tokens=2)
    for record in stream.first.records:
        expect_whole_vocabulary(record)
    sizes = {len(record.candidates) for record in stream.first.records}
    expect_equal(len(sizes), 1, "the number of different vocabulary sizes")


@case(
    "response_options.independent",
    "Prompt and output have selections of their own, or the difference is rejected by name.",
    "RESP-07",
    needs=[needs.GENERATES, needs.PROMPT_TOP_N, needs.OUTPUT_TOP_N],
)
async def independent(ctx: Context) -> None:
    sizes = min(2, ctx.offer.top_n(prompt=True, wanted=2)), min(1, ctx.offer.top_n(prompt=False, wanted=1))
    options = of_prompt(top(sizes[0]))
    options.MergeFrom(of_output(top(sizes[1])))
    try:
        stream = await run_with(ctx, options)
    except Refused as refused:
        named = refused.code is Code.INVALID_ARGUMENT and "candidates" in refused.details
        expect(named, f"different selections are refused, but not by name: {refused}")
        return
    expect_equal(
        {len(r.candidates) for r in records_of_prompt(stream)[1:]}, {sizes[0]}, "the numbers for the prompt"
    )
    expect_equal({len(r.candidates) for r in stream.first.records}, {sizes[1]}, "the numbers for the output")


@case(
    "response_options.candidates_need_flag",
    "Candidates without their return_*_logprobs flag are INVALID_ARGUMENT.",
    "RESP-08",
    needs=[needs.TAKES_PROMPTS],
)
async def candidates_need_flag(ctx: Context) -> None:
    for options, name in (
        (Options(output_candidates=top(1)), "output"),
        (Options(prompt_candidates=top(1)), "prompt"),
        (Options(return_output_logprobs=False, output_candidates=top(1)), "output"),
        (Options(return_output_logprobs=True, prompt_candidates=top(1)), "prompt|output"),
    ):
        request = ctx.request(response=options)
        await ctx.refused(ctx.rpc.Generate, request, Code.INVALID_ARGUMENT, names=name)


@case(
    "response_options.modes_unadvertised",
    "Candidate selection modes that are not advertised are rejected by name.",
    "MODEL-07",
    "MODEL-06",
    needs=[needs.TAKES_PROMPTS],
)
async def modes_unadvertised(ctx: Context) -> None:
    tried = 0
    for mode, selection in (
        (Mode.CANDIDATE_TOKEN_SELECTION_MODE_TOP_N, top(1)),
        (Mode.CANDIDATE_TOKEN_SELECTION_MODE_TOKEN_IDS, explicit(40)),
        (Mode.CANDIDATE_TOKEN_SELECTION_MODE_ALL, EVERYTHING),
    ):
        for prompt, form in ((True, of_prompt), (False, of_output)):
            if not ctx.offer.selects(mode, prompt=prompt):
                request = ctx.request(response=form(selection))
                names = "prompt_candidates|prompt_logprobs" if prompt else "output_candidates|output_logprobs"
                await ctx.refused(ctx.rpc.Generate, request, Code.INVALID_ARGUMENT, names=names)
                tried += 1
    if not tried:
        skip("every mode is advertised")


@case(
    "response_options.teacher_forced",
    "The log-probabilities of an output are those that its tokens have as part of a prompt.",
    "RESP-09",
    needs=[needs.GENERATES, needs.TOKEN_IDS, needs.PROMPT_LOGPROBS, needs.OUTPUT_LOGPROBS],
    exclusive=True,
)
async def teacher_forced(ctx: Context) -> None:
    prompt = list(range(40, 52))
    output = (await ctx.generate(ctx.steady(prompt, max_tokens=6, response=of_output()))).first
    again = await ctx.generate(ctx.request([*prompt, *output.ids], max_tokens=1, response=of_prompt()))
    forced = records_of_prompt(again)[len(prompt) :]
    for generated, scored in zip(output.records, forced, strict=True):
        what = f"the logprob of token {generated.token_id}, generated and as part of a prompt,"
        expect_close(scored.logprob, generated.logprob, ROUNDING, what)


def expect_whole_vocabulary(record: generate_pb2.TokenInfo) -> None:
    """Require that the candidates are dense ids whose probabilities sum to 1."""
    ids = sorted(candidate.token_id for candidate in record.candidates)
    expect_equal(ids[-1:], [len(ids) - 1], f"the highest id of {len(ids)} candidates")
    total = math.fsum(math.exp(candidate.logprob) for candidate in record.candidates)
    expect_close(total, 1.0, 0.02, "the sum of all probabilities", "RESP-09")
