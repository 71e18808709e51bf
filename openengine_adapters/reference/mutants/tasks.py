"""Mutants of Embed, Classify and Score."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from openengine.v1 import inputs_pb2, tasks_pb2
from openengine_adapters.core.requests import ActiveRequest
from openengine_adapters.core.servicer import OpenEngineServicer
from openengine_adapters.reference.engine import ReferenceEngine
from openengine_adapters.reference.mutants.seams import (
    Refuse,
    engine_of,
    replace,
    request_of,
    response_of,
    servicer_of,
    status_of,
)

_ALL = ("Embed", "Classify", "Score")
_BATCHES = ("Embed", "Classify")
_SLOW = {"latency": 0.3}

# ---------------------------------------------------------------------------------------------- all of them


@request_of(_ALL, "task_without_model", "TASK-01", "A task without a model gets the default one.")
def _(request: Any) -> None:
    if request.HasField("context"):
        request.context.model = request.context.model or "reference-toy"


@response_of("GetModelInfo", "task_served_all_the_same", "TASK-02", "A task that is not supported is served.")
def _(model: Any) -> None:
    model.tasks.classify.Clear()
    model.tasks.classify.supported = False


@request_of(_BATCHES, "ids_wrap_round", "TASK-03", "Token ids outside the vocabulary become others.")
def _(request: Any) -> None:
    for item in request.inputs:
        item.token_ids.ids[:] = [token % 100 for token in item.token_ids.ids]


@request_of(_BATCHES, "media_not_missed", "TASK-06", "A multimodal input without media is taken for text.")
def _(request: Any) -> None:
    for item in request.inputs:
        if item.HasField("multimodal") and not item.multimodal.media:
            item.text = item.multimodal.text


@request_of(_BATCHES, "item_without_id", "TASK-05", "Items without an id get their index.")
def _(request: Any) -> None:
    for index, item in enumerate(request.inputs):
        item.item_id = item.item_id or str(index)


@status_of(_ALL, "empty_batch_forbidden", "TASK-05", "A malformed batch is FAILED_PRECONDITION.")
def _(code: grpc.StatusCode) -> grpc.StatusCode:
    return grpc.StatusCode.FAILED_PRECONDITION if code is grpc.StatusCode.INVALID_ARGUMENT else code


@servicer_of(
    "ids_of_their_own",
    "TASK-07",
    "Tasks and Generate have namespaces of their own.",
    settings=_SLOW,
)
def _(servicer: OpenEngineServicer) -> None:
    claim = servicer.requests.claim

    def apart(request_id: str, **more: Any) -> Any:
        others = {r.request_id for r in servicer.requests if r.unary != more.get("unary", False)}
        return claim(request_id + "'" if request_id in others else request_id, **more)

    replace(servicer.requests, "claim", apart)


@servicer_of("tasks_outlive_abort", "TASK-08", "Abort says ABORTED and lets a task run.", settings=_SLOW)
def _(servicer: OpenEngineServicer) -> None:
    abort_request = servicer.requests.abort_request

    async def spare(request: ActiveRequest) -> None:
        if not request.unary:
            await abort_request(request)

    replace(servicer.requests, "abort_request", spare)


@engine_of(
    "tasks_run_on",
    "TASK-09",
    "A task that nobody waits for runs on in the engine.",
    settings={"latency": 2.5},
)
def _(engine: ReferenceEngine) -> None:
    run = engine._run

    async def shielded(*work: Any) -> Any:
        return await asyncio.shield(asyncio.ensure_future(run(*work)))

    replace(engine, "_run", shielded)


@request_of(_ALL, "task_priority_swapped", "TASK-10", "A smaller priority goes first.")
def _(request: Any) -> None:
    if request.context.HasField("priority"):
        request.context.priority = -request.context.priority


@request_of(_ALL, "task_priority_refused", "TASK-10", "A priority is advertised and refused.")
def _(request: Any) -> None:
    if request.context.HasField("priority"):
        raise Refuse(grpc.StatusCode.INVALID_ARGUMENT, "context.priority: is not supported")


@response_of("Embed", "flat_shape", "TASK-11", "A vector's shape is a matrix of one row.")
def _(response: Any) -> None:
    for output in response.outputs:
        if len(output.dense.shape) == 1:
            output.dense.shape.insert(0, 2)


@response_of("Embed", "not_finite", "TASK-11", "An embedding holds a NaN.")
def _(response: Any) -> None:
    for output in response.outputs:
        if output.dense.values:
            output.dense.values[0] = float("nan")


@response_of("Embed", "indices_backwards", "TASK-12", "Sparse indices decrease.")
def _(response: Any) -> None:
    for output in response.outputs:
        if output.HasField("sparse"):
            output.sparse.indices[:] = output.sparse.indices[::-1]
            output.sparse.values[:] = output.sparse.values[::-1]


@response_of(_ALL, "usage_of_one_item", "TASK-13", "Usage counts one token whatever came.")
def _(response: Any) -> None:
    response.usage.input_tokens = 1
    response.usage.cached_input_tokens = 0


@response_of(_BATCHES, "no_index_zero", "TASK-14", "The input index is left out when it is 0.")
def _(response: Any) -> None:
    response.outputs[0].ClearField("input_index")


@response_of(_BATCHES, "outputs_reversed", "TASK-14", "Outputs come in the opposite order.")
def _(response: Any) -> None:
    outputs = [type(output).FromString(output.SerializeToString()) for output in response.outputs]
    del response.outputs[:]
    response.outputs.extend(outputs[::-1])


@request_of(
    _BATCHES, "failing_items_left_out", "TASK-15", "Items without an input are left out of the batch."
)
def _(request: Any) -> None:
    kept = [item for item in request.inputs if item.WhichOneof("input")]
    if kept:
        del request.inputs[:]
        request.inputs.extend(kept)


# --------------------------------------------------------------------------------------------- capabilities


@response_of("GetModelInfo", "unspecified_granularity", "CAP-02", "A capability list holds UNSPECIFIED.")
def _(model: Any) -> None:
    model.tasks.embed.granularities.append(0)


@response_of(
    "GetModelInfo", "smaller_batches_promised", "CAP-03", "One item more than the limit is accepted."
)
def _(model: Any) -> None:
    model.tasks.embed.max_batch_size -= 1


@response_of(
    "GetModelInfo", "tasks_see_and_the_model_does_not", "MODEL-07", "Only the tasks' capabilities list media."
)
def _(model: Any) -> None:
    model.supports_multimodal = False
    model.tasks.embed.modalities[:] = [inputs_pb2.MODALITY_IMAGE]
    model.tasks.embed.input_types.append(tasks_pb2.TASK_INPUT_TYPE_MULTIMODAL)


@response_of("GetModelInfo", "task_support_unsaid", "CAP-01", "A task's capability does not say `supported`.")
def _(model: Any) -> None:
    model.tasks.classify.ClearField("supported")


# ----------------------------------------------------------------------------------------------------- embed


@request_of("Embed", "always_sequences", "EMB-01", "Token embeddings are asked for and a sequence's comes.")
def _(request: Any) -> None:
    request.options.ClearField("granularity")


@response_of("Embed", "granularity_unsaid", "EMB-02", "An embedding does not state its granularity.")
def _(response: Any) -> None:
    for output in response.outputs:
        output.granularity = tasks_pb2.TASK_OUTPUT_GRANULARITY_UNSPECIFIED


@request_of("Embed", "always_raw", "EMB-03", "Embeddings are never normalised.")
def _(request: Any) -> None:
    request.options.normalize = False


@request_of("Embed", "never_padded_but_cut", "EMB-04", "Too many dimensions are cut to what there is.")
def _(request: Any) -> None:
    if request.options.dimensions > 64:
        request.options.dimensions = 64


@request_of("Embed", "dimensions_ignored", "EMB-04", "Fewer dimensions are asked for and all come.")
def _(request: Any) -> None:
    if request.options.dimensions:
        request.options.ClearField("dimensions")


@response_of("GetModelInfo", "another_dimension", "EMB-05", "The native dimension is not the one returned.")
def _(model: Any) -> None:
    model.tasks.embed.dimension = 96


# -------------------------------------------------------------------------------------------------- classify


@response_of("Classify", "classes_by_token", "CLS-01", "A sequence's classes have two dimensions.")
def _(response: Any) -> None:
    for output in response.outputs:
        if len(output.scores.shape) == 1:
            output.scores.shape.insert(0, 1)


@response_of("Classify", "semantics_unsaid", "CLS-02", "A classification does not say what its values mean.")
def _(response: Any) -> None:
    for output in response.outputs:
        output.semantics = tasks_pb2.TASK_VALUE_SEMANTICS_UNSPECIFIED


@response_of(
    "Classify", "logits_as_probabilities", "CLS-02", "What is called probabilities does not sum to 1."
)
def _(response: Any) -> None:
    for output in response.outputs:
        if output.semantics == tasks_pb2.TASK_VALUE_SEMANTICS_PROBABILITIES:
            output.scores.values[:] = [value * 2 for value in output.scores.values]


@response_of("Classify", "label_missing", "CLS-03", "There is a label less than classes.")
def _(response: Any) -> None:
    for output in response.outputs:
        del output.labels[-1]


# ----------------------------------------------------------------------------------------------------- score


@request_of("Score", "empty_groups_dropped", "SCO-01", "Groups without candidates are left out.")
def _(request: Any) -> None:
    kept = [group for group in request.groups if group.candidates]
    if kept:
        del request.groups[:]
        request.groups.extend(kept)
    elif request.groups:
        raise Refuse(grpc.StatusCode.NOT_FOUND, "nothing to score")


@response_of("Score", "labels_sorted", "SCO-02", "The response's label tokens are sorted.")
def _(response: Any) -> None:
    response.label_token_ids[:] = sorted(response.label_token_ids)


@request_of("Score", "labels_once", "SCO-02", "A label token given twice is taken once.")
def _(request: Any) -> None:
    request.options.label_token_ids[:] = list(dict.fromkeys(request.options.label_token_ids))


@request_of("Score", "softmax_ignored", "SCO-03", "Label scores are never normalised.")
def _(request: Any) -> None:
    if request.options.label_token_ids:
        request.options.normalization = tasks_pb2.SCORE_NORMALIZATION_NONE


@response_of("Score", "normalization_unsaid", "SCO-03", "The response does not state its normalization.")
def _(response: Any) -> None:
    response.normalization = tasks_pb2.SCORE_NORMALIZATION_UNSPECIFIED


@request_of("Score", "instruction_ignored", "SCO-04", "An instruction is dropped.")
def _(request: Any) -> None:
    request.options.instruction = ""


@response_of("Score", "best_first", "SCO-05", "Candidates come sorted by their score.")
def _(response: Any) -> None:
    for group in response.groups:
        ranked = sorted(
            (type(each).FromString(each.SerializeToString()) for each in group.candidates),
            key=lambda each: -each.scores.values[0],
        )
        del group.candidates[:]
        group.candidates.extend(ranked)


@response_of("Score", "no_direction", "SCO-06", "A rankable score does not say which direction is better.")
def _(response: Any) -> None:
    response.ClearField("higher_is_better")


@response_of(
    "Score", "score_depends_on_the_batch", "SCO-07", "A group's scores depend on the groups beside it."
)
def _(response: Any) -> None:
    for group in response.groups:
        for candidate in group.candidates:
            candidate.scores.values[:] = [value / len(response.groups) for value in candidate.scores.values]
