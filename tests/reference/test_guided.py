"""Every kind of guide is really enforced, for many seeds, and a broken one is refused before admission."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from openengine.v1 import generate_pb2
from openengine_adapters.core.errors import Rejected
from openengine_adapters.engine import FinishKind
from openengine_adapters.reference import tokenizer
from openengine_adapters.reference.guided import compile_guide
from tests.reference.harness import ask, call, running

SEEDS = 4
SEQUENCES = 6


def _guided(**guide: Any) -> generate_pb2.GuidedDecoding:
    return generate_pb2.GuidedDecoding(**guide)


async def _texts(tokens: int = 120, **guide: Any) -> list[str]:
    """Outputs under a guide for several seeds; each must have ended by itself."""
    texts = []
    async with running() as engine:
        for seed in range(SEEDS):
            sampling = generate_pb2.SamplingParams(seed=seed, num_sequences=SEQUENCES, temperature=1.5)
            answer = await ask(engine, max_tokens=tokens, sampling=sampling, guided=_guided(**guide))
            for output in answer.outputs.values():
                assert output.kind is FinishKind.EOS, output.text
                texts.append(output.text)
    return texts


async def test_a_choice_is_one_of_the_choices() -> None:
    choices = ["yes", "no", "yes, of course", "naïve", "☕"]
    texts = set(await _texts(choice={"choices": choices}))
    assert texts <= set(choices)
    assert len(texts) > 1


PATTERNS = [
    r"[a-c]{2,5}\d+",
    r"^(?:Mr|Mrs)\. [A-Z][a-z]*$",
    r"\d{4}-(0[1-9]|1[0-2])-[0-3]\d",
    r"(ab|cd)*e?",
    r"[^a-z\s]{3}",
    r"a.c",
    r"é+☕?",
    r"\w+@\w+\.(com|org)",
    r"(a*)*b",
    r"x{0,3}?y{2}",
    r"(?P<year>\d{2})[-/.][\]a-]",
]


@pytest.mark.parametrize("pattern", PATTERNS)
async def test_a_regex_matches_the_whole_output(pattern: str) -> None:
    for text in await _texts(60, regex=pattern):
        assert re.fullmatch(pattern, text), text


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "score": {"type": "number"},
        "tags": {"type": "array", "items": {"enum": ["a", "b", 3, None]}, "minItems": 1, "maxItems": 3},
        "nested": {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]},
        "kind": {"const": "x y"},
        "either": {"anyOf": [{"type": "null"}, {"type": "string", "pattern": "^[a-z]{2}$"}]},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


async def test_a_json_schema_is_kept() -> None:
    for text in await _texts(200, json_schema=json.dumps(SCHEMA)):
        value = json.loads(text)
        assert value.keys() <= SCHEMA["properties"].keys()
        assert value.keys() >= {"name", "age", "tags"}
        assert len(value["name"]) <= 8
        assert 0 <= value["age"] <= 120
        assert 1 <= len(value["tags"]) <= 3
        assert all(tag in ("a", "b", 3, None) for tag in value["tags"])
        assert isinstance(value.get("score", 0), int | float)
        assert value.get("nested", {"ok": True})["ok"] in (True, False)
        assert value.get("kind", "x y") == "x y"
        either = value.get("either")
        assert either is None or re.fullmatch("[a-z]{2}", either)


async def test_a_schema_may_refer_to_itself() -> None:
    schema = {
        "$ref": "#/$defs/n",
        "$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}, "maxItems": 2}},
    }
    for text in await _texts(60, json_schema=json.dumps(schema)):
        assert isinstance(json.loads(text), list)


@pytest.mark.parametrize("kind", ["string", "integer", "number", "boolean", "null", "array", "object"])
async def test_a_schema_of_one_type_gives_that_type(kind: str) -> None:
    types = {"string": str, "integer": int, "number": (int, float), "boolean": bool, "null": type(None)}
    types |= {"array": list, "object": dict}
    for text in await _texts(160, json_schema=json.dumps({"type": kind})):
        assert isinstance(json.loads(text), types[kind])  # type: ignore[arg-type]  # types, by the schema's names


async def test_a_json_object_is_an_object() -> None:
    assert all(isinstance(json.loads(text), dict) for text in await _texts(160, json_object={}))


async def test_a_grammar_is_followed_with_its_recursion() -> None:
    grammar = """
        # sums in brackets
        root ::= term (" + " term)*
        term ::= [0-9]{1,2} | "(" root ")"
    """
    for text in await _texts(80, ebnf_grammar=grammar):
        assert isinstance(eval(re.sub(r"\b0+(\d)", r"\1", text)), int)


async def test_a_structural_tag_leaves_text_free_and_fills_the_tag() -> None:
    tag = {
        "type": "structural_tag",
        "format": {
            "type": "sequence",
            "elements": [
                {"type": "const_string", "value": "Answer: "},
                {
                    "type": "triggered_tags",
                    "triggers": ["<call"],
                    "at_least_one": True,
                    "stop_after_first": True,
                    "tags": [
                        {
                            "begin": "<call=f>",
                            "content": {"type": "json_schema", "json_schema": {"type": "object"}},
                            "end": "</call>",
                        }
                    ],
                },
            ],
        },
    }
    for text in await _texts(160, structural_tag=json.dumps(tag)):
        inside = re.fullmatch(r"Answer: <call=f>(.*)</call>", text, re.DOTALL)
        assert inside, text
        assert isinstance(json.loads(inside[1]), dict)


def test_free_text_may_not_break_off_inside_a_begun_tag() -> None:
    """After the trigger only the structure can follow; before it, anything can, the end included."""
    tag = {"structures": [{"begin": "<f>", "schema": {"type": "null"}, "end": "</f>"}], "triggers": ["<f"]}
    guide = compile_guide(_guided(structural_tag=json.dumps(tag)))
    for text, may_end in [
        ("a < b <", True),
        ("f", False),
        (">", False),
        ("null", False),
        ("</f>", True),
        ("x", True),
    ]:
        for token in tokenizer.encode(text):
            assert token in guide.allowed(1000), text
            guide.push(token)
        assert (tokenizer.EOS in guide.allowed(1000)) is may_end, text
    for token in tokenizer.encode("<"):
        guide.push(token)
    assert guide.allowed(1000) >= {ord("f"), ord("<"), ord("z")}


async def test_an_output_is_completed_while_there_is_room() -> None:
    async with running() as engine:
        for tokens in (30, 45):
            guided = _guided(regex=r"\{[a-z ]*\}\n\{[a-z]*\}\.\.\.end")
            sampling = generate_pb2.SamplingParams(seed=tokens, num_sequences=8, temperature=2.0)
            answer = await ask(engine, max_tokens=tokens, sampling=sampling, guided=guided)
            assert all(output.text.endswith("...end") for output in answer.outputs.values())


async def test_a_finished_guide_gives_only_eos_whatever_is_ignored() -> None:
    async with running() as engine:
        guided = _guided(choice={"choices": ["ok"]})
        answer = await ask(engine, max_tokens=6, guided=guided, stopping={"ignore_eos": True})
    assert (answer.one.text, answer.one.kind) == ("ok", FinishKind.LENGTH)
    assert answer.one.ids[2:] == [tokenizer.EOS] * 4


BROKEN: list[tuple[str, str]] = [
    *(
        ("regex", pattern)
        for pattern in ("(", "a)", "[a", "*a", "a{3,1}", "a{x}", r"\b", r"(?=a)", "(?<!a)", "a**")
    ),
    *(("regex", pattern) for pattern in ("a^b", r"\1", "[z-a]", r"\u12", "a{99999}", "[^\\x00-\U0010ffff]")),
    ("json_schema", "not json"),
    ("json_schema", "[]"),
    ("json_schema", "false"),
    ("json_schema", '{"type": "strin"}'),
    ("json_schema", '{"type": "string", "multipleOf": 3}'),
    ("json_schema", '{"type": "object", "required": "a"}'),
    ("json_schema", '{"$ref": "#/$defs/none"}'),
    ("json_schema", '{"type": "array", "minItems": 3, "maxItems": 2}'),
    ("json_schema", '{"type": "array", "items": {"type": "string"}, "uniqueItems": true}'),
    ("json_schema", '{"enum": []}'),
    ("json_schema", '{"type": "integer", "minimum": 5, "maximum": 1}'),
    ("json_schema", '{"$ref": "#"}'),
    ("json_schema", '{"a":' * 3000 + "1" + "}" * 3000),
    ("ebnf_grammar", "root := 'a'"),
    ("ebnf_grammar", "start ::= 'a'"),
    ("ebnf_grammar", "root ::= other"),
    ("ebnf_grammar", "root ::= root 'a' | 'a'"),
    ("ebnf_grammar", "root ::= ('a' | 'b'"),
    ("ebnf_grammar", 'root ::= "a'),
    ("ebnf_grammar", "root ::= 'a' root"),
    ("structural_tag", "{}"),
    ("structural_tag", "nope"),
    ("structural_tag", '{"structures": [], "triggers": ["<"]}'),
    ("structural_tag", '{"structures": [{"begin": "<a>", "end": "</a>"}], "triggers": ["<b"]}'),
    ("structural_tag", '{"type": "structural_tag", "format": {"type": "magic"}}'),
]


@pytest.mark.parametrize(("kind", "guide"), BROKEN, ids=lambda value: value[:24])
async def test_a_broken_guide_is_refused_by_name_and_the_engine_serves_on(kind: str, guide: str) -> None:
    async with running() as engine:
        with pytest.raises(Rejected) as refused:
            await engine.generate(call(guided=_guided(**{kind: guide})))
        assert refused.value.field == f"guided.{kind}"
        assert engine.unfinished() == 0
        assert (await ask(engine, guided=_guided(regex="a"))).one.text == "a"
