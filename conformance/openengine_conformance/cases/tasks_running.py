# SPDX-License-Identifier: Apache-2.0
"""Tasks in flight: ids, priority, abort, cancellation, and calls beside each other."""

from __future__ import annotations

import asyncio
from typing import Any

from openengine.v1 import lifecycle_pb2
from openengine_conformance import needs, tasking
from openengine_conformance.case import case
from openengine_conformance.cases.tasks import reject
from openengine_conformance.checks import Code, Refused, expect, expect_equal, skip
from openengine_conformance.context import Context
from openengine_conformance.saturation import end_all, fill
from openengine_conformance.tasking import Task


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
            await reject(ctx, task, request, names="priority")


@case(
    "tasks.priority_order",
    "Of two waiting tasks the one with the larger priority is done first.",
    "TASK-10",
    needs=[needs.GENERATES, needs.PRIORITY, needs.ANY_TASK],
    exclusive=True,
    timeout=60,
)
async def priority_order(ctx: Context) -> None:
    """Fill every slot with generations, let a low and a high task wait, then free one slot."""
    if not (tasks := [t for t in tasking.supported(ctx) if t.capability(ctx.offer).supports_priority]):
        skip("no task advertises priority")
    if len(ctx.offer.ranks) > 1:
        skip("a task can't be pinned to one of several data-parallel ranks")
    for task in tasks:
        fillers = await fill(ctx, priority=100)
        waiting: list[asyncio.Future[Any]] = []
        done: list[asyncio.Future[Any]] = []
        try:
            for priority in (-5, 5):
                request = task.build(ctx, tasking.items(ctx, 1))
                request.context.priority = priority
                waiting.append(asyncio.ensure_future(tasking.run(ctx, task, request)))
                # Both may be done before this case is asked again, so that the order is noted as they come.
                waiting[-1].add_done_callback(done.append)
                await _queued(ctx, len(waiting))
            await ctx.abort(fillers[0].id)
            await asyncio.gather(*waiting)
            expect(done[0] is waiting[1], f"the {task.name} of the smaller priority was done first")
        finally:
            for call in waiting:
                call.cancel()
            await end_all(ctx, fillers)
            await asyncio.gather(*waiting, return_exceptions=True)


async def _queued(ctx: Context, count: int) -> None:
    async def waits() -> bool:
        return (await ctx.load()).queued_requests >= count

    await ctx.until(waits, f"queued_requests did not count {count} waiting tasks", "LOAD-01", within=5)


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
            await reject(ctx, task, request, Code.NOT_FOUND)
        else:
            await reject(ctx, task, request, names="lora")


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
        await reject(ctx, task, request, Code.ALREADY_EXISTS)
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
    """Abort all again and again until the call ends: from the third time on the server must have known it."""
    request = lifecycle_pb2.AbortRequest(all_requests=lifecycle_pb2.AllRequests())
    outlived = 0
    for task in [tasking.supported(ctx)[0]] * 3:
        call = asyncio.ensure_future(ctx.call(task.rpc(ctx), _large_batch(ctx, task)))
        aborts = 0
        try:
            while not call.done():
                await ctx.call(ctx.rpc.Abort, request)
                aborts += 1
            outcome = (await asyncio.gather(call, return_exceptions=True))[0]
        finally:
            call.cancel()
        if isinstance(outcome, Refused):
            expect_equal(outcome.code, Code.CANCELLED, f"the status of a {task.name} after all_requests")
            await ctx.until(ctx.idle, f"an aborted {task.name} still runs", within=2)
            return
        outlived += aborts >= 3
    if not outlived:
        skip("the tasks end too soon to be aborted")
    # One may end by itself before the abort is felt; all of them do not.
    expect(outlived < 3, f"{outlived} running tasks outlived aborts of all requests")


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
