"""Every rule of a task request: the code, the field that the refusal begins with, and each limit's two sides."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from openengine.v1 import inputs_pb2, tasks_pb2
from openengine_adapters.core import task_validation
from openengine_adapters.core.errors import Rejected
from openengine_adapters.engine import EngineDescription
from tests.core.fake_engine import description
from tests.core.task_engine import DENSE, LOGITS, NONE, PLAIN, SEQUENCE, SOFTMAX, SUPPORT, TOKEN

INVALID = grpc.StatusCode.INVALID_ARGUMENT
NOT_FOUND = grpc.StatusCode.NOT_FOUND
PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION

Request = tasks_pb2.EmbedRequest | tasks_pb2.ClassifyRequest | tasks_pb2.ScoreRequest
Change = Callable[[Any], object]

FULL = description(embed=SUPPORT, classify=SUPPORT, score=SUPPORT, lora=True)
BARE = description(embed=PLAIN, classify=PLAIN, score=PLAIN, lora=True)
NO_TASKS = description()

PIXELS = inputs_pb2.MediaItem(raw_bytes=b"x")


def item(item_id: str = "a", *ids: int) -> tasks_pb2.TaskInput:
    return tasks_pb2.TaskInput(item_id=item_id, token_ids=inputs_pb2.TokenIds(ids=ids or (1, 2)))


def group(group_id: str = "g", candidates: int = 2) -> tasks_pb2.ScoreGroup:
    return tasks_pb2.ScoreGroup(
        group_id=group_id, query=item("q"), candidates=[item(f"c{n}") for n in range(candidates)]
    )


def valid(task: str) -> Any:
    context = tasks_pb2.TaskRequestContext(request_id="r", model="fake-model")
    if task == "embed":
        return tasks_pb2.EmbedRequest(context=context, inputs=[item("a"), item("b")])
    if task == "classify":
        return tasks_pb2.ClassifyRequest(context=context, inputs=[item("a"), item("b")])
    return tasks_pb2.ScoreRequest(context=context, groups=[group("g"), group("h")])


def check(task: str, request: Any, about: EngineDescription = FULL) -> Any:
    return getattr(task_validation, f"check_{task}")(request, about)


def refused(task: str, change: Change, about: EngineDescription = FULL) -> Rejected:
    request = valid(task)
    change(request)
    with pytest.raises(Rejected) as caught:
        check(task, request, about)
    return caught.value


def set_input(**fields: Any) -> Change:
    """Replace the second input, or the second group's first candidate, keeping its id."""

    def change(request: Any) -> None:
        score = isinstance(request, tasks_pb2.ScoreRequest)
        target = request.groups[1].candidates[0] if score else request.inputs[1]
        target.CopyFrom(tasks_pb2.TaskInput(item_id=target.item_id, **fields))

    return change


def multimodal(**fields: Any) -> Change:
    return set_input(multimodal=tasks_pb2.MultimodalTaskInput(**fields))


PLACES = {"embed": "inputs[1]", "classify": "inputs[1]", "score": "groups[1].candidates[0]"}
EVERY_TASK = pytest.mark.parametrize("task", list(PLACES))


@EVERY_TASK
@pytest.mark.parametrize("about", [FULL, BARE])
def test_a_plain_request_passes(task: str, about: EngineDescription) -> None:
    """EMB-02: the options come back with the default granularity."""
    options = check(task, valid(task), about)
    assert options.granularity == SEQUENCE
    assert not valid(task).HasField("options")


@EVERY_TASK
@pytest.mark.parametrize(
    ("change", "code", "field"),
    [
        (lambda r: r.ClearField("context"), INVALID, "context"),
        (lambda r: r.context.ClearField("request_id"), INVALID, "context.request_id"),
        (lambda r: r.context.ClearField("model"), INVALID, "context.model"),
        (lambda r: setattr(r.context, "model", "other"), NOT_FOUND, "context.model"),
    ],
)
@pytest.mark.parametrize("about", [FULL, NO_TASKS])
def test_identity(task: str, change: Change, code: grpc.StatusCode, field: str, about: Any) -> None:
    """TASK-01, also before a task that is not served."""
    rejected = refused(task, change, about)
    assert (rejected.code, rejected.field) == (code, field)


@EVERY_TASK
def test_a_task_that_is_not_served(task: str) -> None:
    """TASK-02, whatever else is wrong."""
    for change in (lambda r: None, lambda r: r.ClearField("inputs" if task != "score" else "groups")):
        rejected = refused(task, change, NO_TASKS)
        assert (rejected.code, rejected.field) == (PRECONDITION, "context.model")


@EVERY_TASK
@pytest.mark.parametrize(
    ("change", "field"),
    [
        (set_input(), ""),
        (set_input(text=""), ".text"),
        (set_input(token_ids=inputs_pb2.TokenIds()), ".token_ids"),
        (set_input(token_ids=inputs_pb2.TokenIds(ids=[100])), ".token_ids"),
        (set_input(token_ids=inputs_pb2.TokenIds(ids=[1] * 65)), ".token_ids"),
        (multimodal(), ".multimodal.media"),
        (multimodal(text="a picture"), ".multimodal.media"),
        (multimodal(text="", media=[PIXELS]), ".multimodal.text"),
        (multimodal(token_ids=inputs_pb2.TokenIds(ids=[100]), media=[PIXELS]), ".multimodal.token_ids"),
        (multimodal(media=[inputs_pb2.MediaItem()]), ".multimodal.media[0]"),
        (
            multimodal(
                media=[PIXELS, inputs_pb2.MediaItem(modality=inputs_pb2.MODALITY_AUDIO, raw_bytes=b"x")]
            ),
            ".multimodal.media[1].modality",
        ),
    ],
)
def test_inputs(task: str, change: Change, field: str) -> None:
    """TASK-03, TASK-05, TASK-06, MEDIA-01, MEDIA-02."""
    rejected = refused(task, change)
    assert (rejected.code, rejected.field) == (INVALID, PLACES[task] + field)


@EVERY_TASK
def test_inputs_at_their_limits(task: str) -> None:
    for change in (
        set_input(text="x"),
        set_input(token_ids=inputs_pb2.TokenIds(ids=[99] * 64)),
        multimodal(media=[PIXELS]),
        multimodal(text="a picture", media=[PIXELS, PIXELS]),
    ):
        request = valid(task)
        change(request)
        check(task, request)


@EVERY_TASK
@pytest.mark.parametrize(
    ("change", "field"),
    [(set_input(text="x"), ".text"), (multimodal(media=[PIXELS]), ".multimodal")],
)
def test_inputs_that_are_not_advertised(task: str, change: Change, field: str) -> None:
    """MODEL-07, TASK-06."""
    rejected = refused(task, change, BARE)
    assert (rejected.code, rejected.field) == (INVALID, PLACES[task] + field)


@pytest.mark.parametrize("task", ["embed", "classify"])
@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda r: r.ClearField("inputs"), "inputs"),
        (lambda r: r.inputs[1].ClearField("item_id"), "inputs[1].item_id"),
        (lambda r: setattr(r.inputs[1], "item_id", "a"), "inputs[1].item_id"),
        (lambda r: r.inputs.extend(item(f"n{n}") for n in range(39)), "inputs"),
    ],
)
def test_batches(task: str, change: Change, field: str) -> None:
    """TASK-05, CAP-03."""
    rejected = refused(task, change)
    assert (rejected.code, rejected.field) == (INVALID, field)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda r: r.ClearField("groups"), "groups"),
        (lambda r: r.groups.extend([group("i"), group("j")]), "groups"),
        (lambda r: setattr(r.groups[1], "group_id", "g"), "groups[1].group_id"),
        (lambda r: r.groups[1].ClearField("query"), "groups[1].query"),
        (lambda r: r.groups[1].query.ClearField("item_id"), "groups[1].query.item_id"),
        (lambda r: r.groups[1].query.ClearField("token_ids"), "groups[1].query"),
        (lambda r: r.groups[1].ClearField("candidates"), "groups[1].candidates"),
        (lambda r: r.groups[1].candidates.extend(item(f"n{n}") for n in range(4)), "groups[1].candidates"),
        (lambda r: r.groups[1].candidates[1].ClearField("item_id"), "groups[1].candidates[1].item_id"),
        (lambda r: setattr(r.groups[1].candidates[1], "item_id", "c0"), "groups[1].candidates[1].item_id"),
        (lambda r: setattr(r.groups[1].candidates[1], "item_id", "q"), "groups[1].candidates[1].item_id"),
        (lambda r: r.options.label_token_ids.extend([3, 3]), "options.label_token_ids"),
        (lambda r: r.options.label_token_ids.extend([1, 2, 3]), "options.label_token_ids"),
        (lambda r: r.options.label_token_ids.append(100), "options.label_token_ids"),
        (
            lambda r: r.options.MergeFrom(
                tasks_pb2.ScoreOptions(normalization=SOFTMAX, output_semantics=LOGITS)
            ),
            "options.normalization",
        ),
    ],
)
def test_score_groups_and_labels(change: Change, field: str) -> None:
    """SCO-01 … SCO-03, CAP-03."""
    rejected = refused("score", change)
    assert (rejected.code, rejected.field) == (INVALID, field)


def test_batches_and_groups_at_their_limits() -> None:
    for task in ("embed", "classify"):
        request = valid(task)
        request.inputs.extend(item(f"n{n}") for n in range(38))
        check(task, request)
    request = valid("score")
    request.groups.append(group("", candidates=5))
    request.options.label_token_ids.extend([99, 0])
    request.options.normalization = SOFTMAX
    request.options.instruction = "Rank."
    assert list(check("score", request).label_token_ids) == [99, 0]


@EVERY_TASK
@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda r: setattr(r.context, "priority", 0), "context.priority"),
        (lambda r: setattr(r.context, "lora_name", "adapter"), "context.lora_name"),
        (lambda r: setattr(r.options, "granularity", TOKEN), "options.granularity"),
    ],
)
def test_options_that_are_not_advertised(task: str, change: Change, field: str) -> None:
    """TASK-10, EMB-02, MODEL-07."""
    rejected = refused(task, change, BARE)
    assert (rejected.code, rejected.field) == (INVALID, field)


@pytest.mark.parametrize(
    ("task", "change", "field"),
    [
        ("embed", lambda r: setattr(r.options, "normalize", False), "options.normalize"),
        ("embed", lambda r: setattr(r.options, "dimensions", 2), "options.dimensions"),
        ("embed", lambda r: setattr(r.options, "encoding", 2), "options.encoding"),
        ("classify", lambda r: setattr(r.options, "output_semantics", LOGITS), "options.output_semantics"),
        ("score", lambda r: setattr(r.options, "output_semantics", LOGITS), "options.output_semantics"),
        ("score", lambda r: setattr(r.options, "normalization", NONE), "options.normalization"),
        ("score", lambda r: setattr(r.options, "instruction", "x"), "options.instruction"),
        ("score", lambda r: r.options.label_token_ids.append(1), "options.label_token_ids"),
    ],
)
def test_task_options_that_are_not_advertised(task: str, change: Change, field: str) -> None:
    """EMB-02, CLS-02, SCO-03, SCO-04, MODEL-07."""
    rejected = refused(task, change, BARE)
    assert (rejected.code, rejected.field) == (INVALID, field)


def test_label_tokens_are_needed_where_there_is_no_other_scoring() -> None:
    about = description(score=dataclasses.replace(SUPPORT, native_scoring=False))
    rejected = refused("score", lambda r: None, about)
    assert (rejected.code, rejected.field) == (INVALID, "options.label_token_ids")


@pytest.mark.parametrize(("dimensions", "accepted"), [(0, False), (1, True), (4, True), (5, False)])
def test_dimensions(dimensions: int, accepted: bool) -> None:
    """EMB-04."""
    request = valid("embed")
    request.options.dimensions = dimensions
    if accepted:
        assert check("embed", request).dimensions == dimensions
    else:
        rejected = refused("embed", lambda r: r.CopyFrom(request))
        assert (rejected.code, rejected.field) == (INVALID, "options.dimensions")


@EVERY_TASK
@pytest.mark.parametrize("value", [0, 99])
def test_unspecified_and_unknown_are_no_choice(task: str, value: int) -> None:
    """DISC-12: they select the default, as absent does."""
    request = valid(task)
    other = "encoding" if task == "embed" else "output_semantics"
    for name in ["granularity", other] + (["normalization"] if task == "score" else []):
        setattr(request.options, name, value)
    options = check(task, request, BARE)
    assert options.granularity == SEQUENCE
    assert not options.HasField(other)
    if task == "score":
        assert options.normalization == tasks_pb2.SCORE_NORMALIZATION_UNSPECIFIED


def test_explicit_choices_are_kept() -> None:
    request = valid("embed")
    request.options.MergeFrom(tasks_pb2.EmbedOptions(granularity=TOKEN, normalize=False, encoding=DENSE))
    assert check("embed", request) == request.options


# ------------------------------------------------------------------------------------------ arbitrary requests

TEXTS = st.sampled_from(["", "a", "b", "fake-model", "r"])
NUMBERS = st.integers(0, 130)


def messages(kind: type[Message], depth: int = 0) -> st.SearchStrategy[Any]:
    """Any valid message of a kind, mostly small, with values that often come near to sense."""

    def value(field: Any) -> st.SearchStrategy[Any]:
        if field.message_type is not None:
            return messages(field.message_type._concrete_class, depth + 1)
        kinds = {
            field.CPPTYPE_STRING: TEXTS if field.type == field.TYPE_STRING else st.binary(max_size=3),
            field.CPPTYPE_BOOL: st.booleans(),
            field.CPPTYPE_ENUM: st.integers(0, 9),
        }
        return kinds.get(field.cpp_type, NUMBERS)

    fields = {}
    for field in kind.DESCRIPTOR.fields:
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            continue
        if depth > 4 and field.message_type is not None:
            continue
        fields[field.name] = st.lists(value(field), max_size=3) if field.is_repeated else value(field)
    return st.fixed_dictionaries({}, optional=fields).map(lambda values: kind(**values))


@pytest.mark.parametrize(
    ("task", "kind"),
    [
        ("embed", tasks_pb2.EmbedRequest),
        ("classify", tasks_pb2.ClassifyRequest),
        ("score", tasks_pb2.ScoreRequest),
    ],
)
@given(data=st.data())
@settings(max_examples=150)
def test_any_request_is_accepted_or_refused_by_name(task: str, kind: type[Message], data: Any) -> None:
    """ERR-05: no other end, whatever the message holds; and the message itself stays as it was."""
    request = data.draw(messages(kind))
    for part in ("context.request_id", "context.model"):
        if data.draw(st.booleans()):
            setattr(request.context, part.partition(".")[2], "fake-model")
    before = kind()
    before.CopyFrom(request)
    refusal: Rejected | None = None
    try:
        options = check(task, request, data.draw(st.sampled_from([FULL, BARE, NO_TASKS])))
        assert options.granularity
    except Rejected as rejected:
        refusal = rejected
    if refusal is not None:
        assert refusal.code in (INVALID, NOT_FOUND, PRECONDITION)
        assert refusal.field
        assert str(refusal).startswith(refusal.field)
    assert request == before
