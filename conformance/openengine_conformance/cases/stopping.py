# SPDX-License-Identifier: Apache-2.0
"""StoppingOptions: lengths, stop tokens and strings, EOS, and what of a stop may be seen."""

from __future__ import annotations

from openengine.v1 import generate_pb2, model_pb2
from openengine_conformance import needs, probes
from openengine_conformance.case import case
from openengine_conformance.checks import Code, Skip, expect, expect_equal, skip
from openengine_conformance.context import Context
from openengine_conformance.stream import Output, Stream

Options = generate_pb2.StoppingOptions
Condition = generate_pb2.StopCondition
STOP, LENGTH = generate_pb2.FINISH_REASON_STOP, generate_pb2.FINISH_REASON_LENGTH
BEYOND_DEFAULTS = 130
LONGEST_FILLED_CONTEXT = 2048


@case(
    "stopping.max_tokens",
    "max_tokens is reached exactly, and the output then finishes LENGTH.",
    "STOP-01",
    needs=[needs.GENERATES],
)
async def max_tokens(ctx: Context) -> None:
    for count in (1, 2, 7):
        stream = await ctx.generate(ctx.steady(max_tokens=count))
        expect_equal(len(stream.first.ids), count, f"the number of tokens for max_tokens {count}")
        expect_equal(stream.finish.reason, LENGTH, "the finish reason")


@case(
    "stopping.max_tokens_each",
    "max_tokens bounds each sequence, not their sum.",
    "STOP-01",
    needs=[needs.GENERATES, needs.SEVERAL_SEQUENCES],
)
async def max_tokens_each(ctx: Context) -> None:
    sampling = generate_pb2.SamplingParams(num_sequences=2)
    stream = await ctx.generate(ctx.steady(max_tokens=5, temperature=1.0, sampling=sampling))
    expect_equal([len(o.ids) for o in stream.outputs.values()], [5, 5], "the numbers of tokens")


@case("stopping.zero_max_tokens", "max_tokens 0 is INVALID_ARGUMENT.", "STOP-01", needs=[needs.TAKES_PROMPTS])
async def zero_max_tokens(ctx: Context) -> None:
    await ctx.refused(ctx.rpc.Generate, ctx.request(max_tokens=0), Code.INVALID_ARGUMENT, names="max_tokens")


@case(
    "stopping.no_max_tokens",
    "Without max_tokens an output runs on past the 16 or 128 tokens of engine defaults.",
    "STOP-01",
    needs=[needs.GENERATES],
    timeout=60,
)
async def no_max_tokens(ctx: Context) -> None:
    if 0 < ctx.offer.info.max_context_length < 2 * BEYOND_DEFAULTS:
        skip("the context is too short to tell")
    stream = ctx.open(ctx.steady(max_tokens=None))
    await stream.wait_tokens(BEYOND_DEFAULTS)
    stream.check()
    stream.cancel()


@case(
    "stopping.context_end",
    "A max_tokens that the context can't hold is accepted, and the output ends LENGTH at the context's end.",
    "STOP-01",
    needs=[needs.GENERATES, needs.TOKEN_IDS, needs.CONTEXT_LENGTH],
    timeout=60,
)
async def context_end(ctx: Context) -> None:
    longest = ctx.offer.info.max_context_length
    if longest > LONGEST_FILLED_CONTEXT:
        skip(f"filling a context of {longest} tokens takes too long")
    room = 6
    stream = await ctx.generate(ctx.steady(ctx.unique_prompt(longest - room), max_tokens=10 * longest))
    expect_equal(stream.finish.reason, LENGTH, "the finish reason")
    # Engines differ by a token in whether the last position may be filled.
    expect(
        room - 1 <= len(stream.first.ids) <= room,
        f"{len(stream.first.ids)} tokens came, with room for {room}",
    )


@case(
    "stopping.min_tokens",
    "min_tokens holds stop tokens and stop strings back.",
    "STOP-02",
    needs=[needs.GENERATES],
    exclusive=True,
)
async def min_tokens(ctx: Context) -> None:
    base = (await probes.baseline(ctx)).first
    conditions = [Condition(stop_token_id=base.ids[1])]
    if len(text := base.text_of(2)) >= 2 and probes.UNSHOWABLE not in text:
        conditions.append(Condition(stop_text=text[-1]))
    for condition in conditions:
        early = await ctx.generate(stopped(ctx, condition))
        expect(len(early.first.ids) < 5, f"the stop {_name(condition)} did not stop the output early")
        held = await ctx.generate(stopped(ctx, condition, min_tokens=5))
        completion = (held.usage or generate_pb2.Usage()).completion_tokens
        expect(completion >= 5, f"{completion} tokens came for min_tokens 5 and the stop {_name(condition)}")
        # What was let pass belongs to the output; only the stop that ended it may be missing.
        sent = len(held.first.ids)
        expect(sent >= 4, f"{sent} token records came for min_tokens 5 and the stop {_name(condition)}")


@case(
    "stopping.min_tokens_and_eos",
    "min_tokens holds EOS back.",
    "STOP-02",
    needs=[needs.GENERATES, needs.TEXT],
    exclusive=True,
)
async def min_tokens_and_eos(ctx: Context) -> None:
    ended = await _ended_by_itself(ctx)
    wanted = len(ended.first.ids) + 3
    request = ctx.request(ended.request.prompt, max_tokens=wanted + 2, stopping=Options(min_tokens=wanted))
    stream = await ctx.generate(request)
    completion = (stream.usage or generate_pb2.Usage()).completion_tokens
    expect(completion >= wanted, f"{completion} tokens came for min_tokens {wanted}")


@case(
    "stopping.min_above_max",
    "min_tokens above max_tokens is INVALID_ARGUMENT.",
    "STOP-02",
    needs=[needs.TAKES_PROMPTS],
)
async def min_above_max(ctx: Context) -> None:
    request = ctx.request(max_tokens=4, stopping=Options(min_tokens=5))
    await ctx.refused(ctx.rpc.Generate, request, Code.INVALID_ARGUMENT, names="min_tokens")


@case(
    "stopping.only_stop_has_a_match",
    "An output that finishes LENGTH carries no stop_match.",
    "STOP-04",
    needs=[needs.GENERATES],
)
async def only_stop_has_a_match(ctx: Context) -> None:
    stream = await ctx.generate(ctx.steady(max_tokens=3))
    expect_equal(stream.finish.reason, LENGTH, "the finish reason")
    expect(not stream.finish.HasField("stop_match"), "stop_match is set on an output that finished LENGTH")


@case(
    "stopping.eos",
    "An output that the model ends by itself finishes STOP with the EOS token, whose record is sent without text.",
    "STOP-04",
    "STOP-07",
    needs=[needs.GENERATES],
    exclusive=True,
)
async def eos(ctx: Context) -> None:
    token = await probes.eos(ctx)
    stream = await _ended_by_itself(ctx, guided=True)
    expect_stop(stream, generate_pb2.StopMatch(eos_token_id=token))
    expect_equal(stream.first.ids[-1:], [token], "the last record")
    if stream.request.HasField("guided"):
        expect_equal(stream.first.text, "yes", "the text of the only choice")
    _, last = stream.first.pieces[-1]
    expect(probes.UNSHOWABLE not in last, f"the EOS token shows as text: {last!r}")


@case(
    "stopping.eos_as_stop_token",
    "A caller's stop token that is also an EOS token is reported as the caller's.",
    "STOP-04",
    needs=[needs.GENERATES],
    exclusive=True,
)
async def eos_as_stop_token(ctx: Context) -> None:
    token = await probes.eos(ctx)
    request = ctx.copy((await _ended_by_itself(ctx, guided=True)).request)
    request.stopping.conditions.append(Condition(stop_token_id=token))
    stream = await ctx.generate(request)
    expect_stop(stream, generate_pb2.StopMatch(stop_token_id=token))
    expect(token not in stream.first.ids, "the stop token is among the records", "STOP-05")


@case(
    "stopping.ignore_eos",
    "ignore_eos runs past EOS to max_tokens.",
    "STOP-06",
    needs=[needs.GENERATES, needs.TEXT],
    exclusive=True,
)
async def ignore_eos(ctx: Context) -> None:
    ended = await _ended_by_itself(ctx)
    wanted = len(ended.first.ids) + 4
    stream = await ctx.generate(ctx.steady(ended.request.prompt, max_tokens=wanted))
    expect_equal(len(stream.first.ids), wanted, "the number of tokens with ignore_eos")
    expect_equal(stream.finish.reason, LENGTH, "the finish reason")


@case(
    "stopping.ignore_eos_to_length",
    "With ignore_eos every output finishes LENGTH at max_tokens.",
    "STOP-06",
    needs=[needs.GENERATES],
)
async def ignore_eos_to_length(ctx: Context) -> None:
    streams = await ctx.generate_all(*(ctx.steady(ctx.unique_prompt(6), temperature=1.0) for _ in range(4)))
    for stream in streams:
        expect_equal(stream.finish.reason, LENGTH, "the finish reason with ignore_eos")
        expect_equal(len(stream.first.ids), 8, "the number of tokens with ignore_eos")


@case(
    "stopping.whole_characters",
    "A character split over tokens is sent whole, once.",
    "STOP-07",
    "GUIDE-01",
    needs=[needs.GENERATES, needs.guided(model_pb2.GUIDED_DECODING_MODE_CHOICE)],
)
async def whole_characters(ctx: Context) -> None:
    text = "é🦜漢☕"
    guided = generate_pb2.GuidedDecoding(choice=generate_pb2.ChoiceConstraint(choices=[text]))
    stream = await ctx.generate(ctx.request(max_tokens=40, guided=guided))
    expect_equal(stream.first.text, text, "the text of the only choice")
    for _, piece in stream.first.pieces:
        expect(probes.UNSHOWABLE not in piece, f"a piece {piece!r} holds part of a character")


@case(
    "stopping.text_after_records",
    "At every moment the records sent cover the text sent.",
    "STOP-07",
    needs=[needs.GENERATES],
    exclusive=True,
)
async def text_after_records(ctx: Context) -> None:
    """Cut the same run short at each length: text that is there after k records must be there at k tokens."""
    base = (await probes.baseline(ctx)).first
    for count in (2, 5, 8):
        stream = await ctx.generate(ctx.steady(max_tokens=count))
        text = base.text_of(count)
        ahead = len(text) > len(stream.first.text)
        expect(
            not ahead,
            f"after {count} records the text was {text!r}, but {count} tokens are {stream.first.text!r}",
        )


# ------------------------------------------------------------------------------------------------- helpers


def stopped(ctx: Context, condition: Condition, **options: bool | int) -> generate_pb2.GenerateRequest:
    """A request of the baseline, with one stop condition."""
    stopping = Options(conditions=[condition], **options)  # type: ignore[arg-type]  # the names are fields
    return ctx.steady(max_tokens=probes.BASELINE_TOKENS, stopping=stopping)


def _name(condition: Condition) -> str:
    return str(condition).strip()


def expect_stop(stream: Stream, match: generate_pb2.StopMatch) -> None:
    """Require that output 0 finished STOP, with this match."""
    expect_equal(stream.finish.reason, STOP, "the finish reason", "STOP-03")
    expect_equal(_flat(stream.finish.stop_match), _flat(match), "stop_match", "STOP-04")


def _flat(message: generate_pb2.StopMatch) -> str:
    return str(message).strip()


def first_new_token(base: Output) -> int:
    """A position of the baseline whose token did not come before, so that a stop on it stops there."""
    for position in (4, 3, 5, 2, 6, 1, 7):
        if position < len(base.ids) and base.ids[position] not in base.ids[:position]:
            return position
    raise Skip("the model repeats one token")


async def _ended_by_itself(ctx: Context, *, guided: bool = False) -> Stream:
    """A stream that ended with EOS, without guidance unless that may be used; skips when there is none."""
    await probes.eos(ctx)
    for request in probes.requests_that_may_end(ctx):
        if request.HasField("guided") and not guided:
            continue
        stream = await ctx.generate(request)
        if stream.finish.stop_match.HasField("eos_token_id"):
            return stream
    raise Skip("no plain prompt made the model end by itself")
