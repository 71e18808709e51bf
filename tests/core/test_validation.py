"""Every refusal of a Generate request: its code, the field it names, and that the engine never sees it."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import grpc
import pytest

from openengine.v1 import discovery_pb2, generate_pb2, inputs_pb2, kv_pb2
from openengine_adapters.core.errors import Rejected
from openengine_adapters.core.validation import check_generate
from openengine_adapters.engine import EngineDescription, GenerationSupport, Parallelism
from tests.core.fake_engine import description

INVALID = grpc.StatusCode.INVALID_ARGUMENT
IDS = inputs_pb2.TokenIds(ids=[1, 2, 3])
Sampling, Stopping = generate_pb2.SamplingParams, generate_pb2.StoppingOptions
Response, Kv, Guided = generate_pb2.ResponseOptions, generate_pb2.KvOptions, generate_pb2.GuidedDecoding
Select, Stop = generate_pb2.CandidateTokenSelection, generate_pb2.StopCondition


def request(**fields: Any) -> generate_pb2.GenerateRequest:
    values: dict[str, Any] = {"request_id": "r1", "model": "fake-model", **fields}
    if not {"prompt", "token_ids", "no_input"} & set(values):
        values["token_ids"] = IDS
    values.pop("no_input", None)
    return generate_pb2.GenerateRequest(**values)


def refusal(about: EngineDescription, **fields: Any) -> Rejected:
    with pytest.raises(Rejected) as caught:
        check_generate(request(**fields), about)
    return caught.value


def selection(**fields: Any) -> generate_pb2.ResponseOptions:
    return Response(return_output_logprobs=True, output_candidates=Select(**fields))


REFUSED = [
    ("GEN-01", {"request_id": ""}, "request_id", INVALID),
    ("GEN-01", {"model": ""}, "model", INVALID),
    ("GEN-01", {"model": "other"}, "model", grpc.StatusCode.NOT_FOUND),
    ("GEN-02", {"no_input": 1}, "input", INVALID),
    ("GEN-02", {"prompt": ""}, "prompt", INVALID),
    ("GEN-02", {"token_ids": inputs_pb2.TokenIds()}, "token_ids", INVALID),
    ("GEN-03", {"token_ids": inputs_pb2.TokenIds(ids=[100])}, "token_ids", INVALID),
    ("GEN-03", {"token_ids": inputs_pb2.TokenIds(ids=[1] * 64)}, "token_ids", INVALID),
    ("SAMP-02", {"sampling": Sampling(temperature=-0.1)}, "sampling.temperature", INVALID),
    ("SAMP-02", {"sampling": Sampling(temperature=math.nan)}, "sampling.temperature", INVALID),
    ("SAMP-02", {"sampling": Sampling(temperature=math.inf)}, "sampling.temperature", INVALID),
    ("SAMP-02", {"sampling": Sampling(top_p=0)}, "sampling.top_p", INVALID),
    ("SAMP-02", {"sampling": Sampling(top_p=1.1)}, "sampling.top_p", INVALID),
    ("SAMP-02", {"sampling": Sampling(top_p=math.nan)}, "sampling.top_p", INVALID),
    ("SAMP-02", {"sampling": Sampling(min_p=-0.1)}, "sampling.min_p", INVALID),
    ("SAMP-02", {"sampling": Sampling(min_p=1.1)}, "sampling.min_p", INVALID),
    ("SAMP-02", {"sampling": Sampling(repetition_penalty=0)}, "sampling.repetition_penalty", INVALID),
    ("SAMP-02", {"sampling": Sampling(repetition_penalty=math.inf)}, "sampling.repetition_penalty", INVALID),
    ("SAMP-02", {"sampling": Sampling(frequency_penalty=2.1)}, "sampling.frequency_penalty", INVALID),
    ("SAMP-02", {"sampling": Sampling(presence_penalty=-2.1)}, "sampling.presence_penalty", INVALID),
    ("SAMP-02", {"sampling": Sampling(top_k=-2)}, "sampling.top_k", INVALID),
    ("SAMP-04", {"sampling": Sampling(num_sequences=0)}, "sampling.num_sequences", INVALID),
    ("MODEL-09", {"sampling": Sampling(num_sequences=5)}, "sampling.num_sequences", INVALID),
    ("STOP-01", {"stopping": Stopping(max_tokens=0)}, "stopping.max_tokens", INVALID),
    ("STOP-02", {"stopping": Stopping(max_tokens=1, min_tokens=2)}, "stopping.min_tokens", INVALID),
    ("STOP-03", {"stopping": Stopping(conditions=[Stop()])}, "stopping.conditions[0]", INVALID),
    (
        "STOP-03",
        {"stopping": Stopping(conditions=[Stop(stop_text="")])},
        "stopping.conditions[0].stop_text",
        INVALID,
    ),
    (
        "GEN-10",
        {"stopping": Stopping(conditions=[Stop(stop_token_id=1), Stop(stop_token_id=100)])},
        "stopping.conditions[1].stop_token_id",
        INVALID,
    ),
    (
        "RESP-05",
        {"response": selection(token_ids=inputs_pb2.TokenIds(ids=[1, 1]))},
        "response.output",
        INVALID,
    ),
    (
        "RESP-05",
        {"response": selection(token_ids=inputs_pb2.TokenIds(ids=[100]))},
        "response.output",
        INVALID,
    ),
    ("RESP-05", {"response": selection(token_ids=inputs_pb2.TokenIds())}, "response.output", INVALID),
    (
        "MODEL-07",
        {"response": selection(token_ids=inputs_pb2.TokenIds(ids=range(5)))},
        "response.output",
        INVALID,
    ),
    ("MODEL-06", {"response": selection(top_n=6)}, "response.output_candidates.top_n", INVALID),
    ("RESP-03", {"response": selection()}, "response.output_candidates", INVALID),
    (
        "RESP-08",
        {"response": Response(output_candidates=Select(top_n=1))},
        "response.output_candidates",
        INVALID,
    ),
    (
        "RESP-08",
        {"response": Response(prompt_candidates=Select(top_n=1))},
        "response.prompt_candidates",
        INVALID,
    ),
    ("RESP-02", {"response": Response(prompt_logprob_start=1)}, "response.prompt_logprob_start", INVALID),
    ("KVOPT-02", {"kv": Kv(cache_salt="")}, "kv.cache_salt", INVALID),
    ("KVOPT-03", {"kv": Kv(data_parallel_rank=2)}, "kv.data_parallel_rank", INVALID),
    ("GUIDE-02", {"guided": Guided()}, "guided", INVALID),
    ("GUIDE-02", {"guided": Guided(regex="")}, "guided.regex", INVALID),
    ("GUIDE-02", {"guided": Guided(json_schema=" ")}, "guided.json_schema", INVALID),
    ("GUIDE-02", {"guided": Guided(choice=generate_pb2.ChoiceConstraint())}, "guided.choice", INVALID),
    (
        "GUIDE-02",
        {"guided": Guided(choice=generate_pb2.ChoiceConstraint(choices=["a", ""]))},
        "guided.choice",
        INVALID,
    ),
    ("GEN-10", {"guided": Guided(regex="x*" * 2049)}, "guided.regex", INVALID),
    ("GEN-10", {"guided": Guided(json_schema="é" * 33_000)}, "guided.json_schema", INVALID),
    (
        "GEN-10",
        {"guided": Guided(choice=generate_pb2.ChoiceConstraint(choices=["choice"] * 20_000))},
        "guided.choice",
        INVALID,
    ),
    ("GEN-10", {"kv": Kv(cache_salt="s" * 1025)}, "kv.cache_salt", INVALID),
    ("GUIDE-03", {"guided": Guided(regex="a", backend="other")}, "guided.backend", INVALID),
    ("MEDIA-02", {"media": [inputs_pb2.MediaItem(raw_bytes=b"x")]}, "media[0].modality", INVALID),
    ("LORA-05", {"lora_name": "x"}, "lora_name", INVALID),
    (
        "ROLE-01",
        {"kv": Kv(session=kv_pb2.KvSessionRef(session_id="s"))},
        "kv.session",
        grpc.StatusCode.FAILED_PRECONDITION,
    ),
]


@pytest.mark.parametrize(("rule", "fields", "field", "code"), REFUSED, ids=lambda value: str(value)[:40])
def test_refused(rule: str, fields: dict[str, Any], field: str, code: grpc.StatusCode) -> None:
    """The rule that each row cites; the message begins with the field."""
    about = description(parallelism=Parallelism(data_parallel_size=2))
    error = refusal(about, **fields)
    assert error.code is code
    assert str(error).startswith(field), str(error)


ACCEPTED = [
    {"sampling": Sampling(temperature=0, top_k=0, min_p=0, top_p=1)},
    {"sampling": Sampling(top_k=-1, seed=2**64 - 1, num_sequences=4, temperature=1)},
    {
        "stopping": Stopping(
            max_tokens=10_000, min_tokens=1, conditions=[Stop(stop_text="x"), Stop(stop_token_id=99)]
        )
    },
    {"response": selection(top_n=0)},
    {"response": selection(all=generate_pb2.AllCandidates())},
    {"kv": Kv(cache_salt="s", bypass_prefix_cache=True, data_parallel_rank=0)},
    {"guided": Guided(regex="a", backend="fake")},
    {"guided": Guided(regex="x" * 4096)},
    {"priority": -5},
    {"model": "alias"},
    {"model": "fake"},
]


@pytest.mark.parametrize("fields", ACCEPTED, ids=lambda value: str(value)[:40])
def test_accepted(fields: dict[str, Any]) -> None:
    """MODEL-02, MODEL-07: what is advertised is taken."""
    check_generate(request(**fields), description())


def without(**changes: Any) -> EngineDescription:
    """A description whose generation support lacks something."""
    support = description().generation
    assert support is not None
    return description(generation=dataclasses.replace(support, **changes))


UNADVERTISED = [
    ({"seed": False}, {"sampling": Sampling(seed=0)}, "sampling.seed"),
    ({"priority": False}, {"priority": 0}, "priority"),
    (
        {"stop_in_output": False},
        {"stopping": Stopping(include_stop_in_output=True)},
        "stopping.include_stop_in_output",
    ),
    ({"cache_salt": False}, {"kv": Kv(cache_salt="s")}, "kv.cache_salt"),
    ({"prefix_cache_bypass": False}, {"kv": Kv(bypass_prefix_cache=True)}, "kv.bypass_prefix_cache"),
    ({"guided_modes": frozenset()}, {"guided": Guided(regex="a")}, "guided.regex"),
    (
        {"output_logprobs": None},
        {"response": Response(return_output_logprobs=True)},
        "response.return_output_logprobs",
    ),
    (
        {"prompt_logprobs": None},
        {"response": Response(return_prompt_logprobs=True)},
        "response.return_prompt_logprobs",
    ),
    ({"text_input": False}, {"prompt": "x"}, "prompt"),
    ({"token_ids_input": False}, {}, "token_ids"),
    (
        {"greedy_sequences": False},
        {"sampling": Sampling(temperature=0, num_sequences=2)},
        "sampling.num_sequences",
    ),
    ({"temperature_range": (0.01, 2)}, {"sampling": Sampling(temperature=0.001)}, "sampling.temperature"),
    ({"temperature_range": (0.01, 2)}, {"sampling": Sampling(temperature=2.5)}, "sampling.temperature"),
    (
        {"separate_candidates": False},
        {
            "response": Response(
                return_output_logprobs=True, return_prompt_logprobs=True, output_candidates=Select(top_n=1)
            )
        },
        "response.output_candidates",
    ),
]


@pytest.mark.parametrize(("lacks", "fields", "field"), UNADVERTISED, ids=lambda value: str(value)[:40])
def test_unadvertised_is_refused_by_name(lacks: dict[str, Any], fields: dict[str, Any], field: str) -> None:
    """MODEL-07, SAMP-03, SAMP-05, RESP-07."""
    error = refusal(without(**lacks), **fields)
    assert error.code is INVALID
    assert error.field == field


def test_a_decode_server_needs_a_session() -> None:
    """ROLE-03, ROLE-04."""
    error = refusal(description(role=discovery_pb2.ENGINE_ROLE_DECODE))
    assert error.code is grpc.StatusCode.FAILED_PRECONDITION


def test_a_pooling_model_does_not_generate() -> None:
    """GEN-10: it never reaches the engine."""
    assert refusal(description(generation=None)).code is grpc.StatusCode.FAILED_PRECONDITION


def test_a_message_names_field_value_limit_and_the_way_out() -> None:
    """How errors read."""
    text = str(refusal(description(), token_ids=inputs_pb2.TokenIds(ids=[1] * 70)))
    assert text.startswith("token_ids: ") and "70" in text and "64" in text and "shorten" in text


def test_a_capability_that_is_off_by_default_is_refused_by_default() -> None:
    """MODEL-07: an adapter must opt in."""
    bare = description(generation=GenerationSupport())
    for fields in ({"priority": 1}, {"kv": Kv(cache_salt="x")}, {"guided": Guided(regex="a")}):
        assert refusal(bare, **fields).code is INVALID


@pytest.mark.parametrize(
    "conditions",
    [[Stop(stop_text="x")] * 129, [Stop(stop_token_id=1)] * 129, [Stop(stop_text="x" * 20_000)] * 2],
    ids=["texts", "tokens", "bytes"],
)
def test_stops_without_measure_are_refused(conditions: list[Any]) -> None:
    """GEN-10: each stop is looked for in each token's text, on the loop that serves everybody."""
    error = refusal(description(), stopping=Stopping(conditions=conditions))
    assert (error.code, error.field) == (INVALID, "stopping.conditions")
    assert error.limit is not None
    refused_not = Stopping(conditions=[Stop(stop_text="x" * 200)] * 128)
    check_generate(request(stopping=refused_not), description())
