# SPDX-License-Identifier: Apache-2.0
"""Stop tokens and stop strings: what they end, what they are called, and what of them may be seen."""

from __future__ import annotations

from openengine.v1 import generate_pb2
from openengine_conformance import needs, probes
from openengine_conformance.case import case
from openengine_conformance.cases.stopping import expect_stop, first_new_token, stopped
from openengine_conformance.checks import Code, expect, expect_equal, skip
from openengine_conformance.context import Context
from openengine_conformance.stream import Output

Options = generate_pb2.StoppingOptions
Condition = generate_pb2.StopCondition
LENGTH = generate_pb2.FINISH_REASON_LENGTH


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
    position = first_new_token(base)
    token = base.ids[position]
    stream = await ctx.generate(stopped(ctx, Condition(stop_token_id=token)))
    expect_stop(stream, generate_pb2.StopMatch(stop_token_id=token))
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
    position = first_new_token(base)
    condition = Condition(stop_token_id=base.ids[position])
    stream = await ctx.generate(stopped(ctx, condition, include_stop_in_output=True))
    expect_stop(stream, generate_pb2.StopMatch(stop_token_id=base.ids[position]))
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
        stream = await ctx.generate(stopped(ctx, Condition(stop_text=text)))
        expect_stop(stream, generate_pb2.StopMatch(stop_text=text))
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
        stream = await ctx.generate(stopped(ctx, Condition(stop_text=text), include_stop_in_output=True))
        expect_stop(stream, generate_pb2.StopMatch(stop_text=text))
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
    position = first_new_token(base)
    never = Condition(stop_text="\u2603 this will not come \u2603")
    conditions = [never, Condition(stop_token_id=base.ids[position])]
    stream = await ctx.generate(ctx.steady(max_tokens=12, stopping=Options(conditions=conditions)))
    expect_stop(stream, generate_pb2.StopMatch(stop_token_id=base.ids[position]))


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
    stream = await ctx.generate(stopped(ctx, Condition(stop_text=never)))
    expect_equal(stream.finish.reason, LENGTH, "the finish reason")
    expect_equal(stream.first.text, base.text, "the text that was held back")
    expect_equal(stream.first.ids, base.ids, "the list of records that were held back")


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
