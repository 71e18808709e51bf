# SPDX-License-Identifier: Apache-2.0
"""Drain. Most cases drain without stopping the server; those that stop it for good want `--include-drain`."""

from __future__ import annotations

import asyncio

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from openengine.v1 import discovery_pb2, errors_pb2, generate_pb2, lifecycle_pb2
from openengine_conformance import needs
from openengine_conformance.case import case
from openengine_conformance.checks import Code, Failure, expect, expect_equal, expect_in
from openengine_conformance.context import Context
from openengine_conformance.stream_rules import error_violations
from openengine_conformance.subscription import Subscription

Request = lifecycle_pb2.DrainRequest
Response = lifecycle_pb2.DrainResponse
STARTED = lifecycle_pb2.DRAIN_STATE_STARTED
IN_PROGRESS = lifecycle_pb2.DRAIN_STATE_IN_PROGRESS
COMPLETE = lifecycle_pb2.DRAIN_STATE_COMPLETE
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE = "openengine.v1.OpenEngine"


def _drain(ctx: Context, **fields: object) -> Subscription[lifecycle_pb2.DrainResponse]:
    return ctx.subscribe(ctx.rpc.Drain, Request(**fields))  # type: ignore[arg-type]  # the names are fields


async def _started(drain: Subscription[lifecycle_pb2.DrainResponse]) -> lifecycle_pb2.DrainResponse:
    first = await drain.next(within=5)
    if first is None:
        raise Failure("the drain ended without STARTED")
    expect_equal(first.state, STARTED, "the first event of a drain", "DRAIN-01")
    expect(first.HasField("in_flight_requests"), "STARTED does not count in_flight_requests", "DRAIN-01")
    return first


async def _to_the_end(drain: Subscription[lifecycle_pb2.DrainResponse]) -> lifecycle_pb2.DrainResponse:
    """Read the drain to its end and return the terminal event."""
    last = drain.responses[-1] if drain.responses else None
    while (response := await drain.next(within=15)) is not None:
        terminal = last is not None and (last.HasField("error") or last.state == COMPLETE)
        expect(not terminal, "an event follows the terminal one", "DRAIN-01")
        last = response
    expect_equal(drain.status, Code.OK, "the status of an accepted drain", "ERR-01")
    states = [response.state for response in drain.responses if response.HasField("state")]
    expect(STARTED not in states[1:], "STARTED comes twice", "DRAIN-01")
    expect(0 not in states, "a state is UNSPECIFIED", "DRAIN-01")
    if last is None:
        raise Failure("the drain ended without an event")
    return last


def _expect_complete(last: lifecycle_pb2.DrainResponse) -> None:
    expect_equal(last.state, COMPLETE, "the terminal event of the drain", "DRAIN-01")
    expect(last.HasField("in_flight_requests"), "COMPLETE does not count in_flight_requests", "DRAIN-01")
    expect_equal(last.in_flight_requests, 0, "in_flight_requests at COMPLETE", "DRAIN-01")
    expect_equal(last.open_kv_sessions, 0, "open_kv_sessions at COMPLETE", "DRAIN-01")


@case(
    "drain.idle",
    "A drain of an idle server is STARTED, then COMPLETE, with zero counts present.",
    "DRAIN-01",
    exclusive=True,
)
async def idle(ctx: Context) -> None:
    await ctx.until(ctx.idle, "running_requests is not 0 on an idle server", "LOAD-01", within=3)
    drain = _drain(ctx)
    first = await _started(drain)
    expect_equal(first.in_flight_requests, 0, "in_flight_requests at STARTED")
    _expect_complete(await _to_the_end(drain))


@case(
    "drain.waits",
    "A drain counts what is in flight, is IN_PROGRESS while it runs, and COMPLETE when it has ended.",
    "DRAIN-01",
    "DRAIN-03",
    needs=[needs.GENERATES],
    exclusive=True,
)
async def waits(ctx: Context) -> None:
    running = await ctx.started(ctx.endless())
    drain = _drain(ctx)
    first = await _started(drain)
    expect_equal(first.in_flight_requests, 1, "in_flight_requests at STARTED")
    progress = await drain.next(within=10)
    if progress is None:
        raise Failure("the drain ended while a request was in flight")
    expect_equal(progress.state, IN_PROGRESS, "the event while a request is in flight")
    expect_equal(progress.in_flight_requests, 1, "in_flight_requests at IN_PROGRESS")
    await ctx.abort(running.id)
    await running.rest()
    _expect_complete(await _to_the_end(drain))


@case(
    "drain.still_accepts",
    "Without stop_accepting_new_requests new work is served, does not prolong the drain, and Health stays READY.",
    "DRAIN-02",
    needs=[needs.GENERATES],
    exclusive=True,
)
async def still_accepts(ctx: Context) -> None:
    before = await ctx.started(ctx.endless())
    drain = _drain(ctx, stop_accepting_new_requests=False)
    await _started(drain)
    health = await ctx.call(ctx.rpc.Health, lifecycle_pb2.HealthRequest())
    expect_equal(health.state, lifecycle_pb2.HEALTH_STATE_READY, "Health during such a drain")
    after = await ctx.started(ctx.endless())
    await ctx.abort(before.id)
    await before.rest()
    _expect_complete(await _to_the_end(drain))
    await after.wait_tokens(len(after.first.records) + 2)


@case(
    "drain.deadline_without_abort",
    "A deadline that passes without abort_after_deadline ends the drain with one EngineError; requests go on.",
    "DRAIN-03",
    "ERR-01",
    needs=[needs.GENERATES],
    exclusive=True,
)
async def deadline_without_abort(ctx: Context) -> None:
    running = await ctx.started(ctx.endless())
    for deadline in (0, 300):
        drain = _drain(ctx, deadline_ms=deadline)
        await _started(drain)
        last = await _to_the_end(drain)
        expect(last.HasField("error"), f"the drain with deadline {deadline} ms ended with {last}")
        for violation in error_violations(last.error):
            expect(False, f"the terminal event {violation.problem}", violation.rule)
        expect(last.error.code != errors_pb2.ERROR_CODE_INTERNAL, "the EngineError is INTERNAL")
    await running.wait_tokens(len(running.first.records) + 2)


@case(
    "drain.deadline_with_abort",
    "A deadline that passes with abort_after_deadline aborts the rest, whose streams end CANCELLED, and completes.",
    "DRAIN-03",
    needs=[needs.GENERATES],
    exclusive=True,
)
async def deadline_with_abort(ctx: Context) -> None:
    for deadline in (0, 300):
        running = await ctx.started(ctx.endless())
        drain = _drain(ctx, deadline_ms=deadline, abort_after_deadline=True)
        await _started(drain)
        _expect_complete(await _to_the_end(drain))
        await running.rest()
        expect_equal(running.finish.reason, generate_pb2.FINISH_REASON_CANCELLED, "the finish reason")
    await ctx.still_serves()


@case(
    "drain.two_at_once",
    "Two concurrent drains both see the progress and the end.",
    "DRAIN-04",
    needs=[needs.GENERATES],
    exclusive=True,
)
async def two_at_once(ctx: Context) -> None:
    running = await ctx.started(ctx.endless())
    drains = [_drain(ctx), _drain(ctx)]
    for drain in drains:
        await _started(drain)
    await ctx.abort(running.id)
    await running.rest()
    for drain in drains:
        _expect_complete(await _to_the_end(drain))


@case(
    "drain.cancelled_call",
    "Cancelling a Drain call that stops nothing leaves the server serving.",
    "DRAIN-04",
    needs=[needs.GENERATES],
    exclusive=True,
)
async def cancelled_call(ctx: Context) -> None:
    running = await ctx.started(ctx.endless())
    drain = _drain(ctx)
    await _started(drain)
    await drain.close()
    await running.wait_tokens(len(running.first.records) + 2)
    await ctx.still_serves()


class GrpcWatch:
    """What grpc.health.v1 says of one service, while the server begins to drain."""

    def __init__(self, ctx: Context, service: str) -> None:
        self._ctx = ctx
        self._request = health_pb2.HealthCheckRequest(service=service)
        self._stub = health_pb2_grpc.HealthStub(ctx.connection.channel)
        self._watch = self._stub.Watch(self._request, timeout=60, metadata=ctx.connection.metadata)
        self._what = f"of {service!r} in grpc.health.v1"

    @classmethod
    async def open(cls, ctx: Context, service: str) -> GrpcWatch:
        """Watch a service that serves."""
        one = cls(ctx, service)
        await one._read()
        return one

    async def expect_not_serving(self) -> None:
        """Watch tells of the change, and Check says the same."""
        expect_equal(await self._read(), NOT_SERVING, f"Watch {self._what}", "HEALTH-05")
        answer = await self._ctx.call(self._stub.Check, self._request)
        expect_equal(answer.status, NOT_SERVING, f"Check {self._what}", "HEALTH-05")
        self._watch.cancel()

    async def _read(self) -> int:
        try:
            async with asyncio.timeout(3):
                told = await self._watch.read()
        except TimeoutError:
            raise Failure(f"Watch {self._what} tells nothing new", "HEALTH-05") from None
        expect(told is not grpc.aio.EOF, f"Watch {self._what} ended", "HEALTH-05")
        return int(told.status)


@case(
    "drain.stops_new_work",
    "From STARTED on new work is UNAVAILABLE and Health DRAINING, while what was in flight runs to its end.",
    "DRAIN-02",
    "DRAIN-01",
    "DRAIN-04",
    "GEN-05",
    "HEALTH-04",
    "HEALTH-05",
    needs=[needs.GENERATES, needs.MAY_DRAIN],
    exclusive=True,
)
async def stops_new_work(ctx: Context) -> None:
    running = await ctx.started(ctx.endless())
    watches = [await GrpcWatch.open(ctx, service) for service in ("", SERVICE)]
    watch = _drain(ctx, stop_accepting_new_requests=True)
    given_up = _drain(ctx, stop_accepting_new_requests=True)
    await _started(watch)
    await _started(given_up)
    await given_up.close()
    for _ in range(2):
        await ctx.refused(ctx.rpc.Generate, ctx.request(), Code.UNAVAILABLE, rule="GEN-05")
        health = await ctx.call(ctx.rpc.Health, lifecycle_pb2.HealthRequest())
        expect_equal(
            health.state, lifecycle_pb2.HEALTH_STATE_DRAINING, "Health during the drain", "HEALTH-04"
        )
    for grpc_watch in watches:
        await grpc_watch.expect_not_serving()
    await ctx.call(ctx.rpc.GetEngineInfo, discovery_pb2.GetEngineInfoRequest())
    await running.wait_tokens(len(running.first.records) + 2)
    await ctx.abort(running.id)
    await running.rest()
    _expect_complete(await _to_the_end(watch))


@case(
    "drain.stays_drained",
    "A drained server goes on refusing new work, and a further drain completes at once.",
    "DRAIN-02",
    "DRAIN-04",
    needs=[needs.GENERATES, needs.MAY_DRAIN],
    exclusive=True,
)
async def stays_drained(ctx: Context) -> None:
    drain = _drain(ctx, stop_accepting_new_requests=True)
    await _started(drain)
    async with asyncio.timeout(5):
        _expect_complete(await _to_the_end(drain))
    await ctx.refused(ctx.rpc.Generate, ctx.request(), Code.UNAVAILABLE, rule="GEN-05")
    health = await ctx.call(ctx.rpc.Health, lifecycle_pb2.HealthRequest())
    draining = (lifecycle_pb2.HEALTH_STATE_DRAINING, lifecycle_pb2.HEALTH_STATE_NOT_READY)
    expect_in(health.state, draining, "Health after the drain", "HEALTH-04")
