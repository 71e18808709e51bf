"""The rules of Embed, Classify and Score requests, checked before the engine sees them.

As in `validation`: every refusal names the field's path, and what the running model cannot serve is refused from
the same description that discovery is answered from (MODEL-07, CAP-03).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import grpc

from openengine.v1 import tasks_pb2
from openengine_adapters.core.errors import Rejected, invalid
from openengine_adapters.core.validation import (
    check_identity,
    check_media,
    check_token_ids,
)
from openengine_adapters.core.vocabulary import check_vocabulary
from openengine_adapters.engine import EngineDescription, TaskSupport

Options = tasks_pb2.EmbedOptions | tasks_pb2.ClassifyOptions | tasks_pb2.ScoreOptions

_INPUT_TYPES = {
    "text": tasks_pb2.TASK_INPUT_TYPE_TEXT,
    "token_ids": tasks_pb2.TASK_INPUT_TYPE_TOKEN_IDS,
    "multimodal": tasks_pb2.TASK_INPUT_TYPE_MULTIMODAL,
}


def check_embed(request: tasks_pb2.EmbedRequest, description: EngineDescription) -> tasks_pb2.EmbedOptions:
    """Check one request completely and return its options with the defaults of the core filled in.

    Raises `Rejected`.
    """
    support = _supported(request, "Embed", description.embed, description)
    _check_batch(request.inputs, support, description)
    options = tasks_pb2.EmbedOptions()
    options.CopyFrom(request.options)
    _settle_granularity(options, support)
    _settle(options, "encoding", support.encodings)
    if options.HasField("normalize") and not support.normalization:
        raise invalid("options.normalize", "this model does not let the caller choose; leave it out")
    if options.HasField("dimensions"):
        _check_dimensions(options.dimensions, support)
    return options


def check_classify(
    request: tasks_pb2.ClassifyRequest, description: EngineDescription
) -> tasks_pb2.ClassifyOptions:
    """As `check_embed`, for Classify."""
    support = _supported(request, "Classify", description.classify, description)
    _check_batch(request.inputs, support, description)
    options = tasks_pb2.ClassifyOptions()
    options.CopyFrom(request.options)
    _settle_granularity(options, support)
    _settle(options, "output_semantics", support.semantics)
    return options


def check_score(request: tasks_pb2.ScoreRequest, description: EngineDescription) -> tasks_pb2.ScoreOptions:
    """As `check_embed`, for Score."""
    support = _supported(request, "Score", description.score, description)
    _check_groups(request.groups, support, description)
    options = tasks_pb2.ScoreOptions()
    options.CopyFrom(request.options)
    _settle_granularity(options, support)
    _settle(options, "output_semantics", support.semantics)
    _check_normalization(options, support)
    _check_labels(options.label_token_ids, support, description)
    if options.instruction and not support.instruction:
        raise invalid("options.instruction", "this model takes no instruction; leave it empty")
    return options


# ---------------------------------------------------------------------------------------------------- context


def _supported(
    request: tasks_pb2.EmbedRequest | tasks_pb2.ClassifyRequest | tasks_pb2.ScoreRequest,
    task: str,
    support: TaskSupport | None,
    description: EngineDescription,
) -> TaskSupport:
    """TASK-01, TASK-02, TASK-10: who asks, for which model, and whether that serves the task at all."""
    if not request.HasField("context"):
        raise invalid("context", "must be set, with request_id and model")
    context = request.context
    check_identity(context.request_id, context.model, description, "context.")
    if support is None:
        raise Rejected(
            grpc.StatusCode.FAILED_PRECONDITION,
            f"this model does not serve {task}; GetModelInfo says what it serves",
            field="context.model",
        )
    if context.lora_name and not (support.lora and description.lora):
        raise invalid(
            "context.lora_name", "this task takes no LoRA adapter; leave it empty", value=context.lora_name
        )
    if context.HasField("priority") and not support.priority:
        raise invalid("context.priority", "this engine does not schedule this task by priority; leave it out")
    return support


# ----------------------------------------------------------------------------------------------------- inputs


def _check_batch(
    inputs: Sequence[tasks_pb2.TaskInput], support: TaskSupport, description: EngineDescription
) -> None:
    """TASK-05, CAP-03."""
    _check_count("inputs", len(inputs), support.max_batch_size, "inputs")
    _check_item_ids((f"inputs[{position}]", item) for position, item in enumerate(inputs))
    for position, item in enumerate(inputs):
        _check_input(f"inputs[{position}]", item, support, description)


def _check_groups(
    groups: Sequence[tasks_pb2.ScoreGroup], support: TaskSupport, description: EngineDescription
) -> None:
    """SCO-01, CAP-03."""
    _check_count("groups", len(groups), support.max_groups, "groups")
    group_ids: set[str] = set()
    for position, group in enumerate(groups):
        place = f"groups[{position}]"
        if group.group_id in group_ids:
            raise invalid(
                f"{place}.group_id", "is there twice; give each group its own", value=group.group_id
            )
        group_ids.add(group.group_id)
        if not group.HasField("query"):
            raise invalid(f"{place}.query", "must be set")
        _check_count(
            f"{place}.candidates", len(group.candidates), support.max_candidates_per_group, "candidates"
        )
        items = list(placed_inputs(place, group))
        _check_item_ids(items)
        for where, item in items:
            _check_input(where, item, support, description)


def placed_inputs(place: str, group: tasks_pb2.ScoreGroup) -> Iterable[tuple[str, tasks_pb2.TaskInput]]:
    """Every input of a group with its path in the request, the query first."""
    yield f"{place}.query", group.query
    for position, candidate in enumerate(group.candidates):
        yield f"{place}.candidates[{position}]", candidate


def _check_count(field: str, count: int, most: int | None, what: str) -> None:
    if not count:
        raise invalid(field, "must not be empty")
    if most is not None and count > most:
        raise invalid(
            field, f"{count} {what} are more than the {most} taken at once", limit=most, value=count
        )


def _check_item_ids(placed: Iterable[tuple[str, tasks_pb2.TaskInput]]) -> None:
    """TASK-05: every item has an id, and no two have the same."""
    seen: set[str] = set()
    for place, item in placed:
        if not item.item_id:
            raise invalid(f"{place}.item_id", "must not be empty")
        if item.item_id in seen:
            raise invalid(f"{place}.item_id", "is there twice; give each item its own", value=item.item_id)
        seen.add(item.item_id)


def _check_input(
    place: str, item: tasks_pb2.TaskInput, support: TaskSupport, description: EngineDescription
) -> None:
    """TASK-03, TASK-05, TASK-06."""
    kind = item.WhichOneof("input")
    if kind is None:
        raise invalid(place, "set one of text, token_ids and multimodal")
    if _INPUT_TYPES[kind] not in support.input_types:
        raise invalid(f"{place}.{kind}", "this task does not take this kind of input")
    if kind == "multimodal":
        if not item.multimodal.media:
            raise invalid(
                f"{place}.multimodal.media", "must not be empty; send text or token_ids without media"
            )
        check_media(f"{place}.multimodal.media", item.multimodal.media, support.modalities)
        # Without a prompt the media stand alone.
        _check_prompt(f"{place}.multimodal", item.multimodal, description)
    else:
        _check_prompt(place, item, description)


def _check_prompt(
    place: str, holder: tasks_pb2.TaskInput | tasks_pb2.MultimodalTaskInput, description: EngineDescription
) -> None:
    if holder.HasField("text") and not holder.text:
        raise invalid(f"{place}.text", "must not be empty")
    if holder.HasField("token_ids"):
        field = f"{place}.token_ids"
        check_token_ids(field, holder.token_ids.ids, description)
        check_input_length(field, len(holder.token_ids.ids), description)


def check_input_length(
    field: str, length: int, description: EngineDescription, *, new_tokens: int = 0
) -> None:
    """The model's context holds the input, which is never cut short; `new_tokens` need room as well."""
    longest = description.max_context_length
    if longest is not None and length > longest - new_tokens:
        raise invalid(
            field,
            f"{length} tokens are more than the {longest - new_tokens} that the context has room for",
            limit=longest - new_tokens,
            value=length,
        )


# ---------------------------------------------------------------------------------------------------- options


def _settle_granularity(options: Options, support: TaskSupport) -> None:
    """EMB-02: after this the granularity is set, to the one asked for or to the default."""
    _settle(options, "granularity", support.granularities)
    if not options.HasField("granularity"):
        options.granularity = support.granularities[0]


def _settle(options: Options, name: str, served: Sequence[int]) -> None:
    """A choice that is made is served or refused.

    UNSPECIFIED, written out, is no choice, nor is a number that this build does not know (DISC-12).
    """
    value: int = getattr(options, name)
    enum = options.DESCRIPTOR.fields_by_name[name].enum_type
    assert enum is not None
    names = {number: known.name for number, known in enum.values_by_number.items()}
    if not value or value not in names:
        options.ClearField(name)  # type: ignore[arg-type]  # a field of each that it is called for
    elif value not in served:
        has = ", ".join(names[number] for number in served) or "there is no choice"
        raise invalid(
            f"options.{name}",
            f"{names[value]} is not served ({has}); leave it out for the default",
            value=names[value],
        )


def _check_dimensions(dimensions: int, support: TaskSupport) -> None:
    """EMB-04. Which sizes between 1 and the model's own it serves is for the adapter to say."""
    field = "options.dimensions"
    if not dimensions:
        raise invalid(field, "must be at least 1; leave it out for the model's own size", limit=1, value=0)
    if not support.dimension_override:
        raise invalid(field, "this model's embeddings cannot be shortened; leave it out", value=dimensions)
    if support.dimension is not None and dimensions > support.dimension:
        raise invalid(
            field,
            f"{dimensions} is above the model's own {support.dimension}, and nothing is padded",
            limit=support.dimension,
            value=dimensions,
        )


def _check_normalization(options: tasks_pb2.ScoreOptions, support: TaskSupport) -> None:
    """SCO-03."""
    _settle(options, "normalization", support.normalizations)
    probabilities = tasks_pb2.TASK_VALUE_SEMANTICS_PROBABILITIES
    if (
        options.normalization == tasks_pb2.SCORE_NORMALIZATION_SOFTMAX
        and options.HasField("output_semantics")
        and options.output_semantics != probabilities
    ):
        raise invalid(
            "options.normalization", "SOFTMAX gives probabilities; ask for these, or for no output_semantics"
        )


def _check_labels(labels: Sequence[int], support: TaskSupport, description: EngineDescription) -> None:
    """SCO-02, CAP-03."""
    field = "options.label_token_ids"
    if not labels:
        if not support.native_scoring:
            raise invalid(field, "this model scores by label tokens only; name the tokens to score")
        return
    if not support.label_token_scoring:
        raise invalid(field, "this model has a scoring of its own and scores no label tokens; leave it empty")
    if len(set(labels)) < len(labels):
        raise invalid(field, "holds an id twice; name each once")
    _check_count(field, len(labels), support.max_label_token_ids, "label tokens")
    check_vocabulary(field, max(labels), description)
