# SPDX-License-Identifier: Apache-2.0
"""The checker of the response stream: silent on sound streams, exact on broken ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from openengine.v1 import discovery_pb2, errors_pb2, generate_pb2, kv_pb2
from openengine_conformance.stream_rules import StreamRules

Response = generate_pb2.GenerateResponse
AGGREGATED, PREFILL = discovery_pb2.ENGINE_ROLE_AGGREGATED, discovery_pb2.ENGINE_ROLE_PREFILL
LENGTH, STOP = generate_pb2.FINISH_REASON_LENGTH, generate_pb2.FINISH_REASON_STOP
ID = "r1"


def token(number: int = 1, index: int | None = 0, text: str = "a") -> generate_pb2.GenerateResponse:
    info = generate_pb2.TokenInfo(token_id=number)
    return Response(
        request_id=ID, token=generate_pb2.TokenOutput(output_index=index, tokens=[info], text=text)
    )


def finish(
    index: int | None = 0, reason: int = LENGTH, usage: int | None = None, **match: int | str
) -> generate_pb2.GenerateResponse:
    finished = generate_pb2.GenerationFinished(output_index=index, reason=reason)  # type: ignore[arg-type]
    if match:
        finished.stop_match.CopyFrom(generate_pb2.StopMatch(**match))  # type: ignore[arg-type]
    response = Response(request_id=ID, finished=finished)
    if usage is not None:
        response.usage.CopyFrom(_usage(usage))
    return response


def failed(**fields: object) -> generate_pb2.GenerateResponse:
    error = errors_pb2.EngineError(code=errors_pb2.ERROR_CODE_INTERNAL, message="no", **fields)  # type: ignore[arg-type]
    return Response(request_id=ID, error=error, usage=_usage(1))


def _usage(completion: int, prompt: int = 2) -> generate_pb2.Usage:
    return generate_pb2.Usage(
        prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion
    )


def request(**fields: object) -> generate_pb2.GenerateRequest:
    return generate_pb2.GenerateRequest(request_id=ID, prompt="x", **fields)  # type: ignore[arg-type]


def judge(
    responses: Sequence[generate_pb2.GenerateResponse],
    asked: generate_pb2.GenerateRequest | None = None,
    role: int = AGGREGATED,
    *,
    ok: bool = True,
) -> set[str]:
    rules = StreamRules(asked or request(), role)
    for response in responses:
        rules.see(response)
    rules.end(ok, "OK" if ok else "INTERNAL")
    return {violation.rule for violation in rules.violations}


TWO = request(sampling=generate_pb2.SamplingParams(num_sequences=2))
PROMPT = request(response=generate_pb2.ResponseOptions(return_prompt_logprobs=True))
SCORED = request(response=generate_pb2.ResponseOptions(return_output_logprobs=True))


def scored(*candidates: tuple[int, float], logprob: float | None = -0.5) -> generate_pb2.GenerateResponse:
    entries = [generate_pb2.LogProb(token_id=i, logprob=p) for i, p in candidates]
    info = generate_pb2.TokenInfo(token_id=1, logprob=logprob, candidates=entries)
    return Response(request_id=ID, token=generate_pb2.TokenOutput(output_index=0, tokens=[info], text="a"))


def prompted(*logprobs: float | None) -> generate_pb2.GenerateResponse:
    records = [generate_pb2.TokenInfo(token_id=1, logprob=value) for value in logprobs]
    return Response(request_id=ID, prompt=generate_pb2.PromptOutput(tokens=records))


def ready(usage: bool = True) -> generate_pb2.GenerateResponse:
    session = kv_pb2.KvSessionRef(session_id="s")
    response = Response(request_id=ID, prefill_ready=generate_pb2.PrefillReady(kv_session=session))
    if usage:
        response.usage.CopyFrom(_usage(0))
    return response


def choose(**selection: object) -> generate_pb2.GenerateRequest:
    candidates = generate_pb2.CandidateTokenSelection(**selection)  # type: ignore[arg-type]
    options = generate_pb2.ResponseOptions(return_output_logprobs=True, output_candidates=candidates)
    return request(response=options)


@pytest.mark.parametrize(
    ("responses", "asked", "role"),
    [
        ([token(), token(2), finish(usage=2)], request(), AGGREGATED),
        ([finish(usage=0)], request(), AGGREGATED),
        ([token(index=1), finish(1), token(), finish(usage=2)], TWO, AGGREGATED),
        ([token(), failed()], request(), AGGREGATED),
        ([prompted(None, -1.0), token(), finish(usage=1)], PROMPT, AGGREGATED),
        ([token(), finish(reason=STOP, usage=1, eos_token_id=1)], request(), AGGREGATED),
        ([ready()], request(), PREFILL),
        ([failed()], request(), PREFILL),
        ([scored((1, -0.5), (2, -2.0)), finish(usage=1)], choose(top_n=2), AGGREGATED),
    ],
)
def test_sound_streams_break_no_rule(
    responses: Sequence[generate_pb2.GenerateResponse], asked: generate_pb2.GenerateRequest, role: int
) -> None:
    assert judge(responses, asked, role) == set()


def _renamed() -> generate_pb2.GenerateResponse:
    other = token()
    other.request_id = "r2"
    return other


def _with_usage() -> generate_pb2.GenerateResponse:
    early = token()
    early.usage.CopyFrom(_usage(1))
    return early


def _wrong_sum() -> generate_pb2.GenerateResponse:
    last = finish(usage=1)
    last.usage.total_tokens += 1
    return last


Broken = tuple[str, Sequence[generate_pb2.GenerateResponse], generate_pb2.GenerateRequest, int]
BROKEN: dict[str, Callable[[], Broken]] = {
    "another id": lambda: ("STREAM-01", [_renamed(), finish(usage=1)], request(), AGGREGATED),
    "no event": lambda: ("STREAM-01", [Response(request_id=ID), finish(usage=0)], request(), AGGREGATED),
    "no index 0": lambda: ("STREAM-02", [token(index=None), finish(usage=1)], request(), AGGREGATED),
    "finish without index": lambda: ("STREAM-02", [token(), finish(None, usage=1)], request(), AGGREGATED),
    "index too high": lambda: ("STREAM-02", [token(index=1), finish(usage=1)], request(), AGGREGATED),
    "cumulative text": lambda: (
        "STREAM-03",
        [token(text="a"), token(text="ab"), token(text="abc"), finish(usage=3)],
        request(),
        AGGREGATED,
    ),
    "token after finish": lambda: ("STREAM-04", [finish(), token(), finish(1, usage=1)], TWO, AGGREGATED),
    "two finishes": lambda: ("STREAM-04", [finish(), finish(), finish(1, usage=0)], TWO, AGGREGATED),
    "event after error": lambda: ("STREAM-05", [failed(), token()], request(), AGGREGATED),
    "early usage": lambda: ("STREAM-06", [_with_usage(), finish(usage=1)], request(), AGGREGATED),
    "no usage": lambda: ("STREAM-06", [token(), finish()], request(), AGGREGATED),
    "usage on each finish": lambda: ("STREAM-06", [finish(usage=0), finish(1, usage=0)], TWO, AGGREGATED),
    "prefill without usage": lambda: ("STREAM-06", [ready(usage=False)], request(), PREFILL),
    "wrong total": lambda: ("STREAM-07", [token(), _wrong_sum()], request(), AGGREGATED),
    "too few counted": lambda: ("STREAM-07", [token(), token(), finish(usage=1)], request(), AGGREGATED),
    "too many counted": lambda: ("STREAM-07", [token(), finish(usage=2)], request(), AGGREGATED),
    "no terminal": lambda: ("STREAM-08", [token()], request(), AGGREGATED),
    "one of two ends": lambda: ("STREAM-08", [token(), finish()], TWO, AGGREGATED),
    "no reason": lambda: ("STREAM-09", [finish(reason=0, usage=0)], request(), AGGREGATED),
    "unasked prompt": lambda: ("RESP-01", [prompted(None, -1.0), finish(usage=0)], request(), AGGREGATED),
    "late prompt": lambda: ("RESP-01", [token(), prompted(None, -1.0), finish(usage=1)], PROMPT, AGGREGATED),
    "two prompts": lambda: (
        "RESP-01",
        [prompted(None, -1.0), prompted(None, -1.0), finish(usage=0)],
        PROMPT,
        AGGREGATED,
    ),
    "scored first token": lambda: ("RESP-01", [prompted(-1.0, -1.0), finish(usage=0)], PROMPT, AGGREGATED),
    "prompt cut short": lambda: ("RESP-01", [prompted(None), finish(usage=0)], PROMPT, AGGREGATED),
    "no logprob": lambda: ("RESP-03", [token(), finish(usage=1)], SCORED, AGGREGATED),
    "positive logprob": lambda: ("RESP-03", [scored(logprob=0.5), finish(usage=1)], SCORED, AGGREGATED),
    "N+1 candidates": lambda: (
        "RESP-04",
        [scored((1, -0.5), (2, -2.0)), finish(usage=1)],
        choose(top_n=1),
        AGGREGATED,
    ),
    "unsorted candidates": lambda: (
        "RESP-04",
        [scored((2, -2.0), (1, -0.5)), finish(usage=1)],
        choose(top_n=2),
        AGGREGATED,
    ),
    "unasked candidates": lambda: ("RESP-04", [scored((1, -0.5)), finish(usage=1)], SCORED, AGGREGATED),
    "text before records": lambda: (
        "STOP-07",
        [
            Response(request_id=ID, token=generate_pb2.TokenOutput(output_index=0, text="a")),
            token(),
            finish(usage=1),
        ],
        request(),
        AGGREGATED,
    ),
    "past max_tokens": lambda: (
        "STOP-01",
        [token(), token(), finish(usage=2)],
        request(stopping=generate_pb2.StoppingOptions(max_tokens=1)),
        AGGREGATED,
    ),
    "STOP without match": lambda: ("STOP-04", [finish(reason=STOP, usage=0)], request(), AGGREGATED),
    "LENGTH with match": lambda: ("STOP-04", [finish(usage=0, eos_token_id=1)], request(), AGGREGATED),
    "foreign stop": lambda: ("STOP-04", [finish(reason=STOP, usage=0, stop_text="x")], request(), AGGREGATED),
    "prefill with token": lambda: ("ROLE-02", [token(), ready()], request(), PREFILL),
    "ready of another role": lambda: ("ROLE-01", [ready()], request(), AGGREGATED),
    "retry of no retry": lambda: ("ERR-02", [failed(retry_after_ms=5)], request(), AGGREGATED),
}


@pytest.mark.parametrize("name", BROKEN)
def test_each_broken_rule_is_named(name: str) -> None:
    rule, responses, asked, role = BROKEN[name]()
    assert rule in judge(responses, asked, role)


def test_a_status_after_the_first_response_breaks_the_one_transport() -> None:
    assert judge([token()], ok=False) == {"ERR-01"}


def test_a_status_before_any_response_breaks_nothing() -> None:
    assert judge([], ok=False) == set()
