"""From the tensors that an engine computed to the responses of Embed, Classify and Score.

A tensor is checked before it is sent: the contract's shape, finite values, the limits that are advertised. What
an engine got wrong fails the call INTERNAL and names the item (TASK-11, TASK-12, TASK-16).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import grpc

from openengine.v1 import tasks_pb2
from openengine_adapters.core.errors import EngineFailure, Rejected, invalid
from openengine_adapters.engine import Classification, GroupScores, Tensor

MAX_RESPONSE_VALUES = 16 * 2**20
"""Numbers in one response: 64 MiB of float32, about a third of a second to assemble."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What every tensor of a call must be. `columns` is the size of the last dimension, None where it is open."""

    granularity: tasks_pb2.TaskOutputGranularity.ValueType
    columns: int | None = None
    max_values: int | None = None


class TensorChecker:
    """Checks the tensors of one call one by one, and that together they fit into one response."""

    def __init__(self, expected: Expected) -> None:
        self._expected = expected
        self._left = MAX_RESPONSE_VALUES

    def check(self, place: str, item_id: str, tensor: Tensor) -> None:
        """Raise `EngineFailure` for a broken tensor, `Rejected` for one that is too large."""
        wrong = self._wrong(tensor)
        if wrong:
            raise EngineFailure(f"{place} (item {item_id!r}): the engine returned {wrong}")
        count, most = len(tensor.values), self._expected.max_values
        if most is not None and count > most:
            raise invalid(
                place, f"its output has {count} values and {most} are allowed", limit=most, value=count
            )
        self._left -= count
        if self._left < 0:
            raise Rejected(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"the outputs together are more than the {MAX_RESPONSE_VALUES} values of one response; "
                "send a smaller batch",
                field=place,
            )

    def _wrong(self, tensor: Tensor) -> str:
        shape, expected = list(tensor.shape), self._expected
        rank = 2 if expected.granularity == tasks_pb2.TASK_OUTPUT_GRANULARITY_TOKEN else 1
        if len(shape) != rank or not all(size > 0 for size in shape):
            return f"shape {shape} where {rank} dimensions above zero are due"
        if expected.columns is not None and shape[-1] != expected.columns:
            return f"shape {shape} where the last dimension must be {expected.columns}"
        if tensor.indices is None:
            if math.prod(shape) != len(tensor.values):
                return f"{len(tensor.values)} values for shape {shape}"
        elif wrong := _wrong_indices(tensor.indices, len(tensor.values), math.prod(shape)):
            return wrong
        # A sum of float32 values cannot overflow Python's floats, so it is finite exactly when they all are.
        if not math.isfinite(sum(tensor.values)):
            return "a value that is not finite"
        if tensor.token_ids and (rank == 1 or len(tensor.token_ids) != shape[0]):
            return f"{len(tensor.token_ids)} token ids for shape {shape}"
        if (tensor.cached_input_tokens or 0) > tensor.input_tokens:
            return f"{tensor.cached_input_tokens} cached of {tensor.input_tokens} input tokens"
        return ""


def _wrong_indices(indices: Sequence[int], values: int, size: int) -> str:
    """TASK-12."""
    if len(indices) != values:
        return f"{len(indices)} indices for {values} values"
    if any(after <= before for before, after in itertools.pairwise(indices)):
        return "indices that do not increase"
    if indices and not 0 <= indices[0] <= indices[-1] < size:
        return f"an index outside 0 to {size - 1}"
    return ""


def check_labels(place: str, classification: Classification) -> None:
    """CLS-02, CLS-03. Raises `EngineFailure`."""
    labels, classes = classification.labels, classification.scores.shape[-1]
    if labels and len(labels) != classes:
        raise EngineFailure(f"{place}: the engine returned {len(labels)} labels for {classes} classes")


# -------------------------------------------------------------------------------------------------- responses


def embed_response(
    request: tasks_pb2.EmbedRequest, options: tasks_pb2.EmbedOptions, tensors: Sequence[Tensor]
) -> tasks_pb2.EmbedResponse:
    """One output for each input, in order (TASK-14)."""
    response = tasks_pb2.EmbedResponse(request_id=request.context.request_id, usage=_usage(tensors))
    for index, (item, tensor) in enumerate(zip(request.inputs, tensors, strict=True)):
        output = response.outputs.add(
            item_id=item.item_id,
            input_index=index,
            granularity=options.granularity,
            token_ids=tensor.token_ids,
        )
        if tensor.indices is None:
            _fill(output.dense, tensor)
        else:
            output.sparse.shape.extend(tensor.shape)
            output.sparse.indices.extend(tensor.indices)
            output.sparse.values.extend(tensor.values)
    return response


def classify_response(
    request: tasks_pb2.ClassifyRequest,
    options: tasks_pb2.ClassifyOptions,
    classifications: Sequence[Classification],
) -> tasks_pb2.ClassifyResponse:
    """One output for each input, in order (TASK-14)."""
    response = tasks_pb2.ClassifyResponse(
        request_id=request.context.request_id,
        usage=_usage([classification.scores for classification in classifications]),
    )
    for index, (item, found) in enumerate(zip(request.inputs, classifications, strict=True)):
        output = response.outputs.add(
            item_id=item.item_id,
            input_index=index,
            granularity=options.granularity,
            semantics=found.semantics,
            labels=found.labels,
            token_ids=found.scores.token_ids,
        )
        _fill(output.scores, found.scores)
    return response


def score_response(
    request: tasks_pb2.ScoreRequest, options: tasks_pb2.ScoreOptions, groups: Sequence[GroupScores]
) -> tasks_pb2.ScoreResponse:
    """Every group and candidate, in order; what the scores mean is the same for all groups (SCO-05, SCO-06)."""
    kinds = {(scores.semantics, scores.normalization, scores.higher_is_better) for scores in groups}
    if len(kinds) > 1:
        raise EngineFailure("the engine scored the groups of one call in different ways")
    semantics, normalization, higher_is_better = kinds.pop()
    response = tasks_pb2.ScoreResponse(
        request_id=request.context.request_id,
        granularity=options.granularity,
        semantics=semantics,
        normalization=normalization,
        higher_is_better=higher_is_better,
        label_token_ids=options.label_token_ids,
        usage=_usage([tensor for scores in groups for tensor in scores.candidates]),
    )
    for group_index, (group, scores) in enumerate(zip(request.groups, groups, strict=True)):
        output = response.groups.add(group_id=group.group_id, group_index=group_index)
        for index, (candidate, tensor) in enumerate(zip(group.candidates, scores.candidates, strict=True)):
            found = output.candidates.add(
                candidate_id=candidate.item_id, candidate_index=index, token_ids=tensor.token_ids
            )
            _fill(found.scores, tensor)
    return response


def _fill(message: tasks_pb2.DenseFloatTensor, tensor: Tensor) -> None:
    message.shape.extend(tensor.shape)
    message.values.extend(tensor.values)


def _usage(tensors: Iterable[Tensor]) -> tasks_pb2.TaskUsage:
    """TASK-13; cached tokens only where the engine counted them for every item."""
    usage = tasks_pb2.TaskUsage()
    cached = 0
    known = True
    for tensor in tensors:
        usage.input_tokens += tensor.input_tokens
        cached += tensor.cached_input_tokens or 0
        known = known and tensor.cached_input_tokens is not None
    if known:
        usage.cached_input_tokens = cached
    return usage
