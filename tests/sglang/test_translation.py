"""What SGLang's chunks mean, shown by chunks that a healthy engine does not send at will."""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

import grpc
import pytest

from openengine.v1 import generate_pb2
from openengine_adapters.core.errors import EngineFailure, Rejected
from openengine_adapters.engine import Delta, Finish, FinishKind, GenerateCall, StartupError

Stopping, Stop = generate_pb2.StoppingOptions, generate_pb2.StopCondition
TEXTS = ["a", "b", "c", "d", "e"]
EOS = 4


def reader(request: generate_pb2.GenerateRequest, *, keep_stop: bool = False) -> Any:
    from openengine_adapters.sglang.outputs import OutputReader

    def decode(ids: Sequence[int]) -> str:
        return "".join(TEXTS[token_id] for token_id in ids)

    call = GenerateCall(id="0" * 32, request=request, keep_stop=keep_stop)
    return OutputReader(call, [1, 2, 3], frozenset({EOS}), decode)


def chunk(ids: Sequence[int], text: str, finish: dict[str, Any] | None = None, **meta: Any) -> dict[str, Any]:
    found = {"finish_reason": finish, "prompt_tokens": 3, "cached_tokens": 0, **meta}
    return {"output_ids": ids, "text": text, "meta_info": found}


def finish_of(request: generate_pb2.GenerateRequest, text: str, reason: dict[str, Any]) -> Finish:
    (delta,) = reader(request).read(0, chunk([0, 1], text, reason)).deltas
    assert delta.finish is not None
    return delta.finish  # type: ignore[no-any-return]  # the reader is untyped here


def test_cumulative_chunks_become_deltas_also_when_the_list_grows_meanwhile() -> None:
    """STREAM-03: SGLang hands out its own list, which may be longer than the text by the time it is read."""
    ids: list[int] = [0]
    one = reader(generate_pb2.GenerateRequest())
    deltas: list[Delta] = []
    for text in ("a", "ab", "abc"):
        deltas += one.read(0, chunk(ids, text)).deltas
        ids += [1, 2]
    deltas += one.read(0, chunk(ids, "abcde", {"type": "length", "length": 7})).deltas
    assert [token_id for delta in deltas for token_id in delta.token_ids] == ids
    assert "".join(delta.text for delta in deltas) == "abcde"


@pytest.mark.parametrize(
    ("matched", "conditions", "kind"),
    [
        (EOS, [], FinishKind.EOS),
        (EOS, [Stop(stop_token_id=EOS)], FinishKind.STOP_TOKEN),
        (1, [Stop(stop_token_id=1)], FinishKind.STOP_TOKEN),
        (1, [], FinishKind.EOS),  # the end of a guide, which SGLang reports so
        ("b", [Stop(stop_text="b")], FinishKind.STOP_TEXT),
        ("NaN happened", [Stop(stop_text="NaN happened")], FinishKind.STOP_TEXT),
    ],
)
def test_stops_are_told_apart_by_the_callers_list(
    matched: int | str, conditions: list[generate_pb2.StopCondition], kind: FinishKind
) -> None:
    """STOP-04."""
    request = generate_pb2.GenerateRequest(stopping=Stopping(conditions=conditions))
    finish = finish_of(request, f"a {matched}", {"type": "stop", "matched": matched})
    assert finish.kind is kind
    assert (finish.text if isinstance(matched, str) else finish.token_id) == matched


@pytest.mark.parametrize("conditions", [[], [Stop(stop_text="NaN happened")]])
def test_nan_happened_is_no_stop(conditions: list[generate_pb2.StopCondition]) -> None:
    """STREAM-09: also when the caller has a stop string that reads like it, and the text does not."""
    request = generate_pb2.GenerateRequest(stopping=Stopping(conditions=conditions))
    with pytest.raises(EngineFailure) as caught:
        finish_of(request, "ab", {"type": "stop", "matched": "NaN happened"})
    assert caught.value.details == {"sglang.finish_reason": "NaN happened"}


def test_an_abort_in_the_queue_has_another_shape() -> None:
    """ABORT-02: after a retraction it brings what was sent before once more."""
    one = reader(generate_pb2.GenerateRequest())
    one.read(0, chunk([0, 1], "ab"))
    again = {
        "output_ids": [0, 1],
        "text": "ab",
        "meta_info": {"finish_reason": {"type": "abort", "message": "Abort in waiting queue"}},
    }
    (delta,) = one.read(0, again).deltas
    assert delta == Delta(0, [], "", None, Finish(FinishKind.CANCELLED))


def test_an_abort_while_a_guide_is_compiled_brings_no_token() -> None:
    """ABORT-02: SGLang calls it a bad request, and sends a token that it made up."""
    reason = {"type": "abort", "message": "Aborted by AbortReq.", "status_code": HTTPStatus.BAD_REQUEST}
    (delta,) = reader(generate_pb2.GenerateRequest()).read(0, chunk([3], "d", reason)).deltas
    assert delta == Delta(0, (), "", None, Finish(FinishKind.CANCELLED))


@pytest.mark.parametrize(
    ("status", "message", "code", "expected"),
    [
        (
            HTTPStatus.BAD_REQUEST,
            "Failed to compile regex grammar: [06:29:15] /project/cpp/regex_converter.cc:83: Regex parsing error.\n",
            grpc.StatusCode.INVALID_ARGUMENT,
            "guided.regex: Regex parsing error.",
        ),
        (
            HTTPStatus.BAD_REQUEST,
            "Failed to compile regex grammar: [06:29:15] /cpp/x.cc:83: Check failed: (id < size) is false: Token 9\n",
            grpc.StatusCode.INVALID_ARGUMENT,
            "guided.regex: Token 9",
        ),
        (
            HTTPStatus.BAD_REQUEST,
            "Grammar preprocessing timed out: req.grammar_key=('regex', 'secret')",
            grpc.StatusCode.INVALID_ARGUMENT,
            "guided.regex: it takes too long to compile; make it simpler",
        ),
        (
            HTTPStatus.BAD_REQUEST,
            "Failed to compile structural_tag grammar: ",
            grpc.StatusCode.INVALID_ARGUMENT,
            "guided.regex: it does not compile",
        ),
        (
            HTTPStatus.SERVICE_UNAVAILABLE,
            "The request queue is full.",
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "The request queue is full. Try again later.",
        ),
    ],
)
def test_refusals_that_come_in_the_stream(
    status: HTTPStatus, message: str, code: grpc.StatusCode, expected: str
) -> None:
    """GUIDE-02, GEN-05, ERR-06."""
    request = generate_pb2.GenerateRequest(guided=generate_pb2.GuidedDecoding(regex="("))
    reason = {"type": "abort", "message": message, "status_code": status, "err_type": "E"}
    with pytest.raises(Rejected) as caught:
        finish_of(request, "", reason)
    assert (caught.value.code, str(caught.value)) == (code, expected)


def test_other_aborts_are_failures() -> None:
    """STREAM-09."""
    reason = {"type": "abort", "message": "boom in /some/file.py", "status_code": 500, "err_type": "E"}
    with pytest.raises(EngineFailure) as caught:
        finish_of(generate_pb2.GenerateRequest(), "", reason)
    assert "/some" not in str(caught.value) and caught.value.details == {"sglang.status_code": 500}


def scored(chosen: tuple[float, int], top: list[tuple[float, int]], top_n: int) -> Any:
    request = generate_pb2.GenerateRequest(
        response=generate_pb2.ResponseOptions(
            return_output_logprobs=True,
            output_candidates=generate_pb2.CandidateTokenSelection(top_n=top_n),
        )
    )
    meta: dict[str, Any] = {
        "output_token_logprobs": [(*chosen, None)],
        "output_top_logprobs": [[(*entry, None) for entry in top]],
    }
    ((delta,)) = reader(request).read(0, chunk([chosen[1]], "x", **meta)).deltas
    (score,) = delta.scores
    return score.rank, [(c.token_id, c.rank) for c in score.candidates]


def test_ranks_are_places_among_the_best_and_never_wrong() -> None:
    """RESP-04, RESP-09: among equals the token itself goes first, so a greedy one has rank 1."""
    top = [(-1.0, 7), (-1.0, 8), (-2.0, 9)]
    assert scored((-1.0, 7), top, 2) == (1, [(7, 1), (8, 2)])
    assert scored((-1.0, 8), top, 2) == (1, [(8, 1), (7, 2)])
    assert scored((-2.0, 9), top, 3) == (3, [(7, 1), (8, 2), (9, 3)])
    assert scored((-1.0, 5), [(-1.0, 7)], 1) == (1, [(5, 1)])
    assert scored((-3.0, 5), top, 2) == (None, [(7, 1), (8, 2)])
    assert scored((-3.0, 5), top[:1], 0) == (None, [])


@pytest.mark.parametrize(
    ("version", "served"),
    [("0.5.23", True), ("0.5.23.post1", True), ("0.5.99", True), ("0.5.22", False), ("0.6.0", False)],
)
def test_the_supported_range_is_checked(version: str, served: bool) -> None:
    """A start on another version ends with a sentence that names both."""
    from sglang.srt.server_args import ServerArgs

    from openengine_adapters.sglang import config

    args = ServerArgs(model_path="x")
    if served:
        config.check(args, version)
        return
    with pytest.raises(StartupError, match=f"SGLang {version} is installed, this adapter supports 0.5.23"):
        config.check(args, version)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"skip_tokenizer_init": True}, "--skip-tokenizer-init"),
        ({"tokenizer_worker_num": 2}, "--tokenizer-worker-num"),
        ({"node_rank": 1}, "--node-rank"),
    ],
)
def test_what_is_not_served_is_said_at_the_start(flags: dict[str, Any], named: str) -> None:
    """MODEL-07."""
    from sglang.srt.server_args import ServerArgs

    from openengine_adapters.sglang import config

    with pytest.raises(StartupError, match=named):
        config.check(ServerArgs(model_path="x", **flags), "0.5.23")
