"""`openengine embed`, `classify` and `score`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import json_format

from openengine.v1 import model_pb2, tasks_pb2
from tests.client.conftest import OpenEngine
from tests.client.fake import FakeServer, Status

Tensor = tasks_pb2.DenseFloatTensor


@pytest.fixture(autouse=True)
def server(fake: FakeServer) -> None:
    """A server that takes two inputs a call; its values tell how long the texts are."""
    capabilities = model_pb2.TaskCapabilities(
        embed=model_pb2.EmbedCapabilities(max_batch_size=2),
        classify=model_pb2.ClassifyCapabilities(max_batch_size=2),
        score=model_pb2.ScoreCapabilities(max_groups=2, max_candidates_per_group=2),
    )
    fake.answers |= {
        "GetModelInfo": model_pb2.ModelInfo(model_id="tiny", tasks=capabilities),
        "Embed": _embed,
        "Classify": _classify,
        "Score": _score,
    }


def _embed(request: tasks_pb2.EmbedRequest) -> tasks_pb2.EmbedResponse:
    outputs = [
        tasks_pb2.EmbeddingOutput(
            item_id=item.item_id,
            input_index=index,
            granularity=tasks_pb2.TASK_OUTPUT_GRANULARITY_SEQUENCE,
            dense=Tensor(shape=[2], values=[3, 4]),
        )
        for index, item in enumerate(request.inputs)
    ]
    usage = tasks_pb2.TaskUsage(input_tokens=10, cached_input_tokens=1)
    return tasks_pb2.EmbedResponse(request_id=request.context.request_id, outputs=outputs, usage=usage)


def _classify(request: tasks_pb2.ClassifyRequest) -> tasks_pb2.ClassifyResponse:
    outputs = [
        tasks_pb2.ClassificationOutput(
            item_id=item.item_id,
            input_index=index,
            semantics=tasks_pb2.TASK_VALUE_SEMANTICS_PROBABILITIES,
            scores=Tensor(shape=[2], values=[0.25, 0.75]),
            labels=["bad", "good"],
        )
        for index, item in enumerate(request.inputs)
    ]
    return tasks_pb2.ClassifyResponse(outputs=outputs, usage=tasks_pb2.TaskUsage(input_tokens=3))


def _score(request: tasks_pb2.ScoreRequest) -> tasks_pb2.ScoreResponse:
    groups = [
        tasks_pb2.ScoreGroupOutput(
            group_id=group.group_id,
            group_index=index,
            candidates=[
                tasks_pb2.ScoreCandidateOutput(
                    candidate_id=candidate.item_id,
                    candidate_index=number,
                    scores=Tensor(shape=[1], values=[len(candidate.text)]),
                )
                for number, candidate in enumerate(group.candidates)
            ],
        )
        for index, group in enumerate(request.groups)
    ]
    return tasks_pb2.ScoreResponse(
        groups=groups,
        semantics=tasks_pb2.TASK_VALUE_SEMANTICS_RELEVANCE,
        higher_is_better=True,
        usage=tasks_pb2.TaskUsage(input_tokens=5),
    )


def sent(fake: FakeServer, rpc: str) -> list[Any]:
    return [json_format.MessageToDict(each, preserving_proto_field_name=True) for each in fake.requests[rpc]]


async def test_embed_prints_a_row_an_input_and_the_usage(fake: FakeServer, openengine: OpenEngine) -> None:
    outcome = await openengine("embed", "one", "two", "three")
    assert outcome.code == 0
    assert outcome.out.splitlines() == [
        "item  shape  length  values",
        "0     2           5  3 4",
        "1     2           5  3 4",
        "2     2           5  3 4",
    ]
    assert outcome.err == "20 input tokens (2 cached)\n"


async def test_embed_calls_in_batches_of_what_the_server_takes(
    fake: FakeServer, openengine: OpenEngine
) -> None:
    outcome = await openengine("embed", "--output", "json", "--request-id", "r", stdin="one\n\ntwo\nthree\n")
    first, second = sent(fake, "Embed")
    assert [item["text"] for item in first["inputs"]] == ["one", "two"]
    assert first["context"] == {"request_id": "r", "model": "tiny"}
    assert second["context"]["request_id"] == "r-1"
    *outputs, usage = outcome.records
    assert [output["input_index"] for output in outputs] == [0, 1, 2]
    assert [output["item_id"] for output in outputs] == ["0", "1", "2"]
    assert outputs[0]["dense"] == {"shape": [2], "values": [3.0, 4.0]}
    assert usage == {"event": "usage", "usage": {"input_tokens": 20, "cached_input_tokens": 2}}


async def test_embed_options(fake: FakeServer, openengine: OpenEngine) -> None:
    await openengine("embed", "x")
    options = "--no-normalize --dimensions 8 --encoding sparse --granularity token"
    context = "--lora a --priority 2 --metadata k=v --model tiny --batch-size 1"
    await openengine("embed", "x", *options.split(), *context.split())
    plain, full = sent(fake, "Embed")
    assert not plain.get("options")
    assert full["options"] == {
        "granularity": "TASK_OUTPUT_GRANULARITY_TOKEN",
        "normalize": False,
        "dimensions": 8,
        "encoding": "EMBEDDING_ENCODING_SPARSE",
    }
    assert full["context"]["lora_name"] == "a"
    assert full["context"]["priority"] == 2
    assert full["context"]["metadata"] == {"k": "v"}


async def test_inputs_as_json_lines(fake: FakeServer, openengine: OpenEngine, tmp_path: Path) -> None:
    (tmp_path / "i.png").write_bytes(b"x")
    (tmp_path / "in.jsonl").write_text(
        '{"text": "a", "id": "first"}\n'
        '{"token_ids": [1, 2]}\n'
        f'{{"text": "see", "images": ["{tmp_path}/i.png"]}}\n'
        '{"images": ["https://h/i.png"]}\n'
    )
    await openengine("embed", "--jsonl", "--file", str(tmp_path / "in.jsonl"), "--batch-size", "9")
    (request,) = sent(fake, "Embed")
    image = {"modality": "MODALITY_IMAGE", "raw_bytes": "eA==", "mime_type": "image/png"}
    url = {"modality": "MODALITY_IMAGE", "url": "https://h/i.png"}
    assert request["inputs"] == [
        {"item_id": "first", "text": "a"},
        {"item_id": "1", "token_ids": {"ids": [1, 2]}},
        {"item_id": "2", "multimodal": {"text": "see", "media": [image]}},
        {"item_id": "3", "multimodal": {"media": [url]}},
    ]


async def test_classify(fake: FakeServer, openengine: OpenEngine) -> None:
    outcome = await openengine(
        "classify", "x", "--semantics", "log-probabilities", "--granularity", "sequence"
    )
    assert outcome.out.splitlines() == [
        "item  semantics      best  values",
        "0     probabilities  good  bad=0.25  good=0.75",
    ]
    (request,) = sent(fake, "Classify")
    assert request["options"] == {
        "granularity": "TASK_OUTPUT_GRANULARITY_SEQUENCE",
        "output_semantics": "TASK_VALUE_SEMANTICS_LOG_PROBABILITIES",
    }
    *outputs, _ = (await openengine("classify", "x", "y", "z", "--output", "json")).records
    assert [output["input_index"] for output in outputs] == [0, 1, 2]
    assert outputs[0]["labels"] == ["bad", "good"]


async def test_score_keeps_the_order_unless_asked_to_sort(fake: FakeServer, openengine: OpenEngine) -> None:
    candidates = ("aa", "aaaa", "a")
    outcome = await openengine("score", "--query", "q", *candidates)
    assert outcome.out.splitlines() == [
        "group  candidate  score",
        "0      0              2",
        "0      1              4",
        "0      2              1",
    ]
    assert [len(request["groups"][0]["candidates"]) for request in sent(fake, "Score")] == [2, 1]
    outcome = await openengine("score", "--query", "q", "--sort", *candidates)
    assert [line.split()[1] for line in outcome.out.splitlines()[1:]] == ["1", "0", "2"]
    *groups, _ = (await openengine("score", "--query", "q", "--output", "json", *candidates)).records
    indexes = [candidate["candidate_index"] for group in groups for candidate in group["candidates"]]
    assert indexes == [0, 1, 2]
    assert groups[0]["semantics"] == "RELEVANCE"
    assert groups[0]["higher_is_better"] is True


async def test_score_groups_as_json_lines(fake: FakeServer, openengine: OpenEngine) -> None:
    lines = '{"query": "q", "candidates": ["a", {"token_ids": [5]}], "id": "g"}\n' * 1
    lines += '{"query": {"text": "p"}, "candidates": ["b"]}\n{"query": "o", "candidates": ["c"]}\n'
    outcome = await openengine("score", "--jsonl", "--output", "json", stdin=lines)
    first, second = sent(fake, "Score")
    assert first["groups"][0] == {
        "group_id": "g",
        "query": {"item_id": "query", "text": "q"},
        "candidates": [{"item_id": "0", "text": "a"}, {"item_id": "1", "token_ids": {"ids": [5]}}],
    }
    assert [group["group_id"] for group in second["groups"]] == ["2"]
    assert [record["group_index"] for record in outcome.records[:-1]] == [0, 1, 2]


async def test_score_options(fake: FakeServer, openengine: OpenEngine) -> None:
    options = "--normalization softmax --label-token-ids 5,6 --instruction do --semantics probabilities"
    await openengine("score", "--query", "q", "a", *options.split())
    (request,) = sent(fake, "Score")
    assert request["options"] == {
        "output_semantics": "TASK_VALUE_SEMANTICS_PROBABILITIES",
        "normalization": "SCORE_NORMALIZATION_SOFTMAX",
        "label_token_ids": [5, 6],
        "instruction": "do",
    }


async def test_scores_without_an_order_are_not_sorted(fake: FakeServer, openengine: OpenEngine) -> None:
    def unordered(request: tasks_pb2.ScoreRequest) -> tasks_pb2.ScoreResponse:
        response = _score(request)
        response.ClearField("higher_is_better")
        return response

    fake.answers["Score"] = unordered
    outcome = await openengine("score", "--query", "q", "--sort", "a")
    assert (outcome.code, outcome.err) == (
        2,
        "openengine: --sort: these scores have no order; leave it out\n",
    )


async def test_a_refused_task_is_exit_code_1(fake: FakeServer, openengine: OpenEngine) -> None:
    fake.answers["Embed"] = Status(grpc.StatusCode.FAILED_PRECONDITION, "tiny generates; it does not embed")
    outcome = await openengine("embed", "x")
    assert (outcome.code, outcome.out) == (1, "")
    assert "FAILED_PRECONDITION: tiny generates; it does not embed" in outcome.err


@pytest.mark.parametrize(
    ("command", "stdin", "said"),
    [
        ("embed", "\n", "no input: give texts, --file, or lines on standard input"),
        ("embed x --file y", "", "inputs are given twice: as arguments and with --file"),
        ("embed --file none", "", "inputs: cannot read none: No such file or directory"),
        ("embed --jsonl", "{", "input line 1: not JSON: "),
        ("embed --jsonl", "[]", "input line 1: not a JSON object"),
        ("embed --jsonl", '{"txt": 1}', "input 0: unknown txt"),
        ("embed --jsonl", '{"text": 1}', "input 0: wrong type of value"),
        ("embed --jsonl", '{"text": "a", "token_ids": [1]}', "input 0: has both text and token_ids"),
        ("embed x --batch-size 0", "", "argument --batch-size: 0 is not in 1 ... "),
        ("score x", "", "--query is missing (or groups of --jsonl)"),
        ("score --jsonl", '{"query": "q"}', 'input line 1: a group has "query", a list "candidates"'),
        ("score --query q x --label-token-ids a", "", "--label-token-ids: cannot read a: No such file"),
    ],
)
async def test_wrong_inputs_are_exit_code_2_and_send_nothing(
    fake: FakeServer, openengine: OpenEngine, command: str, stdin: str, said: str
) -> None:
    outcome = await openengine(*command.split(), stdin=stdin)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith(f"openengine: {said}")
    assert not fake.requests
