"""Stopping on the real engine: what ends an output, what is reported, and what may leave."""

from __future__ import annotations

import grpc
import pytest

from openengine.v1 import generate_pb2
from tests.support.wire import Answer, Wire

pytestmark = pytest.mark.asyncio(loop_scope="session")

Stopping, Stop = generate_pb2.StoppingOptions, generate_pb2.StopCondition
STOP, LENGTH = generate_pb2.FINISH_REASON_STOP, generate_pb2.FINISH_REASON_LENGTH
ENDS = generate_pb2.GuidedDecoding(regex="(ab|cd)")
"""A guide that ends in the model's EOS after a token or two."""
VARIED = generate_pb2.SamplingParams(temperature=0.0, frequency_penalty=2.0)
"""Greedy, without the repetitions of a random model."""


async def test_absent_max_tokens_goes_to_the_end_of_the_context(tiny: Wire) -> None:
    """STOP-01, and one more than fits is accepted and ends LENGTH there."""
    longest = tiny.description.max_context_length
    assert longest is not None
    for stopping in (Stopping(ignore_eos=True), Stopping(ignore_eos=True, max_tokens=5000)):
        answer = await tiny.generate([5] * 1000, stopping=stopping)
        assert answer.first.reason == LENGTH
        assert answer.usage.completion_tokens == longest - 1000


async def test_min_tokens_beyond_the_context_end_length_too(tiny: Wire) -> None:
    """STOP-01, STOP-02."""
    answer = await tiny.generate([5] * 1000, stopping=Stopping(min_tokens=500))
    assert answer.first.reason == LENGTH


async def test_the_models_eos_is_reported_as_eos_with_a_record_and_no_text(tiny: Wire) -> None:
    """STOP-04, STOP-07."""
    answer = await tiny.generate(guided=ENDS)
    assert (answer.first.reason, answer.first.stop.eos_token_id) == (STOP, 2)
    assert answer.first.ids[-1] == 2
    assert answer.first.text in ("ab", "cd")


async def test_an_eos_that_the_caller_names_is_the_callers(tiny: Wire) -> None:
    """STOP-04, and STOP-05: its record stays behind."""
    conditions = [Stop(stop_token_id=2)]
    hidden = await tiny.generate(guided=ENDS, stopping=Stopping(conditions=conditions))
    shown = await tiny.generate(
        guided=ENDS, stopping=Stopping(conditions=conditions, include_stop_in_output=True)
    )
    assert hidden.first.stop.stop_token_id == shown.first.stop.stop_token_id == 2
    assert 2 not in hidden.first.ids
    assert shown.first.ids == [*hidden.first.ids, 2]


async def test_ignore_eos_runs_past_eos_to_max_tokens(tiny: Wire) -> None:
    """STOP-06: an EOS in the prompt makes none likely, so the model is made to want one."""
    answer = await tiny.generate(stopping=Stopping(max_tokens=40, ignore_eos=True))
    assert answer.first.reason == LENGTH and len(answer.first.ids) == 40


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("ignore_eos", [False, True], ids=["", "ignore_eos"])
async def test_a_stop_token_in_the_middle(tiny: Wire, include: bool, ignore_eos: bool) -> None:
    """STOP-04, STOP-05; with ignore_eos SGLang itself would ignore it."""
    free = await tiny.generate(max_tokens=12, sampling=VARIED)
    stop_id = free.first.ids[5]
    before = free.first.ids[: free.first.ids.index(stop_id)]
    stopping = Stopping(
        max_tokens=12,
        conditions=[Stop(stop_token_id=stop_id)],
        include_stop_in_output=include,
        ignore_eos=ignore_eos,
    )
    answer = await tiny.generate(stopping=stopping, sampling=VARIED)
    assert answer.first.stop.stop_token_id == stop_id
    assert answer.first.ids == ([*before, stop_id] if include else before)
    assert answer.first.text == "".join(token.token for token in answer.first.tokens)
    assert answer.usage.completion_tokens == len(before) + 1
    await tiny.until_idle()


def covered(answer: Answer) -> bool:
    """Whether at every moment the records sent cover the text sent (STOP-07)."""
    records = text = ""
    for response in answer.responses:
        records += "".join(token.token for token in response.token.tokens)
        text += response.token.text
        if not records.startswith(text):
            return False
    return True


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("beside", [[], [Stop(stop_text="zzzz"), Stop(stop_token_id=40000)]])
async def test_a_stop_string_that_straddles_tokens(
    tiny: Wire, include: bool, beside: list[generate_pb2.StopCondition]
) -> None:
    """STOP-03, STOP-05, STOP-07: also among other conditions that do not match."""
    free = await tiny.generate(max_tokens=12, sampling=VARIED)
    words = free.first.text
    stop = free.first.tokens[4].token[-2:] + free.first.tokens[5].token[:2]
    at = words.index(stop)
    stopping = Stopping(
        max_tokens=12, conditions=[*beside, Stop(stop_text=stop)], include_stop_in_output=include
    )
    answer = await tiny.generate(stopping=stopping, sampling=VARIED)
    assert answer.first.stop.stop_text == stop
    assert answer.first.text == words[: at + len(stop) if include else at]
    if not include:
        assert answer.first.record_text == answer.first.text and covered(answer)


async def test_a_stop_string_that_the_model_spells_in_small_tokens(tiny: Wire) -> None:
    """STOP-03: SGLang looks only at as many tokens as its tokenizer would make of it, which is one here."""
    stop = " information"
    assert len(tiny.engine.manager.tokenizer.encode(stop)) == 1
    spelled = generate_pb2.GuidedDecoding(
        structural_tag='{"type":"structural_tag","format":{"type":"sequence","elements":['
        + ",".join(
            f'{{"type":"token","token":{tiny.engine.manager.tokenizer.encode(letter)[0]}}}'
            for letter in f"x{stop}y"
        )
        + "]}}"
    )
    for include in (False, True):
        stopping = Stopping(conditions=[Stop(stop_text=stop)], include_stop_in_output=include)
        answer = await tiny.generate(guided=spelled, stopping=stopping)
        assert answer.first.stop.stop_text == stop
        assert answer.first.text == ("x" + stop if include else "x")


@pytest.mark.parametrize("include", [False, True])
async def test_min_tokens_holds_stop_strings_back(tiny: Wire, include: bool) -> None:
    """STOP-02: SGLang itself would stop at once."""
    free = (await tiny.generate(max_tokens=24)).first
    stop = free.tokens[-1].token.strip()[-2:]  # the random model repeats itself, so it comes early, too
    early = await tiny.generate(stopping=Stopping(max_tokens=24, conditions=[Stop(stop_text=stop)]))
    assert len(early.first.ids) < 9
    answer = await tiny.generate(
        stopping=Stopping(
            max_tokens=24, min_tokens=10, conditions=[Stop(stop_text=stop)], include_stop_in_output=include
        )
    )
    assert answer.first.stop.stop_text == stop
    end = free.text.index(stop, len("".join(token.token for token in free.tokens[:10])) - len(stop) + 1)
    assert answer.first.text == free.text[: end + len(stop) if include else end]
    assert answer.usage.completion_tokens > 10
    assert covered(answer)
    await tiny.until_idle()


async def test_min_tokens_holds_stop_tokens_and_eos_back(tiny: Wire) -> None:
    """STOP-02."""
    stop_id = (await tiny.generate(max_tokens=4)).first.ids[2]
    stopping = Stopping(max_tokens=24, min_tokens=12, conditions=[Stop(stop_token_id=stop_id)])
    answer = await tiny.generate(stopping=stopping)
    assert answer.usage.completion_tokens >= 12


async def test_a_stop_token_beside_a_stop_string_loses_its_text_too(tiny: Wire) -> None:
    """STOP-05: SGLang leaves it in then, because the string needs it."""
    free = await tiny.generate(max_tokens=12, sampling=VARIED)
    stop_id = free.first.ids[6]
    before = free.first.tokens[: free.first.ids.index(stop_id)]
    conditions = [Stop(stop_text="zzzz"), Stop(stop_token_id=stop_id)]
    answer = await tiny.generate(stopping=Stopping(max_tokens=12, conditions=conditions), sampling=VARIED)
    assert answer.first.ids == [token.token_id for token in before]
    assert answer.first.text == "".join(token.token for token in before)


async def test_stop_strings_change_neither_text_nor_records_when_nothing_matches(tiny: Wire) -> None:
    """STREAM-03, STOP-07."""
    free = await tiny.generate(max_tokens=20)
    conditions = [Stop(stop_text="\n\nThe zebra"), Stop(stop_text="Par1s")]
    for least in (0, 3):
        stopping = Stopping(max_tokens=20, min_tokens=least, conditions=conditions)
        held = await tiny.generate(stopping=stopping)
        assert (held.first.text, held.first.ids) == (free.first.text, free.first.ids)


async def test_every_output_of_several_is_cut_by_itself(tiny: Wire) -> None:
    """STOP-05 with SAMP-04: `e` comes in nearly every random output, at another place in each."""
    sampling = generate_pb2.SamplingParams(temperature=1.0, num_sequences=4)
    stopping = Stopping(max_tokens=20, conditions=[Stop(stop_text="e")])
    answer = await tiny.generate(sampling=sampling, stopping=stopping)
    assert sorted(answer.outputs) == [0, 1, 2, 3]
    assert any(output.reason == STOP for output in answer.outputs.values())
    for output in answer.outputs.values():
        assert "e" not in output.text and output.record_text == output.text
        assert output.stop.stop_text == ("e" if output.reason == STOP else "")


@pytest.mark.parametrize(
    "conditions",
    [[Stop(stop_text=str(n)) for n in range(33)], [Stop(stop_text="x" * 1025)]],
    ids=["many", "long"],
)
async def test_more_stop_strings_than_sglang_takes_are_refused(
    tiny: Wire, conditions: list[generate_pb2.StopCondition]
) -> None:
    """MODEL-07, GEN-10."""
    code, message = await tiny.refused(stopping=Stopping(max_tokens=4, conditions=conditions))
    assert code is grpc.StatusCode.INVALID_ARGUMENT and message.startswith("stopping.conditions")
