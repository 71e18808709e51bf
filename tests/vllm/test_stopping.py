"""Stopping on the real engine: what ends an output, what is reported, and what may leave."""

from __future__ import annotations

import pytest

from openengine.v1 import generate_pb2
from tests.support.wire import Wire

pytestmark = pytest.mark.asyncio(loop_scope="session")

Stopping, Stop = generate_pb2.StoppingOptions, generate_pb2.StopCondition
STOP, LENGTH = generate_pb2.FINISH_REASON_STOP, generate_pb2.FINISH_REASON_LENGTH
CHAT = "<|im_start|>user\nWhat is the capital of Italy?<|im_end|>\n<|im_start|>assistant\n"


async def test_absent_max_tokens_goes_to_the_end_of_the_context(tiny: Wire) -> None:
    """STOP-01, and one more than fits is accepted and ends LENGTH there."""
    for stopping in (Stopping(ignore_eos=True), Stopping(ignore_eos=True, max_tokens=5000)):
        answer = await tiny.generate([5] * 1000, stopping=stopping)
        assert answer.first.reason == LENGTH
        assert answer.usage.completion_tokens == 24


async def test_the_models_eos_is_reported_as_eos_with_a_record_and_no_text(smol: Wire) -> None:
    """STOP-04, STOP-07."""
    answer = await smol.generate(CHAT, max_tokens=60)
    assert answer.first.reason == STOP
    assert answer.first.stop.eos_token_id == 2
    assert answer.first.ids[-1] == 2
    assert "Rome" in answer.first.text and "<|im_end|>" not in answer.first.text


async def test_an_eos_that_the_caller_names_is_the_callers(smol: Wire) -> None:
    """STOP-04, and STOP-05: its record stays behind."""
    conditions = [Stop(stop_token_id=2)]
    hidden = await smol.generate(CHAT, stopping=Stopping(max_tokens=60, conditions=conditions))
    shown = await smol.generate(
        CHAT, stopping=Stopping(max_tokens=60, conditions=conditions, include_stop_in_output=True)
    )
    assert hidden.first.stop.stop_token_id == shown.first.stop.stop_token_id == 2
    assert 2 not in hidden.first.ids
    assert shown.first.ids == [*hidden.first.ids, 2]


async def test_ignore_eos_runs_to_max_tokens(smol: Wire) -> None:
    """STOP-06."""
    answer = await smol.generate(CHAT, stopping=Stopping(max_tokens=40, ignore_eos=True))
    assert answer.first.reason == LENGTH and len(answer.first.ids) == 40 and 2 in answer.first.ids


async def test_min_tokens_suppresses_eos(smol: Wire) -> None:
    """STOP-02."""
    answer = await smol.generate(CHAT, stopping=Stopping(max_tokens=40, min_tokens=30))
    assert len(answer.first.ids) >= 30


@pytest.mark.parametrize("include", [False, True])
async def test_a_stop_token_in_the_middle(smol: Wire, include: bool) -> None:
    """STOP-04, STOP-05."""
    free = await smol.generate(max_tokens=12)
    stop_id = free.first.ids[5]
    before = free.first.ids[: free.first.ids.index(stop_id)]
    answer = await smol.generate(
        stopping=Stopping(
            max_tokens=12, conditions=[Stop(stop_token_id=stop_id)], include_stop_in_output=include
        )
    )
    assert answer.first.stop.stop_token_id == stop_id
    assert answer.first.ids == ([*before, stop_id] if include else before)
    assert answer.first.record_text == answer.first.text
    assert answer.usage.completion_tokens == len(before) + 1


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("beside", [[], [Stop(stop_text="zzzz"), Stop(stop_token_id=40000)]])
async def test_a_stop_string_that_straddles_tokens(
    smol: Wire, include: bool, beside: list[generate_pb2.StopCondition]
) -> None:
    """STOP-03, STOP-05, STOP-07: also among other conditions that do not match."""
    free = await smol.generate(max_tokens=12)
    words = free.first.text
    stop = free.first.tokens[4].token[-2:] + free.first.tokens[5].token[:2]
    at = words.index(stop)
    answer = await smol.generate(
        stopping=Stopping(
            max_tokens=12, conditions=[*beside, Stop(stop_text=stop)], include_stop_in_output=include
        )
    )
    assert answer.first.stop.stop_text == stop
    assert answer.first.text == words[: at + len(stop) if include else at]
    if not include:
        assert answer.first.record_text == answer.first.text
        covered = ""
        for response in answer.responses:
            if response.WhichOneof("event") == "token":
                covered += "".join(token.token for token in response.token.tokens)
        assert covered == answer.first.text


async def test_a_stop_token_beside_a_stop_string_loses_its_text_too(smol: Wire) -> None:
    """STOP-05: vLLM leaves it in then, because the string needs it."""
    free = await smol.generate(max_tokens=12)
    stop_id = free.first.ids[6]
    before = free.first.tokens[: free.first.ids.index(stop_id)]
    conditions = [Stop(stop_text="zzzz"), Stop(stop_token_id=stop_id)]
    answer = await smol.generate(stopping=Stopping(max_tokens=12, conditions=conditions))
    assert answer.first.ids == [token.token_id for token in before]
    assert answer.first.text == "".join(token.token for token in before)


async def test_stop_strings_change_neither_text_nor_records_when_nothing_matches(smol: Wire) -> None:
    """STREAM-03, STOP-07."""
    free = await smol.generate(max_tokens=20)
    conditions = [Stop(stop_text="\n\nThe zebra"), Stop(stop_text="Par1s")]
    held = await smol.generate(stopping=Stopping(max_tokens=20, conditions=conditions))
    assert (held.first.text, held.first.ids) == (free.first.text, free.first.ids)


async def test_every_output_of_several_is_cut_by_itself(tiny: Wire) -> None:
    """STOP-05 with SAMP-04."""
    sampling = generate_pb2.SamplingParams(temperature=1.0, seed=3, num_sequences=4)
    free = await tiny.generate(sampling=sampling, max_tokens=6)
    stop = free.outputs[2].tokens[3].token
    stopping = Stopping(max_tokens=6, conditions=[Stop(stop_text=stop)])
    answer = await tiny.generate(sampling=sampling, stopping=stopping)
    assert sorted(answer.outputs) == [0, 1, 2, 3]
    assert answer.outputs[2].stop.stop_text == stop
    for index, output in answer.outputs.items():
        assert stop not in output.text
        assert free.outputs[index].text.startswith(output.text)
