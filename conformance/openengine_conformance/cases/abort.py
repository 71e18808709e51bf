# SPDX-License-Identifier: Apache-2.0
"""Abort: what it finds, what it ends, and what it must leave alone."""

from __future__ import annotations

import asyncio

from openengine.v1 import generate_pb2, kv_pb2, lifecycle_pb2
from openengine_conformance import needs
from openengine_conformance.case import case
from openengine_conformance.checks import Code, expect, expect_equal
from openengine_conformance.context import Context
from openengine_conformance.stream import Stream

Request = lifecycle_pb2.AbortRequest
ABORTED = lifecycle_pb2.ABORT_STATUS_ABORTED
ALREADY_FINISHED = lifecycle_pb2.ABORT_STATUS_ALREADY_FINISHED
CANCELLED = generate_pb2.FINISH_REASON_CANCELLED
FEW = 16
"""Tokens of other outputs that may be on their way while an abort ends one."""


@case("abort.no_target", "An Abort without a target is INVALID_ARGUMENT.", "ABORT-01")
async def no_target(ctx: Context) -> None:
    await ctx.refused(ctx.rpc.Abort, Request(), Code.INVALID_ARGUMENT, names="target|request_id")


@case("abort.unknown_request", "Aborting a request that never was is NOT_FOUND.", "ABORT-01")
async def unknown_request(ctx: Context) -> None:
    for name in (ctx.new_id(), ""):
        codes = [Code.NOT_FOUND] if name else [Code.NOT_FOUND, Code.INVALID_ARGUMENT]
        await ctx.refused(ctx.rpc.Abort, Request(request_id=name), *codes)


@case("abort.unknown_session", "Aborting a KV session that never was is NOT_FOUND.", "ABORT-01")
async def unknown_session(ctx: Context) -> None:
    session = kv_pb2.KvSessionRef(session_id=ctx.new_id(), transfer_backend="none")
    await ctx.refused(ctx.rpc.Abort, Request(kv_session=session), Code.NOT_FOUND)


@case(
    "abort.finished_request",
    "Aborting a finished request is OK, ALREADY_FINISHED, and again when repeated.",
    "ABORT-01",
    needs=[needs.GENERATES],
)
async def finished_request(ctx: Context) -> None:
    stream = await ctx.generate(ctx.request(max_tokens=1))
    for _ in range(3):
        expect_equal(
            await ctx.abort(stream.id), ALREADY_FINISHED, "the status of aborting a finished request"
        )


@case(
    "abort.running_request",
    "Aborting a running request is OK, ABORTED; its stream ends CANCELLED with usage, and then it is finished.",
    "ABORT-02",
    "STREAM-09",
    "STREAM-06",
    needs=[needs.GENERATES],
)
async def running_request(ctx: Context) -> None:
    stream = await ctx.started(ctx.endless())
    expect_equal(await ctx.abort(stream.id), ABORTED, "the status of aborting a running request")
    await _ends_cancelled(stream)
    expect_equal(await ctx.abort(stream.id), ALREADY_FINISHED, "the status of aborting it again", "ABORT-01")


@case(
    "abort.frees_slot",
    "An aborted request no longer runs in the engine.",
    "ABORT-02",
    "STREAM-11",
    needs=[needs.GENERATES],
    exclusive=True,
)
async def frees_slot(ctx: Context) -> None:
    stream = await ctx.started(ctx.endless())
    await ctx.abort(stream.id)
    await ctx.until(ctx.idle, "running_requests did not return to 0", within=1.5)
    await stream.rest()


@case(
    "abort.several_sequences",
    "Aborting a request ends all of its sequences, each CANCELLED, with usage on the last.",
    "ABORT-05",
    "STREAM-09",
    needs=[needs.GENERATES, needs.SEVERAL_SEQUENCES],
    exclusive=True,
)
async def several_sequences(ctx: Context) -> None:
    count = min(ctx.offer.max_sequences, 3)
    sampling = generate_pb2.SamplingParams(num_sequences=count)
    stream = ctx.open(ctx.endless(temperature=1.0, sampling=sampling))
    for index in range(count):
        await stream.wait_tokens(index=index)
    expect_equal(await ctx.abort(stream.id), ABORTED, "the status")
    await _ends_cancelled(stream)
    expect_equal(sorted(stream.outputs), list(range(count)), "the list of finished outputs")
    kinds = [response.WhichOneof("event") for response in stream.responses]
    later = kinds[kinds.index("finished") :].count("token")
    expect(later <= FEW, f"{later} more tokens came after the first output was aborted: the others ran on")
    await ctx.until(ctx.idle, "running_requests did not return to 0", within=1.5)


@case(
    "abort.whole_ids",
    "Ids are compared whole: aborting one leaves another that only begins or ends alike.",
    "ABORT-04",
    needs=[needs.GENERATES],
)
async def whole_ids(ctx: Context) -> None:
    short, longer, prefixed = ctx.endless(), ctx.endless(), ctx.endless()
    longer.request_id = f"{short.request_id}0"
    prefixed.request_id = f"0{short.request_id}"
    streams = [await ctx.started(request) for request in (short, longer, prefixed)]
    expect_equal(await ctx.abort(short.request_id), ABORTED, "the status")
    await _ends_cancelled(streams[0])
    for stream in streams[1:]:
        # Tokens may have been on their way already; only a request that runs can still be aborted.
        expect_equal(
            await ctx.abort(stream.id), ABORTED, f"the status of {stream.id} after {short.request_id}"
        )


@case(
    "abort.prefix_is_unknown",
    "The beginning of a running request's id names no request.",
    "ABORT-04",
    "ABORT-01",
    needs=[needs.GENERATES],
)
async def prefix_is_unknown(ctx: Context) -> None:
    stream = await ctx.started(ctx.endless())
    await ctx.refused(ctx.rpc.Abort, Request(request_id=stream.id[:-1]), Code.NOT_FOUND)
    await stream.wait_tokens(len(stream.first.records) + 2)


@case(
    "abort.all_requests",
    "all_requests ends every request that runs or waits.",
    "ABORT-03",
    needs=[needs.GENERATES],
    exclusive=True,
)
async def all_requests(ctx: Context) -> None:
    streams = [await ctx.started(ctx.endless()) for _ in range(3)]
    answer = await ctx.call(ctx.rpc.Abort, Request(all_requests=lifecycle_pb2.AllRequests()))
    expect_equal(answer.status, ABORTED, "the status")
    await asyncio.gather(*(_ends_cancelled(stream) for stream in streams))
    await ctx.until(ctx.idle, "running_requests did not return to 0", within=1.5)
    await ctx.still_serves()


@case(
    "abort.all_of_none",
    "all_requests with nothing in flight is OK.",
    "ABORT-03",
    "ABORT-01",
    exclusive=True,
)
async def all_of_none(ctx: Context) -> None:
    await ctx.call(ctx.rpc.Abort, Request(all_requests=lifecycle_pb2.AllRequests()))


@case(
    "abort.before_first_token",
    "A request may be aborted before its first token; its stream ends like any aborted one.",
    "ABORT-02",
    needs=[needs.GENERATES],
)
async def before_first_token(ctx: Context) -> None:
    stream = ctx.open(ctx.endless(ctx.unique_prompt(64)))
    await stream.accepted()
    expect_equal(await ctx.abort(stream.id), ABORTED, "the status")
    await _ends_cancelled(stream)


async def _ends_cancelled(stream: Stream) -> None:
    await stream.rest()
    count = stream.request.sampling.num_sequences or 1
    for index in range(count):
        output = stream.outputs.get(index)
        finished = output.finished if output else None
        if finished is None:
            expect(False, f"output {index} of the aborted request has no GenerationFinished", "ABORT-02")
        else:
            expect_equal(
                finished.reason, CANCELLED, f"the finish reason of aborted output {index}", "STREAM-09"
            )
    expect(stream.usage is not None, "the aborted stream has no usage", "STREAM-06")
