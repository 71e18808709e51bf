# SPDX-License-Identifier: Apache-2.0
"""What Embed, Classify and Score have in common."""

from __future__ import annotations

import asyncio
from typing import Any

from openengine.v1 import inputs_pb2, lifecycle_pb2, tasks_pb2
from openengine_conformance import needs, tasking
from openengine_conformance.case import case
from openengine_conformance.checks import Code, Refused, expect, expect_equal, skip
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


async def _reject(ctx: Context, task: Task, request: object, *codes: Code, names: str = "") -> None:
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


@case("tasks.no_context", "A task without a context is INVALID_ARGUMENT.", "TASK-01", needs=[needs.ANY_TASK])
async def no_context(ctx: Context) -> None:
    for task in tasking.supported(ctx):
        request = task.build(ctx, tasking.items(ctx, 1))
        request.ClearField("context")
        await _reject(ctx, task, request, names="context|request_id")


@case("tasks.no_id", "A task without a request_id is INVALID_ARGUMENT.", "TASK-01", needs=[needs.ANY_TASK])
async def no_id(ctx: Context) -> None:
    for task in tasking.supported(ctx):
        request = task.build(ctx, tasking.items(ctx, 1))
        request.context.request_id = ""
        await _reject(ctx, task, request, names="request_id")


@case("tasks.no_model", "A task without a model is INVALID_ARGUMENT.", "TASK-01", needs=[needs.ANY_TASK])
async def no_model(ctx: Context) -> None:
    for task in tasking.supported(ctx):
        request = task.build(ctx, tasking.items(ctx, 1))
        request.context.model = ""
        await _reject(ctx, task, request, names="model")


@case("tasks.unknown_model", "A task for an unknown model is NOT_FOUND.", "TASK-01", needs=[needs.ANY_TASK])
async def unknown_model(ctx: Context) -> None:
    for task in tasking.supported(ctx):
        request = task.build(ctx, tasking.items(ctx, 1))
        request.context.model = "no-such-model"
        await _reject(ctx, task, request, Code.NOT_FOUND)


@case("tasks.empty_batch", "An empty batch is INVALID_ARGUMENT.", "TASK-05", needs=[needs.ANY_TASK])
async def empty_batch(ctx: Context) -> None:
    for task in tasking.supported(ctx):
        await _reject(ctx, task, task.build(ctx, []), names="inputs|candidates")


@case(
    "tasks.no_item_id", "An input without an item_id is INVALID_ARGUMENT.", "TASK-05", needs=[needs.ANY_TASK]
)
async def no_item_id(ctx: Context) -> None:
    for task in tasking.supported(ctx):
        await _reject(
            ctx, task, task.build(ctx, [tasking.item(ctx, "a"), tasking.item(ctx, "")]), names="item_id"
        )


@case("tasks.repeated_item_id", "A repeated item_id is INVALID_ARGUMENT.", "TASK-05", needs=[needs.ANY_TASK])
async def repeated_item_id(ctx: Context) -> None:
    for task in tasking.supported(ctx):
        batch = [tasking.item(ctx, "a", 0), tasking.item(ctx, "b", 1), tasking.item(ctx, "a", 2)]
        await _reject(ctx, task, task.build(ctx, batch), names="item_id")


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
        await _reject(ctx, task, task.build(ctx, batch), names="input|candidates")


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
            await _reject(ctx, task, task.build(ctx, batch))
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
            await _reject(ctx, task, task.build(ctx, [tasking.item(ctx, "a"), bad]))


@case(
    "tasks.media",
    "Multimodal input without media, or on a task that takes none, is INVALID_ARGUMENT.",
    "TASK-06",
    needs=[needs.ANY_TASK],
)
async def media(ctx: Context) -> None:
    for task in tasking.supported(ctx):
        empty = tasks_pb2.TaskInput(item_id="m", multimodal=tasks_pb2.MultimodalTaskInput(text="a picture"))
        await _reject(ctx, task, task.build(ctx, [empty]))
        bad = inputs_pb2.MediaItem(modality=inputs_pb2.MODALITY_IMAGE, raw_bytes=b"no image")
        undecodable = tasks_pb2.MultimodalTaskInput(text="a picture", media=[bad])
        await _reject(ctx, task, task.build(ctx, [tasks_pb2.TaskInput(item_id="m", multimodal=undecodable)]))


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
            await _reject(ctx, task, task.build(ctx, [tasks_pb2.TaskInput(item_id="a", text="some words")]))
        if tasking.TOKEN_IDS not in types:
            await _reject(ctx, task, task.build(ctx, [tasking.ids_item("a", [40, 41])]))
        tried = tried or tasking.TEXT not in types or tasking.TOKEN_IDS not in types
    if not tried:
        skip("text and token ids are both advertised")


@case(
    "tasks.priority",
    "priority is served where a task advertises it, and rejected by name elsewhere.",
    "TASK-10",
    needs=[needs.ANY_TASK],
)
async def priority(ctx: Context) -> None:
    for task in tasking.supported(ctx):
        request = task.build(ctx, tasking.items(ctx, 1))
        request.context.priority = 3
        if task.capability(ctx.offer).supports_priority:
            await tasking.run(ctx, task, request)
        else:
            await _reject(ctx, task, request, names="priority")


@case(
    "tasks.lora_name",
    "lora_name is rejected by name where a task does not advertise it; where it does, an unknown one is NOT_FOUND.",
    "TASK-10",
    "LORA-07",
    needs=[needs.ANY_TASK],
)
async def lora_name(ctx: Context) -> None:
    for task in tasking.supported(ctx):
        request = task.build(ctx, tasking.items(ctx, 1))
        request.context.lora_name = "no-such-adapter"
        if task.capability(ctx.offer).supports_lora:
            await _reject(ctx, task, request, Code.NOT_FOUND)
        else:
            await _reject(ctx, task, request, names="lora")


@case(
    "tasks.shared_ids",
    "An id that a generation holds is ALREADY_EXISTS for a task.",
    "TASK-07",
    needs=[needs.GENERATES, needs.ANY_TASK],
)
async def shared_ids(ctx: Context) -> None:
    running = await ctx.started(ctx.endless())
    for task in tasking.supported(ctx):
        request = task.build(ctx, tasking.items(ctx, 1))
        request.context.request_id = running.id
        await _reject(ctx, task, request, Code.ALREADY_EXISTS)
    await running.wait_tokens(len(running.first.records) + 2)


@case(
    "tasks.finished_id",
    "A finished task is ALREADY_FINISHED to Abort, and its id is free again.",
    "TASK-08",
    "ABORT-01",
    needs=[needs.ANY_TASK],
)
async def finished_id(ctx: Context) -> None:
    for task in tasking.supported(ctx):
        request = task.build(ctx, tasking.items(ctx, 1))
        await tasking.run(ctx, task, request)
        status = await ctx.abort(request.context.request_id)
        expect_equal(
            status, lifecycle_pb2.ABORT_STATUS_ALREADY_FINISHED, f"the status for a finished {task.name}"
        )
        await tasking.run(ctx, task, request)


@case(
    "tasks.abort",
    "Abort stops a running task, whose call then ends CANCELLED.",
    "TASK-08",
    "ABORT-03",
    needs=[needs.ANY_TASK],
    exclusive=True,
)
async def abort(ctx: Context) -> None:
    caught = False
    for task in tasking.supported(ctx):
        request = _large_batch(ctx, task)
        call = asyncio.ensure_future(ctx.call(task.rpc(ctx), request))
        try:
            await _abort_once_running(ctx, request.context.request_id, call)
            outcome = (await asyncio.gather(call, return_exceptions=True))[0]
        finally:
            call.cancel()
        if isinstance(outcome, Refused):
            caught = True
            expect_equal(outcome.code, Code.CANCELLED, f"the status of an aborted {task.name}")
            await ctx.until(ctx.idle, f"an aborted {task.name} still runs", "TASK-09", within=2)
    if not caught:
        skip("the tasks end too soon to be aborted")


async def _abort_once_running(ctx: Context, request_id: str, call: asyncio.Future[Any]) -> None:
    """Abort until the server knows the request; each try is a round trip that gives the call time to arrive."""
    while not call.done():
        try:
            await ctx.abort(request_id)
        except Refused as refused:
            expect_equal(refused.code, Code.NOT_FOUND, "the status of aborting a task that has not begun")
        else:
            return


@case(
    "tasks.abort_all",
    "all_requests ends running tasks as well as generations.",
    "ABORT-03",
    "TASK-08",
    needs=[needs.ANY_TASK],
    exclusive=True,
)
async def abort_all(ctx: Context) -> None:
    request = lifecycle_pb2.AbortRequest(all_requests=lifecycle_pb2.AllRequests())
    task = tasking.supported(ctx)[0]
    outlived = 0
    for _ in range(3):
        batch = _large_batch(ctx, task)
        call = asyncio.ensure_future(ctx.call(task.rpc(ctx), batch))
        try:
            if not await _seen_running(ctx, call):
                continue
            await ctx.call(ctx.rpc.Abort, request)
            outcome = (await asyncio.gather(call, return_exceptions=True))[0]
        finally:
            call.cancel()
        if isinstance(outcome, Refused):
            expect_equal(outcome.code, Code.CANCELLED, f"the status of a {task.name} after all_requests")
            await ctx.until(ctx.idle, f"an aborted {task.name} still runs", within=2)
            return
        outlived += 1
    if not outlived:
        skip("the tasks end too soon to be aborted")
    # One may end by itself just before the abort; all of them do not.
    expect(outlived < 3, f"{outlived} running {task.name} calls outlived all_requests")


async def _seen_running(ctx: Context, call: asyncio.Future[Any]) -> bool:
    """Whether the server's load showed the call before it was over."""
    while not call.done():
        if not await ctx.idle():
            return True
    return False


@case(
    "tasks.cancel",
    "A task whose client goes away, or whose deadline expires, stops in the engine.",
    "TASK-09",
    needs=[needs.ANY_TASK],
    exclusive=True,
)
async def cancel(ctx: Context) -> None:
    for task in tasking.supported(ctx):
        for deadline in (0.005, 0.05):
            try:
                await ctx.call(task.rpc(ctx), _large_batch(ctx, task), timeout=deadline)
            except Refused as refused:
                expect_equal(refused.code, Code.DEADLINE_EXCEEDED, "the status")
            await ctx.until(ctx.idle, f"{task.name} still runs after its deadline", within=2)
        await tasking.run(ctx, task, task.build(ctx, tasking.items(ctx, 1)))


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
            await _reject(ctx, task, task.build(ctx, tasking.items(ctx, limit + 1, words=1)), *codes)
    if not tried:
        skip("no limit is reported, or it is too large to try")


@case(
    "tasks.concurrent",
    "Calls that run at the same time don't mix.",
    "TASK-14",
    needs=[needs.ANY_TASK],
)
async def concurrent(ctx: Context) -> None:
    for task in tasking.supported(ctx):
        requests = [task.build(ctx, tasking.items(ctx, 1 + number)) for number in range(4)]
        answers = await asyncio.gather(*(tasking.run(ctx, task, request) for request in requests))
        sizes = [len(tasking.tensors(answer)) for answer in answers]
        expect_equal(sizes, [1, 2, 3, 4], f"{task.name}'s numbers of outputs")


def _large_batch(ctx: Context, task: Task) -> Any:
    capability = task.capability(ctx.offer)
    limit = capability.max_candidates_per_group if task is tasking.SCORE else capability.max_batch_size
    request = task.build(ctx, tasking.items(ctx, min(limit or 64, 64), words=60))
    if task is tasking.SCORE and capability.supports_label_token_scoring:
        request.options.label_token_ids.extend([40, 41])
    return request
