"""Task requests for a served engine, and what a refusal looks like."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Awaitable, Sequence
from typing import Any

import grpc
import pytest

from openengine.v1 import inputs_pb2, lifecycle_pb2, model_pb2, tasks_pb2
from tests.support.wire import PATIENCE_S, Wire

SEQUENCE = tasks_pb2.TASK_OUTPUT_GRANULARITY_SEQUENCE
TOKEN = tasks_pb2.TASK_OUTPUT_GRANULARITY_TOKEN
LOGITS = tasks_pb2.TASK_VALUE_SEMANTICS_LOGITS
PROBABILITIES = tasks_pb2.TASK_VALUE_SEMANTICS_PROBABILITIES
LOG_PROBABILITIES = tasks_pb2.TASK_VALUE_SEMANTICS_LOG_PROBABILITIES
RELEVANCE = tasks_pb2.TASK_VALUE_SEMANTICS_RELEVANCE
REWARD = tasks_pb2.TASK_VALUE_SEMANTICS_REWARD
SIMILARITY = tasks_pb2.TASK_VALUE_SEMANTICS_SIMILARITY
NONE = tasks_pb2.SCORE_NORMALIZATION_NONE
SOFTMAX = tasks_pb2.SCORE_NORMALIZATION_SOFTMAX

_numbers = itertools.count()

Texts = Sequence[str | Sequence[int]]


def item(item_id: str, value: str | Sequence[int]) -> tasks_pb2.TaskInput:
    """A text or ids as an input."""
    if isinstance(value, str):
        return tasks_pb2.TaskInput(item_id=item_id, text=value)
    return tasks_pb2.TaskInput(item_id=item_id, token_ids=inputs_pb2.TokenIds(ids=value))


def context(wire: Wire, **fields: Any) -> tasks_pb2.TaskRequestContext:
    """A context with an id of its own."""
    fields.setdefault("request_id", f"task-{next(_numbers)}")
    return tasks_pb2.TaskRequestContext(model=wire.description.model_id, **fields)


async def patiently(call: Awaitable[Any]) -> Any:
    """The answer, however busy the machine is."""
    async with asyncio.timeout(PATIENCE_S):
        return await call


async def refused(call: Awaitable[Any]) -> tuple[grpc.StatusCode, str]:
    """The status of a call that must fail."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await patiently(call)
    return caught.value.code(), caught.value.details() or ""


def embed_call(
    wire: Wire,
    texts: Texts,
    about: dict[str, Any] | None = None,
    timeout: float | None = None,
    **options: Any,
) -> Any:
    """A started Embed call."""
    inputs = [item(f"i{n}", text) for n, text in enumerate(texts)]
    request = tasks_pb2.EmbedRequest(
        context=context(wire, **(about or {})), inputs=inputs, options=tasks_pb2.EmbedOptions(**options)
    )
    return wire.stub.Embed(request, timeout=timeout)


def classify_call(wire: Wire, texts: Texts, **options: Any) -> Any:
    """A started Classify call."""
    inputs = [item(f"i{n}", text) for n, text in enumerate(texts)]
    request = tasks_pb2.ClassifyRequest(
        context=context(wire), inputs=inputs, options=tasks_pb2.ClassifyOptions(**options)
    )
    return wire.stub.Classify(request)


def score_call(wire: Wire, query: str | Sequence[int], groups: Sequence[Texts], **options: Any) -> Any:
    """A started Score call: the same query against several groups of candidates."""
    request = tasks_pb2.ScoreRequest(context=context(wire), options=tasks_pb2.ScoreOptions(**options))
    for number, candidates in enumerate(groups):
        group = request.groups.add(group_id=f"g{number}", query=item("query", query))
        group.candidates.extend(item(f"c{n}", text) for n, text in enumerate(candidates))
    return wire.stub.Score(request)


async def model_info(wire: Wire) -> model_pb2.ModelInfo:
    """What discovery says of the model."""
    request = model_pb2.GetModelInfoRequest(model=wire.description.model_id)
    info: model_pb2.ModelInfo = await patiently(wire.stub.GetModelInfo(request))
    return info


async def serves_only(wire: Wire, *tasks: str) -> None:
    """CAP-01, TASK-02, HEALTH-02: what is advertised is served, all else is FAILED_PRECONDITION; the probe passes."""
    info = await model_info(wire)
    calls: dict[str, Any] = {
        "embed": lambda: embed_call(wire, ["the fox"]),
        "classify": lambda: classify_call(wire, ["the fox"]),
        "score": lambda: score_call(wire, "the fox", [["a cat"]]),
    }
    for task, call in calls.items():
        assert getattr(info.tasks, task).supported is (task in tasks)
        if task in tasks:
            await patiently(call())
        else:
            code, details = await refused(call())
            assert code is grpc.StatusCode.FAILED_PRECONDITION
            assert details.startswith("context.model")
    health = await patiently(wire.stub.Health(lifecycle_pb2.HealthRequest(include_inference_probe=True)))
    assert health.state == lifecycle_pb2.HEALTH_STATE_READY
    assert not info.HasField("generation")
    code, _ = await wire.refused("text")
    assert code is grpc.StatusCode.FAILED_PRECONDITION


def close(found: Sequence[float], expected: Sequence[float], tolerance: float = 2e-4) -> bool:
    """Equal as far as two implementations in float32 can be."""
    return len(found) == len(expected) and all(
        math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance) for a, b in zip(found, expected, strict=True)
    )


def rows(tensor: tasks_pb2.DenseFloatTensor) -> list[list[float]]:
    """A two-dimensional tensor as lists."""
    count, width = tensor.shape
    values = list(tensor.values)
    return [values[row * width : (row + 1) * width] for row in range(count)]


def unit(vector: Sequence[float]) -> list[float]:
    """The vector at length 1."""
    length = math.hypot(*vector)
    return [value / length for value in vector]


def cosine(a: Sequence[float], b: Sequence[float]) -> float:
    """The cosine of the angle between two vectors."""
    return sum(x * y for x, y in zip(unit(a), unit(b), strict=True))


def softmax(logits: Sequence[float]) -> list[float]:
    """Probabilities that sum to 1."""
    powers = [math.exp(logit - max(logits)) for logit in logits]
    return [power / sum(powers) for power in powers]


def sigmoid(logit: float) -> float:
    """A probability by itself."""
    return 1 / (1 + math.exp(-logit))
