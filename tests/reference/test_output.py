"""When an output ends, and what of it is sent."""

from __future__ import annotations

from typing import Any

import pytest

from openengine.v1 import generate_pb2
from openengine_adapters.core.errors import Rejected
from openengine_adapters.engine import FinishKind
from openengine_adapters.reference import tokenizer
from openengine_adapters.reference.engine import ReferenceEngine
from tests.reference.harness import PROMPT, Output, ask, running


def _stops(*stops: str | int, **options: Any) -> generate_pb2.StoppingOptions:
    conditions = [
        generate_pb2.StopCondition(stop_text=stop)
        if isinstance(stop, str)
        else generate_pb2.StopCondition(stop_token_id=stop)
        for stop in stops
    ]
    return generate_pb2.StoppingOptions(conditions=conditions, ignore_eos=True, **options)


async def _plain(engine: ReferenceEngine, tokens: int = 40) -> Output:
    return (await ask(engine, max_tokens=tokens, stopping={"ignore_eos": True})).one


async def test_max_tokens_ends_with_length() -> None:
    async with running() as engine:
        output = await _plain(engine, 7)
    assert (len(output.ids), output.kind) == (7, FinishKind.LENGTH)


async def test_without_max_tokens_the_context_is_the_limit() -> None:
    async with running(max_context=64) as engine:
        answer = await ask(engine, max_tokens=None, stopping={"ignore_eos": True})
        larger = await ask(engine, max_tokens=1000, stopping={"ignore_eos": True})
    for each in (answer, larger):
        assert each.one.kind is FinishKind.LENGTH
        assert each.prompt_tokens + len(each.one.ids) == 64


async def test_the_model_ends_by_itself_and_eos_adds_no_text() -> None:
    async with running() as engine:
        output = (await ask(engine, "It was a good day. The end", max_tokens=50)).one
        longer = (
            await ask(engine, "It was a good day. The end", max_tokens=50, stopping={"ignore_eos": True})
        ).one
    assert output.finish is not None
    assert (output.kind, output.finish.token_id, output.ids[-1]) == (
        FinishKind.EOS,
        tokenizer.EOS,
        tokenizer.EOS,
    )
    assert output.text == tokenizer.decode(output.ids)
    assert longer.kind is FinishKind.LENGTH
    assert longer.ids[: len(output.ids)] == output.ids


async def test_least_tokens_hold_eos_and_stops_back() -> None:
    prompt = "It was a good day. The end"
    async with running() as engine:
        early = (await ask(engine, prompt, max_tokens=50)).one
        assert len(early.ids) < 20
        held = (await ask(engine, prompt, max_tokens=50, stopping={"min_tokens": 20})).one
        plain = await _plain(engine)
        stop = plain.text[2]
        stopped = (await ask(engine, max_tokens=40, keep_stop=True, stopping=_stops(stop, min_tokens=10))).one
    assert len(held.ids) >= 20
    assert tokenizer.EOS not in held.ids[:20]
    assert len(stopped.ids) > 10


async def test_a_stop_string_is_found_across_tokens_and_ends_the_text() -> None:
    async with running() as engine:
        plain = await _plain(engine)
        for start in range(2, 24):
            stop = plain.text[start : start + 4]
            output = (await ask(engine, max_tokens=40, keep_stop=True, stopping=_stops(stop))).one
            assert output.finish is not None
            assert (output.kind, output.finish.text) == (FinishKind.STOP_TEXT, stop)
            assert output.text == plain.text[: plain.text.index(stop) + len(stop)]
            # The records cover the text, and the last one has a part in it.
            assert output.text in tokenizer.decode(output.ids)
            assert len(tokenizer.decode(output.ids[:-1])) < len(output.text)


async def test_the_stop_that_ends_first_wins() -> None:
    async with running() as engine:
        text = (await _plain(engine)).text
        output = (
            await ask(engine, max_tokens=40, keep_stop=True, stopping=_stops(text[9:13], text[4:6]))
        ).one
    assert output.finish is not None
    assert output.finish.text == text[4:6]


@pytest.mark.parametrize("keep", [False, True])
async def test_a_stop_token_ends_the_output_and_its_text_goes_out_only_when_kept(keep: bool) -> None:
    async with running() as engine:
        plain = await _plain(engine)
        stop = plain.ids[6]
        output = (await ask(engine, max_tokens=40, keep_stop=keep, stopping=_stops(stop))).one
    first = plain.ids.index(stop)
    assert output.finish is not None
    assert (output.kind, output.finish.token_id) == (FinishKind.STOP_TOKEN, stop)
    assert output.ids == plain.ids[: first + 1]
    assert output.text == tokenizer.decode(plain.ids[: first + keep])


async def test_a_callers_stop_that_is_eos_is_the_callers() -> None:
    async with running() as engine:
        stopping = generate_pb2.StoppingOptions(
            conditions=[generate_pb2.StopCondition(stop_token_id=tokenizer.EOS)]
        )
        output = (await ask(engine, "It was a good day. The end", max_tokens=50, stopping=stopping)).one
    assert output.kind is FinishKind.STOP_TOKEN


async def test_text_is_what_the_tokens_decode_to_and_a_split_character_comes_whole() -> None:
    choices = generate_pb2.ChoiceConstraint(choices=["naïve ☕ café 🚣"])
    async with running() as engine:
        made = await ask(engine, max_tokens=40, guided=generate_pb2.GuidedDecoding(choice=choices))
    assert made.one.text == "naïve ☕ café 🚣"
    assert tokenizer.decode(made.one.ids) == made.one.text


@pytest.mark.parametrize(("field", "prompt"), [("prompt", "x" * 70), ("token_ids", [120] * 64)])
async def test_a_prompt_without_room_for_one_token_is_refused(field: str, prompt: Any) -> None:
    async with running(max_context=64) as engine:
        with pytest.raises(Rejected) as refused:
            await ask(engine, prompt)
    assert refused.value.field == field
    assert "64" in refused.value.reason


async def test_records_that_begin_beyond_the_prompt_are_refused() -> None:
    options = generate_pb2.ResponseOptions(return_prompt_logprobs=True, prompt_logprob_start=500)
    async with running() as engine:
        with pytest.raises(Rejected) as refused:
            await ask(engine, PROMPT, response=options)
    assert refused.value.field == "response.prompt_logprob_start"
