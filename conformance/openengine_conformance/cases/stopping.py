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
        early = await ctx.generate(_stopped(ctx, condition))
        expect(len(early.first.ids) < 5, f"the stop {_name(condition)} did not stop the output early")
        held = await ctx.generate(_stopped(ctx, condition, min_tokens=5))
        completion = (held.usage or generate_pb2.Usage()).completion_tokens
        expect(completion >= 5, f"{completion} tokens came for min_tokens 5 and the stop {_name(condition)}")


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
    "stopping.empty_condition",
    "A stop condition without a variant is INVALID_ARGUMENT.",
    "STOP-03",
    needs=[needs.TAKES_PROMPTS],
)
async def empty_condition(ctx: Context) -> None:
    request = ctx.request(stopping=Options(conditions=[Condition()]))
    await ctx.refused(ctx.rpc.Generate, request, Code.INVALID_ARGUMENT, names="condition")


@case(
    "stopping.empty_text", "An empty stop string is INVALID_ARGUMENT.", "STOP-03", needs=[needs.TAKES_PROMPTS]
)
async def empty_text(ctx: Context) -> None:
    good = Condition(stop_text="never mind")
    request = ctx.request(stopping=Options(conditions=[good, Condition(stop_text="")]))
    await ctx.refused(ctx.rpc.Generate, request, Code.INVALID_ARGUMENT, names="condition|stop_text")


@case(
    "stopping.stop_token",
    "A stop token ends the output STOP, is named in stop_match, and is in neither records nor text.",
    "STOP-03",
    "STOP-04",
    "STOP-05",
    needs=[needs.GENERATES],
    exclusive=True,
)
async def stop_token(ctx: Context) -> None:
    base = (await probes.baseline(ctx)).first
    position = _first_new_token(base)
    token = base.ids[position]
    stream = await ctx.generate(_stopped(ctx, Condition(stop_token_id=token)))
    _expect_stop(stream, generate_pb2.StopMatch(stop_token_id=token))
    expect_equal(
        stream.first.ids, base.ids[:position], "the list of records before the stop token", "STOP-05"
    )
    expected = base.text_of(position).rstrip(probes.UNSHOWABLE)
    expect_equal(
        stream.first.text.rstrip(probes.UNSHOWABLE), expected, "the text before the stop token", "STOP-05"
    )


@case(
    "stopping.stop_token_in_output",
    "With include_stop_in_output the stop token is in the records and the text.",
    "STOP-05",
    "MODEL-07",
    needs=[needs.GENERATES, needs.STOP_IN_OUTPUT],
    exclusive=True,
)
async def stop_token_in_output(ctx: Context) -> None:
    base = (await probes.baseline(ctx)).first
    position = _first_new_token(base)
    condition = Condition(stop_token_id=base.ids[position])
    stream = await ctx.generate(_stopped(ctx, condition, include_stop_in_output=True))
    _expect_stop(stream, generate_pb2.StopMatch(stop_token_id=base.ids[position]))
    expect_equal(stream.first.ids, base.ids[: position + 1], "the list of records with the stop token")
    if not stream.first.text.endswith(probes.UNSHOWABLE):
        expect_equal(stream.first.text, base.text_of(position + 1), "the text with the stop token")


@case(
    "stopping.stop_text",
    "A stop string ends the output STOP, is named in stop_match, and nothing of it was sent.",
    "STOP-03",
    "STOP-04",
    "STOP-05",
    "STOP-07",
    needs=[needs.GENERATES],
    exclusive=True,
)
async def stop_text(ctx: Context) -> None:
    base = (await probes.baseline(ctx)).first
    for text in _stop_strings(base):
        stream = await ctx.generate(_stopped(ctx, Condition(stop_text=text)))
        _expect_stop(stream, generate_pb2.StopMatch(stop_text=text))
        expected = base.text[: base.text.find(text)]
        expect_equal(stream.first.text, expected, f"the text before the stop {text!r}", "STOP-05")
        _expect_records_cover(stream.first, base, expected, text)


@case(
    "stopping.stop_text_in_output",
    "With include_stop_in_output the stop string ends the text, and nothing comes after it.",
    "STOP-05",
    "MODEL-07",
    needs=[needs.GENERATES, needs.STOP_IN_OUTPUT],
    exclusive=True,
)
async def stop_text_in_output(ctx: Context) -> None:
    base = (await probes.baseline(ctx)).first
    for text in _stop_strings(base)[:2]:
        stream = await ctx.generate(_stopped(ctx, Condition(stop_text=text), include_stop_in_output=True))
        _expect_stop(stream, generate_pb2.StopMatch(stop_text=text))
        expected = base.text[: base.text.find(text) + len(text)]
        expect_equal(stream.first.text, expected, f"the text with the stop {text!r}")
        count = len(stream.first.ids)
        expect_equal(stream.first.ids, base.ids[:count], "the list of records with the stop")
        covered = len(base.text_of(count)) >= len(expected)
        expect(covered, f"the records stop before the stop string {text!r} does", "STOP-07")


@case(
    "stopping.several_conditions",
    "Of several stop conditions the first that matches ends the output, and is the one named.",
    "STOP-03",
    "STOP-04",
    needs=[needs.GENERATES],
    exclusive=True,
)
async def several_conditions(ctx: Context) -> None:
    base = (await probes.baseline(ctx)).first
    position = _first_new_token(base)
    never = Condition(stop_text="\u2603 this will not come \u2603")
    conditions = [never, Condition(stop_token_id=base.ids[position])]
    stream = await ctx.generate(ctx.steady(max_tokens=12, stopping=Options(conditions=conditions)))
    _expect_stop(stream, generate_pb2.StopMatch(stop_token_id=base.ids[position]))


@case(
    "stopping.unmatched_text",
    "A stop string whose beginning comes, but not its end, takes nothing from the text.",
    "STOP-05",
    "STOP-07",
    needs=[needs.GENERATES],
    exclusive=True,
)
async def unmatched_text(ctx: Context) -> None:
    base = (await probes.baseline(ctx)).first
    text = base.text.rstrip(probes.UNSHOWABLE)
    if len(text) < 2:
        skip("the model's output has too little text")
    never = f"{text[-2:]}\u2603"
    stream = await ctx.generate(_stopped(ctx, Condition(stop_text=never)))
    expect_equal(stream.finish.reason, LENGTH, "the finish reason")
    expect_equal(stream.first.text, base.text, "the text that was held back")
    expect_equal(stream.first.ids, base.ids, "the list of records that were held back")


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
    _expect_stop(stream, generate_pb2.StopMatch(eos_token_id=token))
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
    _expect_stop(stream, generate_pb2.StopMatch(stop_token_id=token))
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


def _stopped(ctx: Context, condition: Condition, **options: bool | int) -> generate_pb2.GenerateRequest:
    stopping = Options(conditions=[condition], **options)  # type: ignore[arg-type]  # the names are fields
    return ctx.steady(max_tokens=probes.BASELINE_TOKENS, stopping=stopping)


def _name(condition: Condition) -> str:
    return str(condition).strip()


def _expect_stop(stream: Stream, match: generate_pb2.StopMatch) -> None:
    expect_equal(stream.finish.reason, STOP, "the finish reason", "STOP-03")
    expect_equal(_flat(stream.finish.stop_match), _flat(match), "stop_match", "STOP-04")


def _flat(message: generate_pb2.StopMatch) -> str:
    return str(message).strip()


def _first_new_token(base: Output) -> int:
    """A position of the baseline whose token did not come before, so that a stop on it stops there."""
    for position in (4, 3, 5, 2, 6, 1, 7):
        if position < len(base.ids) and base.ids[position] not in base.ids[:position]:
            return position
    raise Skip("the model repeats one token")


def _stop_strings(base: Output) -> list[str]:
    """Strings of the baseline's text: inside a piece, and straddling two of them."""
    text = base.text
    strings = [text[len(text) // 2 :][:1], text[len(text) // 2 :][:4]]
    start = 0
    for _, piece in base.pieces:
        start += len(piece)
        if 4 <= start <= len(text) - 3:
            strings += [text[start - 2 : start + 2], text[start - 1 : start + 3]]
    usable = [s for s in dict.fromkeys(strings) if s.strip() and probes.UNSHOWABLE not in s]
    usable = [s for s in usable if probes.UNSHOWABLE not in text[: text.find(s)]]
    if not usable:
        skip("the model's output has no text to stop at")
    return usable[:4]


def _expect_records_cover(output: Output, base: Output, text: str, stop: str) -> None:
    """The records are the run's first ones, reach the end of the text, and leave out tokens of the stop alone."""
    count = len(output.ids)
    expect_equal(output.ids, base.ids[:count], "the list of records before the stop", "STOP-07")
    covered = base.text_of(count)
    expect(len(covered) >= len(text), f"the records cover {covered!r}, the text is {text!r}", "STOP-07")
    before = base.text_of(max((k for k, _ in base.pieces if k < count), default=0))
    inside = len(covered) > len(before) >= len(text)
    expect(not inside, f"a record lies wholly inside the stop string {stop!r}", "STOP-05")


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
