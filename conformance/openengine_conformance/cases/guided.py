# SPDX-License-Identifier: Apache-2.0
"""Guided decoding: every advertised mode is obeyed, and what can't be obeyed is rejected."""

from __future__ import annotations

import json
import re

from openengine.v1 import generate_pb2, model_pb2
from openengine_conformance import needs
from openengine_conformance.case import case
from openengine_conformance.checks import Code, Refused, expect, expect_equal, expect_in, fail, skip
from openengine_conformance.context import Context
from openengine_conformance.stream import Stream

Guide = generate_pb2.GuidedDecoding
LENGTH = generate_pb2.FINISH_REASON_LENGTH
COLOURS = ["red", "green", "ultramarine"]
CHOICE = Guide(choice=generate_pb2.ChoiceConstraint(choices=COLOURS))


async def _guided(ctx: Context, guide: generate_pb2.GuidedDecoding, *, temperature: float = 0.0) -> Stream:
    return await ctx.generate(ctx.request(max_tokens=48, temperature=temperature, guided=guide))


async def _expect_rejected(ctx: Context, name: str, *guides: generate_pb2.GuidedDecoding) -> None:
    for guide in guides:
        request = ctx.request(guided=guide)
        await ctx.refused(ctx.rpc.Generate, request, Code.INVALID_ARGUMENT, names=f"guided|{name}")
    await ctx.still_serves()


@case(
    "guided.json_schema",
    "A JSON schema constrains the output to a document that it allows.",
    "GUIDE-01",
    needs=[needs.GENERATES, needs.guided(model_pb2.GUIDED_DECODING_MODE_JSON_SCHEMA)],
)
async def json_schema(ctx: Context) -> None:
    for schema in ({"type": "string", "enum": COLOURS}, {"type": "boolean"}):
        stream = await _guided(ctx, Guide(json_schema=json.dumps(schema)))
        allowed = [True, False] if schema["type"] == "boolean" else COLOURS
        expect_in(_parse(stream), allowed, "the JSON value")


@case(
    "guided.json_schema_object",
    "A JSON schema of an object gives an object with the required members and no others.",
    "GUIDE-01",
    needs=[needs.GENERATES, needs.guided(model_pb2.GUIDED_DECODING_MODE_JSON_SCHEMA)],
)
async def json_schema_object(ctx: Context) -> None:
    members = {"colour": {"enum": COLOURS}, "wet": {"type": "boolean"}}
    schema = {
        "type": "object",
        "properties": members,
        "required": list(members),
        "additionalProperties": False,
    }
    stream = await _guided(ctx, Guide(json_schema=json.dumps(schema)))
    if stream.finish.reason == LENGTH:
        _expect_json_beginning(stream.first.text)
        return
    value = _parse(stream)
    if not isinstance(value, dict):
        fail(f"{value!r} is no object")
    expect_equal(set(value), set(members), "the set of members")
    expect_in(value["colour"], COLOURS, "the member colour")
    expect_in(value["wet"], [True, False], "the member wet")


@case(
    "guided.json_object",
    "JSON-object guidance gives a JSON object, or its beginning when max_tokens cuts it off.",
    "GUIDE-01",
    needs=[needs.GENERATES, needs.guided(model_pb2.GUIDED_DECODING_MODE_JSON_OBJECT)],
)
async def json_object(ctx: Context) -> None:
    stream = await _guided(ctx, Guide(json_object=generate_pb2.JsonObjectConstraint()))
    expect(stream.first.text.lstrip().startswith("{"), f"the output {stream.first.text!r} is no object")
    if stream.finish.reason == LENGTH:
        _expect_json_beginning(stream.first.text)
    else:
        expect(isinstance(_parse(stream), dict), f"the output {stream.first.text!r} is no object")


@case(
    "guided.regex",
    "A regular expression constrains the whole output, at any temperature.",
    "GUIDE-01",
    needs=[needs.GENERATES, needs.guided(model_pb2.GUIDED_DECODING_MODE_REGEX)],
)
async def regex(ctx: Context) -> None:
    for pattern, temperature in ((r"[ab]{3}-[0-9]{2}", 0.0), (r"(red|green) [A-F]{4}", 1.0)):
        text = (await _guided(ctx, Guide(regex=pattern), temperature=temperature)).first.text
        expect(re.fullmatch(pattern, text), f"the output {text!r} does not match {pattern!r}")


@case(
    "guided.ebnf",
    "A grammar constrains the output to its language.",
    "GUIDE-01",
    needs=[needs.GENERATES, needs.guided(model_pb2.GUIDED_DECODING_MODE_EBNF_GRAMMAR)],
)
async def ebnf(ctx: Context) -> None:
    grammar = 'root ::= colour " " digit digit\ncolour ::= "red" | "green"\ndigit ::= [0-9]\n'
    text = (await _guided(ctx, Guide(ebnf_grammar=grammar))).first.text
    expect(re.fullmatch(r"(red|green) [0-9]{2}", text), f"the output {text!r} is not of the grammar")


@case(
    "guided.structural_tag",
    "A structural tag gives its begin, the content that its schema allows, and its end.",
    "GUIDE-01",
    needs=[needs.GENERATES, needs.guided(model_pb2.GUIDED_DECODING_MODE_STRUCTURAL_TAG)],
)
async def structural_tag(ctx: Context) -> None:
    content = {"type": "json_schema", "json_schema": {"enum": COLOURS}}
    tag = {"type": "tag", "begin": "<colour>", "content": content, "end": "</colour>"}
    guide = Guide(structural_tag=json.dumps({"type": "structural_tag", "format": tag}))
    text = (await _guided(ctx, guide)).first.text
    expect(
        re.fullmatch(r'<colour>"(red|green|ultramarine)"</colour>', text),
        f"the output {text!r} breaks the tag",
    )


@case(
    "guided.choice",
    "A choice gives exactly one of its strings, greedy or sampled.",
    "GUIDE-01",
    needs=[needs.GENERATES, needs.guided(model_pb2.GUIDED_DECODING_MODE_CHOICE)],
)
async def choice(ctx: Context) -> None:
    for temperature in (0.0, 1.0, 1.5):
        stream = await _guided(ctx, CHOICE, temperature=temperature)
        expect_in(stream.first.text, COLOURS, "the output")
    only = Guide(choice=generate_pb2.ChoiceConstraint(choices=["a single one"]))
    expect_equal((await _guided(ctx, only)).first.text, "a single one", "the only choice")


@case(
    "guided.several_sequences",
    "Every sequence of a guided request obeys the guide.",
    "GUIDE-01",
    needs=[needs.GENERATES, needs.SEVERAL_SEQUENCES, needs.guided(model_pb2.GUIDED_DECODING_MODE_CHOICE)],
)
async def several_sequences(ctx: Context) -> None:
    sampling = generate_pb2.SamplingParams(num_sequences=2)
    stream = await ctx.generate(ctx.request(max_tokens=24, temperature=1.0, sampling=sampling, guided=CHOICE))
    for index, output in stream.outputs.items():
        expect_in(output.text, COLOURS, f"output {index}")


@case(
    "guided.bad_json_schema",
    "A JSON schema that is empty or no JSON is INVALID_ARGUMENT, and the engine goes on serving.",
    "GUIDE-02",
    "GEN-10",
    needs=[needs.GENERATES],
)
async def bad_json_schema(ctx: Context) -> None:
    await _expect_rejected(
        ctx,
        "json_schema",
        Guide(json_schema=""),
        Guide(json_schema="{not json"),
        Guide(json_schema='{"type": "no-such-type"}'),
    )


@case(
    "guided.bad_regex",
    "A regular expression that is empty or malformed is INVALID_ARGUMENT, and the engine goes on serving.",
    "GUIDE-02",
    "GEN-10",
    needs=[needs.GENERATES],
)
async def bad_regex(ctx: Context) -> None:
    await _expect_rejected(ctx, "regex", Guide(regex=""), Guide(regex="(ab"), Guide(regex="[z-a]"))


@case(
    "guided.bad_grammar",
    "A grammar that is empty or malformed is INVALID_ARGUMENT, and the engine goes on serving.",
    "GUIDE-02",
    "GEN-10",
    needs=[needs.GENERATES],
)
async def bad_grammar(ctx: Context) -> None:
    guides = [Guide(ebnf_grammar=text) for text in ("", "root ::= (", "root ::= undefined_rule")]
    await _expect_rejected(ctx, "ebnf_grammar", *guides)


@case(
    "guided.bad_structural_tag",
    "A structural tag that is empty or malformed is INVALID_ARGUMENT, and the engine goes on serving.",
    "GUIDE-02",
    "GEN-10",
    needs=[needs.GENERATES],
)
async def bad_structural_tag(ctx: Context) -> None:
    texts = ("", "{}", "no json", '{"type": "structural_tag", "format": {"type": "no-such-format"}}')
    await _expect_rejected(ctx, "structural_tag", *(Guide(structural_tag=text) for text in texts))


@case(
    "guided.bad_choice",
    "An empty list of choices is INVALID_ARGUMENT, and the engine goes on serving.",
    "GUIDE-02",
    "GEN-10",
    needs=[needs.GENERATES],
)
async def bad_choice(ctx: Context) -> None:
    await _expect_rejected(ctx, "choice", Guide(choice=generate_pb2.ChoiceConstraint()))


@case(
    "guided.no_guide",
    "Guided decoding without a guide is INVALID_ARGUMENT.",
    "GUIDE-02",
    needs=[needs.GENERATES],
)
async def no_guide(ctx: Context) -> None:
    await _expect_rejected(ctx, "guide", Guide())


@case(
    "guided.bad_after_good",
    "A malformed guide straight after a valid one is rejected, and the valid one is served again.",
    "GUIDE-02",
    needs=[needs.GENERATES, needs.guided(model_pb2.GUIDED_DECODING_MODE_REGEX)],
)
async def bad_after_good(ctx: Context) -> None:
    for _ in range(2):
        await _guided(ctx, Guide(regex="[ab]{2}"))
        request = ctx.request(guided=Guide(regex="(ab"))
        await ctx.refused(ctx.rpc.Generate, request, Code.INVALID_ARGUMENT, names="guided|regex")


@case(
    "guided.unknown_backend",
    "A guided backend that does not exist is rejected by name.",
    "GUIDE-03",
    needs=[needs.GENERATES],
)
async def unknown_backend(ctx: Context) -> None:
    if not ctx.offer.generation.guided_decoding.supported:
        skip("guided decoding is not advertised")
    guide = Guide(backend="no-such-backend")
    guide.MergeFrom(
        CHOICE if ctx.offer.guided(model_pb2.GUIDED_DECODING_MODE_CHOICE) else Guide(regex="[ab]")
    )
    request = ctx.request(guided=guide)
    await ctx.refused(ctx.rpc.Generate, request, Code.INVALID_ARGUMENT, names="backend")


@case(
    "guided.named_backend",
    "A guided backend that exists is honoured or rejected by name.",
    "GUIDE-03",
    needs=[needs.GENERATES, needs.guided(model_pb2.GUIDED_DECODING_MODE_REGEX)],
)
async def named_backend(ctx: Context) -> None:
    for backend in ("xgrammar", "guidance", "llguidance", "outlines"):
        try:
            stream = await _guided(ctx, Guide(regex="[ab]{3}", backend=backend))
        except Refused as refused:
            if refused.code is not Code.INVALID_ARGUMENT or "backend" not in refused.details:
                fail(f"the backend {backend} is refused, but not by name: {refused}")
        else:
            text = stream.first.text
            expect(re.fullmatch("[ab]{3}", text), f"the output {text!r} is not guided", "GUIDE-01")


def _parse(stream: Stream) -> object:
    try:
        value: object = json.loads(stream.first.text)
    except ValueError as error:
        fail(f"the output {stream.first.text!r} is no JSON: {error}")
    return value


def _expect_json_beginning(text: str) -> None:
    """Require that `text` could go on to be JSON: the parser finds nothing wrong but its end."""
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        cut = error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated string")
        # The parser points at the start of a number, word or escape that the end has cut.
        tail = re.search(r"(-?[\d.eE+-]*|[a-z]*|\\u?[0-9a-fA-F]*)$", text)
        expect(
            cut or (tail and error.pos >= tail.start()),
            f"the output {text!r} is no beginning of JSON: {error}",
        )
