# SPDX-License-Identifier: Apache-2.0
"""What Embed, Classify and Score have in common."""

from __future__ import annotations

from openengine.v1 import inputs_pb2, tasks_pb2
from openengine_conformance import needs, tasking
from openengine_conformance.case import case
from openengine_conformance.checks import Code, expect, expect_equal, skip
from openengine_conformance.context import Context
from openengine_conformance.tasking import TASKS, Task

SAME = 0.02
"""How far apart, relatively, the same input may come out alone and in a batch in low precision."""

LARGEST_BATCH = 2048
LISTS = ("input_types", "granularities", "encodings", "semantics", "normalizations", "modalities")
LIMITS = (
    *("dimension", "max_batch_size", "max_output_values_per_item", "max_groups", "max_candidates_per_group"),
    *("max_output_values_per_candidate", "max_label_token_ids"),
)


async def reject(ctx: Context, task: Task, request: object, *codes: Code, names: str = "") -> None:
    """Require that a task call is refused, by default with INVALID_ARGUMENT."""
    if isinstance(request, tasks_pb2.ScoreRequest):
        await tasking.choose_scoring(ctx, request)
    await ctx.refused(task.rpc(ctx), request, *(codes or (Code.INVALID_ARGUMENT,)), names=names)


@case("tasks.unsupported", "A task that the model does not have is FAILED_PRECONDITION.", "TASK-02", "CAP-01")
async def unsupported(ctx: Context) -> None:
    missing = [task for task in TASKS if not task.supported(ctx.offer)]
    if not missing:
        skip("the model has every task")
    for task in missing:
        request = task.build(ctx, tasking.items(ctx, 1))
        await ctx.refused(task.rpc(ctx), request, Code.FAILED_PRECONDITION)


@case(
    "tasks.capabilities",
    "A task's capabilities say whether it is supported, list no UNSPECIFIED, and report limits above 0.",
    "CAP-01",
    "CAP-02",
    "MODEL-07",
)
async def capabilities(ctx: Context) -> None:
    for task in TASKS:
        capability = task.capability(ctx.offer)
        if not ctx.offer.info.tasks.HasField(task.name.lower()):  # type: ignore[arg-type]  # the names are fields
            continue
        expect(
            capability.HasField("supported"),
            f"{task.name} is present and does not say whether it is supported",
        )
        fields = capability.DESCRIPTOR.fields_by_name
        for name in (name for name in LISTS if name in fields):
            expect(0 not in getattr(capability, name), f"{task.name}.{name} lists UNSPECIFIED", "CAP-02")
        for name in (name for name in LIMITS if name in fields and capability.HasField(name)):
            expect(getattr(capability, name) > 0, f"{task.name}.{name} is 0", "CAP-02")
        if not capability.supported:
            continue
        expect(capability.input_types, f"{task.name} is supported and lists no input type", "CAP-02")
        multimodal = tasks_pb2.TASK_INPUT_TYPE_MULTIMODAL in capability.input_types
        expect(
            multimodal or not capability.modalities,
            f"{task.name} lists modalities without MULTIMODAL",
            "CAP-02",
        )
        expect(
            ctx.offer.info.supports_multimodal or not capability.modalities,
            f"{task.name} lists modalities and the model says that it takes none",
            "MODEL-07",
        )


@case("tasks.no_context", "A task without a context is INVALID_ARGUMENT.", "TASK-01", needs=[needs.ANY_TASK])
async def no_context(ctx: Context) -> None:
    for task in tasking.supported(ctx):
        request = task.build(ctx, tasking.items(ctx, 1))
        request.ClearField("context")
        await reject(ctx, task, request, names="context|request_id")


@case("tasks.no_id", "A task without a request_id is INVALID_ARGUMENT.", "TASK-01", needs=[needs.ANY_TASK])
async def no_id(ctx: Context) -> None:
    for task in tasking.supported(ctx):
        request = task.build(ctx, tasking.items(ctx, 1))
        request.context.request_id = ""
        await reject(ctx, task, request, names="request_id")


@case("tasks.no_model", "A task without a model is INVALID_ARGUMENT.", "TASK-01", needs=[needs.ANY_TASK])
async def no_model(ctx: Context) -> None:
    for task in tasking.supported(ctx):
        request = task.build(ctx, tasking.items(ctx, 1))
        request.context.model = ""
        await reject(ctx, task, request, names="model")


@case("tasks.unknown_model", "A task for an unknown model is NOT_FOUND.", "TASK-01", needs=[needs.ANY_TASK])
async def unknown_model(ctx: Context) -> None:
    for task in tasking.supported(ctx):
        request = task.build(ctx, tasking.items(ctx, 1))
        request.context.model = "no-such-model"
        await reject(ctx, task, request, Code.NOT_FOUND)


@case("tasks.empty_batch", "An empty batch is INVALID_ARGUMENT.", "TASK-05", needs=[needs.ANY_TASK])
async def empty_batch(ctx: Context) -> None:
    for task in tasking.supported(ctx):
        await reject(ctx, task, task.build(ctx, []), names="inputs|candidates")


@case(
    "tasks.no_item_id", "An input without an item_id is INVALID_ARGUMENT.", "TASK-05", needs=[needs.ANY_TASK]
)
async def no_item_id(ctx: Context) -> None:
    for task in tasking.supported(ctx):
        await reject(
            ctx, task, task.build(ctx, [tasking.item(ctx, "a"), tasking.item(ctx, "")]), names="item_id"
        )


@case("tasks.repeated_item_id", "A repeated item_id is INVALID_ARGUMENT.", "TASK-05", needs=[needs.ANY_TASK])
async def repeated_item_id(ctx: Context) -> None:
    for task in tasking.supported(ctx):
        batch = [tasking.item(ctx, "a", 0), tasking.item(ctx, "b", 1), tasking.item(ctx, "a", 2)]
        await reject(ctx, task, task.build(ctx, batch), names="item_id")


@case(
    "tasks.no_input",
    "An input with no variant set is INVALID_ARGUMENT.",
    "TASK-05",
    "TASK-15",
    needs=[needs.ANY_TASK],
)
async def no_input(ctx: Context) -> None:
    for task in tasking.supported(ctx):
        batch = [*tasking.items(ctx, 2), tasks_pb2.TaskInput(item_id="empty")]
        await reject(ctx, task, task.build(ctx, batch), names="input|candidates")


@case(
    "tasks.bad_token_ids",
    "Token ids that are none, or outside the vocabulary, are INVALID_ARGUMENT and fail the whole call.",
    "TASK-03",
    "TASK-15",
    "GEN-10",
    needs=[needs.ANY_TASK],
)
async def bad_token_ids(ctx: Context) -> None:
    for task in tasking.supported(ctx):
        if tasking.TOKEN_IDS not in task.capability(ctx.offer).input_types:
            continue
        for ids in ([], [40, 2**32 - 1]):
            batch = [*tasking.items(ctx, 2), tasking.ids_item("bad", ids)]
            await reject(ctx, task, task.build(ctx, batch))
        await tasking.run(ctx, task, task.build(ctx, tasking.items(ctx, 1)))


@case(
    "tasks.too_long",
    "An input that is longer than the context is INVALID_ARGUMENT and fails the whole call.",
    "TASK-03",
    "TASK-15",
    needs=[needs.ANY_TASK, needs.CONTEXT_LENGTH],
)
async def too_long(ctx: Context) -> None:
    longest = ctx.offer.info.max_context_length
    if longest > 100_000:
        skip(f"an input of {longest} tokens is too long to send")
    for task in tasking.supported(ctx):
        if tasking.TOKEN_IDS in task.capability(ctx.offer).input_types:
            bad = tasking.ids_item("long", [40] * (longest + 1))
            await reject(ctx, task, task.build(ctx, [tasking.item(ctx, "a"), bad]))


@case(
    "tasks.media",
    "Multimodal input without media, or on a task that takes none, is INVALID_ARGUMENT.",
    "TASK-06",
    needs=[needs.ANY_TASK],
)
async def media(ctx: Context) -> None:
    for task in tasking.supported(ctx):
        empty = tasks_pb2.TaskInput(item_id="m", multimodal=tasks_pb2.MultimodalTaskInput(text="a picture"))
        await reject(ctx, task, task.build(ctx, [empty]))
        bad = inputs_pb2.MediaItem(modality=inputs_pb2.MODALITY_IMAGE, raw_bytes=b"no image")
        undecodable = tasks_pb2.MultimodalTaskInput(text="a picture", media=[bad])
        await reject(ctx, task, task.build(ctx, [tasks_pb2.TaskInput(item_id="m", multimodal=undecodable)]))


@case(
    "tasks.input_types_unadvertised",
    "An input type that a task does not advertise is INVALID_ARGUMENT.",
    "TASK-03",
    "MODEL-07",
    needs=[needs.ANY_TASK],
)
async def input_types_unadvertised(ctx: Context) -> None:
    tried = False
    for task in tasking.supported(ctx):
        types = task.capability(ctx.offer).input_types
        if tasking.TEXT not in types:
            await reject(ctx, task, task.build(ctx, [tasks_pb2.TaskInput(item_id="a", text="some words")]))
        if tasking.TOKEN_IDS not in types:
            await reject(ctx, task, task.build(ctx, [tasking.ids_item("a", [40, 41])]))
        tried = tried or tasking.TEXT not in types or tasking.TOKEN_IDS not in types
    if not tried:
        skip("text and token ids are both advertised")


@case(
    "tasks.tensors",
    "Shapes fit their values, all finite; a sparse tensor's indices strictly increase.",
    "TASK-11",
    "TASK-12",
    needs=[needs.ANY_TASK],
)
async def check_tensors(ctx: Context) -> None:
    for task in tasking.supported(ctx):
        for tensor in tasking.tensors(await tasking.run(ctx, task, task.build(ctx, tasking.items(ctx, 3)))):
            tasking.check_tensor(tensor)


@case(
    "tasks.order",
    "Outputs keep request order, one for each input, with ids and indexes, zero included.",
    "TASK-14",
    needs=[needs.ANY_TASK],
)
async def order(ctx: Context) -> None:
    names = ["z", "a", "m", "b"]
    for task in tasking.supported(ctx):
        batch = [tasking.item(ctx, name, number) for number, name in enumerate(names)]
        answer = await tasking.run(ctx, task, task.build(ctx, batch))
        if task is tasking.SCORE:
            outputs = answer.groups[0].candidates
            indexes = [(o.candidate_id, o.candidate_index, o.HasField("candidate_index")) for o in outputs]
        else:
            indexes = [(o.item_id, o.input_index, o.HasField("input_index")) for o in answer.outputs]
        expected = [(name, number, True) for number, name in enumerate(names)]
        expect_equal(indexes, expected, f"{task.name}'s list of (id, index, index present)")


@case(
    "tasks.batch_is_sum_of_items",
    "A batch gives each input what it gets alone, and its input_tokens are their sum.",
    "TASK-13",
    "TASK-14",
    needs=[needs.ANY_TASK],
    exclusive=True,
)
async def batch_is_sum_of_items(ctx: Context) -> None:
    for task in tasking.supported(ctx):
        batch = tasking.items(ctx, 3)
        together = await tasking.run(ctx, task, task.build(ctx, batch))
        alone = [await tasking.run(ctx, task, task.build(ctx, [one])) for one in batch]
        for number, answer in enumerate(alone):
            one, other = tasking.tensors(answer)[0].values, tasking.tensors(together)[number].values
            expect_equal(
                len(other), len(one), f"{task.name}'s number of values for input {number}", "TASK-14"
            )
            apart = tasking.distance(one, other)
            expect(
                apart < SAME, f"{task.name} gives input {number} other values in a batch ({apart:.3f} apart)"
            )
        if task is not tasking.SCORE:  # an engine may count the query once or for each candidate
            total = sum(answer.usage.input_tokens for answer in alone)
            expect_equal(together.usage.input_tokens, total, f"{task.name}'s input_tokens of the batch")


@case(
    "tasks.inputs_differ",
    "Different inputs give different values, the same input the same.",
    "TASK-14",
    needs=[needs.ANY_TASK],
    exclusive=True,
)
async def inputs_differ(ctx: Context) -> None:
    for task in tasking.supported(ctx):
        batch = [tasking.item(ctx, "a", 0), tasking.item(ctx, "b", 4, words=9), tasking.item(ctx, "c", 0)]
        one, other, same = [
            t.values for t in tasking.tensors(await tasking.run(ctx, task, task.build(ctx, batch)))
        ]
        expect(list(one) != list(other), f"{task.name} gives two different inputs the same values")
        expect(tasking.distance(one, same) < SAME, f"{task.name} gives the same input different values")


@case(
    "tasks.batch_limit",
    "A batch above the reported limit is rejected.",
    "CAP-03",
    needs=[needs.ANY_TASK],
)
async def batch_limit(ctx: Context) -> None:
    tried = False
    for task in tasking.supported(ctx):
        capability = task.capability(ctx.offer)
        name = "max_candidates_per_group" if task is tasking.SCORE else "max_batch_size"
        limit = getattr(capability, name) if capability.HasField(name) else 0
        if 0 < limit <= LARGEST_BATCH:
            tried = True
            codes = (Code.INVALID_ARGUMENT, Code.RESOURCE_EXHAUSTED)
            await reject(ctx, task, task.build(ctx, tasking.items(ctx, limit + 1, words=1)), *codes)
    if not tried:
        skip("no limit is reported, or it is too large to try")
