"""The response state machine: whatever the engine sends, the stream is well formed."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from openengine.v1 import errors_pb2, generate_pb2
from openengine_adapters.core.errors import EngineFailure
from openengine_adapters.core.stops import StopFilter
from openengine_adapters.core.stream import ResponseStream
from openengine_adapters.engine import Candidate, Delta, Finish, FinishKind, PromptScores, Step, TokenScore


def _text(token_id: int) -> str:
    return f"<{token_id}>"


def _stream(outputs: int = 1, **options: object) -> ResponseStream:
    return ResponseStream("r1", outputs, _text, **options)  # type: ignore[arg-type]  # test shorthand


def check_grammar(
    responses: Sequence[generate_pb2.GenerateResponse], outputs: int, *, complete: bool
) -> None:
    """STREAM-01 … STREAM-08, for a stream that has ended (`complete`) or is still running."""
    finished: set[int] = set()
    prompt_seen = token_seen = False
    for position, response in enumerate(responses):
        last = complete and position == len(responses) - 1
        assert response.request_id == "r1"
        event = response.WhichOneof("event")
        assert event is not None
        assert response.HasField("usage") == last, "usage is on the last response, and only there"
        if event == "prompt":
            assert not prompt_seen and not token_seen
            prompt_seen = True
        elif event == "token":
            token_seen = True
            assert response.token.HasField("output_index")
            assert response.token.output_index not in finished
            assert response.token.output_index < outputs
        elif event == "finished":
            assert response.finished.HasField("output_index")
            assert response.finished.output_index not in finished
            assert response.finished.reason != generate_pb2.FINISH_REASON_UNSPECIFIED
            stopped = response.finished.reason == generate_pb2.FINISH_REASON_STOP
            assert response.finished.HasField("stop_match") == stopped
            finished.add(response.finished.output_index)
            if len(finished) == outputs:
                assert last
        else:
            assert last, f"{event} ends the stream"
    if complete:
        assert responses
        final = responses[-1].WhichOneof("event")
        assert final in ("error", "prefill_ready") or finished == set(range(outputs))
        usage = responses[-1].usage
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
        assert usage.cached_prompt_tokens <= usage.prompt_tokens
        assert usage.reasoning_tokens <= usage.completion_tokens


finishes = st.builds(
    Finish,
    st.sampled_from(FinishKind),
    token_id=st.integers(0, 99),
    text=st.sampled_from(["", "ab", "b"]),
    reasoning_tokens=st.none() | st.integers(0, 50),
)
scores = st.builds(
    TokenScore,
    st.floats(-10, 0),
    rank=st.none() | st.integers(1, 9),
    candidates=st.lists(st.builds(Candidate, st.integers(0, 99), st.floats(-10, 0)), max_size=2),
)
deltas = st.builds(
    Delta,
    st.integers(-1, 4),
    st.lists(st.integers(97, 99), max_size=3),
    st.text("abc", max_size=4),
    scores=st.none() | st.lists(scores, max_size=3),
    finish=st.none() | finishes,
)
steps = st.builds(
    Step,
    st.lists(deltas, max_size=3),
    prompt_tokens=st.integers(0, 20),
    cached_prompt_tokens=st.none() | st.integers(0, 40),
    prompt=st.none()
    | st.builds(
        PromptScores, st.lists(st.integers(0, 99), max_size=3), st.lists(st.none() | scores, max_size=3)
    ),
)
events = st.lists(steps | st.sampled_from(["cancel", "fail", "close"]), max_size=12)


@settings(max_examples=300)
@given(outputs=st.integers(1, 3), wants_prompt=st.booleans(), filtered=st.booleans(), script=events)
def test_no_sequence_of_engine_deltas_makes_an_illegal_stream(
    outputs: int, wants_prompt: bool, filtered: bool, script: list[Step | str]
) -> None:
    """STREAM-01 … STREAM-08: a property of every sequence, sensible or not."""
    filters = (
        {i: StopFilter(["ab"], lambda ids: "".join(map(chr, ids))) for i in range(outputs)}
        if filtered
        else {}
    )
    stream = _stream(outputs, wants_prompt=wants_prompt, filters=filters)
    sent: list[generate_pb2.GenerateResponse] = []
    for event in script:
        if event == "cancel":
            sent += stream.cancel()
        elif event == "fail":
            sent += stream.fail(EngineFailure("no"))
        elif event == "close":
            sent += stream.close()
        else:
            assert isinstance(event, Step)
            sent += stream.push(event)
        check_grammar(sent, outputs, complete=stream.ended)
    sent += stream.close()
    check_grammar(sent, outputs, complete=True)


def test_usage_sums_over_all_outputs_and_comes_once() -> None:
    """STREAM-06, STREAM-07."""
    stream = _stream(2)
    sent = stream.push(
        Step([Delta(0, [1, 2], "ab"), Delta(1, [3], "c")], prompt_tokens=5, cached_prompt_tokens=4)
    )
    sent += stream.push(Step([Delta(1, [], "", finish=Finish(FinishKind.LENGTH))], prompt_tokens=5))
    sent += stream.push(
        Step([Delta(0, [4], "d", finish=Finish(FinishKind.EOS, token_id=4))], prompt_tokens=5)
    )
    usage = sent[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (5, 4, 9)
    assert usage.cached_prompt_tokens == 4
    assert [response.HasField("usage") for response in sent] == [False] * (len(sent) - 1) + [True]


def test_cached_tokens_are_absent_where_the_engine_does_not_know_them() -> None:
    """STREAM-07."""
    stream = _stream()
    sent = stream.push(Step([Delta(0, [1], "a", finish=Finish(FinishKind.LENGTH))], prompt_tokens=5))
    assert not sent[-1].usage.HasField("cached_prompt_tokens")


def test_a_stop_tokens_record_stays_behind_unless_it_was_asked_for() -> None:
    """STOP-04, STOP-05."""
    step = Step([Delta(0, [7, 8], "x", finish=Finish(FinishKind.STOP_TOKEN, token_id=8))])
    hidden, shown = _stream(), _stream(drop_stop_token=False)
    assert [t.token_id for t in hidden.push(step)[0].token.tokens] == [7]
    sent = shown.push(step)
    assert [t.token_id for t in sent[0].token.tokens] == [7, 8]
    assert sent[-1].finished.stop_match.stop_token_id == 8


def test_an_eos_record_is_sent() -> None:
    """STOP-07."""
    sent = _stream().push(Step([Delta(0, [99], "", finish=Finish(FinishKind.EOS, token_id=99))]))
    assert [t.token_id for t in sent[0].token.tokens] == [99]
    assert sent[-1].finished.stop_match.eos_token_id == 99


def test_cancel_finishes_every_open_output() -> None:
    """ABORT-02, STREAM-09."""
    stream = _stream(3)
    stream.push(Step([Delta(1, [], "", finish=Finish(FinishKind.LENGTH))]))
    sent = stream.cancel()
    assert [r.finished.output_index for r in sent] == [0, 2]
    assert {r.finished.reason for r in sent} == {generate_pb2.FINISH_REASON_CANCELLED}
    assert sent[-1].HasField("usage")


def test_cancel_of_a_prefill_is_an_engine_error() -> None:
    """ABORT-02: a prefill has no outputs to finish."""
    (response,) = _stream(0).cancel()
    assert response.error.code == errors_pb2.ERROR_CODE_CANCELLED


def test_an_engine_that_ends_early_is_an_error_and_not_silence() -> None:
    """STREAM-08."""
    stream = _stream()
    stream.push(Step([Delta(0, [1], "a")]))
    (response,) = stream.close()
    assert response.error.code == errors_pb2.ERROR_CODE_INTERNAL
    assert response.usage.completion_tokens == 1
    assert stream.close() == []


def test_prompt_comes_once_before_tokens_and_only_when_asked_for() -> None:
    """RESP-01."""
    prompt = PromptScores([5, 6], [None, TokenScore(-1.0, 2, [Candidate(6, -1.0, 1)])])
    asked, unasked = _stream(wants_prompt=True), _stream()
    sent = asked.push(Step([Delta(0, [1], "a")], prompt=prompt)) + asked.push(Step(prompt=prompt))
    assert [r.WhichOneof("event") for r in sent] == ["prompt", "token"]
    first, second = sent[0].prompt.tokens
    assert not first.HasField("logprob") and not first.HasField("rank") and not first.candidates
    assert (second.logprob, second.rank, second.candidates[0].token) == (-1.0, 2, "<6>")
    assert [r.WhichOneof("event") for r in unasked.push(Step(prompt=prompt))] == []
