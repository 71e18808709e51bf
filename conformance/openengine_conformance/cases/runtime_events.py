# SPDX-License-Identifier: Apache-2.0
"""SubscribeRuntimeEvents: what the engine does, as it does it."""

from __future__ import annotations

from openengine.v1 import errors_pb2, observability_pb2
from openengine_conformance import needs
from openengine_conformance.case import case
from openengine_conformance.checks import (
    Code,
    Refused,
    expect,
    expect_equal,
    expect_in,
    expect_increasing,
    expect_unique,
    fail,
    skip,
)
from openengine_conformance.context import Context
from openengine_conformance.stream_rules import error_violations
from openengine_conformance.subscription import Subscription

Request = observability_pb2.SubscribeRuntimeEventsRequest
Response = observability_pb2.SubscribeRuntimeEventsResponse
Type = observability_pb2.RuntimeEventType
QUIET = 0.4
UNKNOWN_TYPE = 99


async def _subscribe(
    ctx: Context, *types: int
) -> Subscription[observability_pb2.SubscribeRuntimeEventsResponse]:
    request = Request(types=types)  # type: ignore[arg-type]  # unknown values are sent on purpose
    subscription = ctx.subscribe(ctx.rpc.SubscribeRuntimeEvents, request)
    try:
        await subscription.accepted(rule="RTE-01")
    except Refused as refused:
        if refused.code is Code.UNIMPLEMENTED:
            skip(f"the server has no runtime events: {refused.details}")
        raise
    return subscription


async def _events_of_work(ctx: Context, *types: int) -> list[observability_pb2.RuntimeEvent]:
    """The events of one request, for a subscription to `types`."""
    subscription = await _subscribe(ctx, *types)
    await ctx.generate(ctx.steady(ctx.unique_prompt(20), max_tokens=6))
    responses = await subscription.collect(QUIET)
    await subscription.close()
    for response in responses:
        expect(
            not response.HasField("error"), f"the subscription ended with an EngineError: {response.error}"
        )
    return [response.runtime_event for response in responses]


@case(
    "runtime_events.of_work",
    "While the engine works its events come, each with a type, an id, a time and attributes.",
    "RTE-01",
    "RTE-02",
    needs=[needs.GENERATES],
    exclusive=True,
)
async def of_work(ctx: Context) -> None:
    events = await _events_of_work(ctx)
    expect(events, "no event came while a request ran")
    types = {event.type for event in events}
    expect(Type.RUNTIME_EVENT_TYPE_FORWARD_PASS in types, f"no FORWARD_PASS event came, only types {types}")
    for event in events:
        expect_in(event.type, [value for value in Type.values() if value], "the type")
        expect(event.event_id, "an event has no event_id", "RTE-02")
        expect(event.attributes, f"the event {event.event_id} has no attributes", "RTE-02")
        expect(event.timestamp_unix_nanos > 10**18, "a timestamp is not in nanoseconds since 1970", "RTE-02")


@case(
    "runtime_events.filter",
    "`types` filters: only events of the types asked for come; an empty list is all.",
    "RTE-01",
    needs=[needs.GENERATES],
    exclusive=True,
)
async def filtered(ctx: Context) -> None:
    every = {event.type for event in await _events_of_work(ctx)}
    for wanted in sorted(every):
        types = {event.type for event in await _events_of_work(ctx, wanted)}
        expect_equal(types, {wanted}, f"the set of types for a subscription to {Type.Name(wanted)}")


@case(
    "runtime_events.unknown_type",
    "A type that the server does not know is ignored beside one that it knows.",
    "RTE-01",
    "DISC-12",
    needs=[needs.GENERATES],
    exclusive=True,
)
async def unknown_type(ctx: Context) -> None:
    known = Type.RUNTIME_EVENT_TYPE_FORWARD_PASS
    types = {event.type for event in await _events_of_work(ctx, known, UNKNOWN_TYPE)}
    expect_equal(types, {known}, "the set of types that came")


@case(
    "runtime_events.ids_and_times",
    "event_id is unique in the process, and timestamps don't go back.",
    "RTE-02",
    needs=[needs.GENERATES],
    exclusive=True,
)
async def ids_and_times(ctx: Context) -> None:
    first, second = await _events_of_work(ctx), await _events_of_work(ctx)
    expect_unique([event.event_id for event in [*first, *second]], "event_id")
    for events in (first, second):
        times = [event.timestamp_unix_nanos for event in events]
        expect_increasing(times, "timestamp_unix_nanos", strictly=False)


@case(
    "runtime_events.several_subscribers",
    "Two subscribers see the same events.",
    "RTE-01",
    needs=[needs.GENERATES],
    exclusive=True,
)
async def several_subscribers(ctx: Context) -> None:
    subscriptions = [await _subscribe(ctx), await _subscribe(ctx)]
    await ctx.generate(ctx.steady(max_tokens=4))
    answers = [await subscription.collect(QUIET) for subscription in subscriptions]
    seen = [[response.runtime_event.event_id for response in responses] for responses in answers]
    common = set(seen[0]) & set(seen[1])
    expect(common, "the two subscribers saw no event in common")
    # They began and were asked at different moments, so only what lies between counts.
    one, other = [_between(ids, common) for ids in seen]
    expect_equal(one, other, "the list of events of one subscriber")


def _between(ids: list[str], common: set[str]) -> list[str]:
    places = [place for place, event_id in enumerate(ids) if event_id in common]
    return ids[places[0] : places[-1] + 1]


@case(
    "runtime_events.slow_subscriber",
    "A slow subscriber gets everything later, or one EngineError OVERLOADED; the others are not disturbed.",
    "RTE-03",
    "ERR-01",
    needs=[needs.GENERATES],
    exclusive=True,
)
async def slow_subscriber(ctx: Context) -> None:
    """The window is tiny and nobody reads while the engine works, so the server has to keep the events or say so."""
    await (await _subscribe(ctx)).close()  # skips when there are no runtime events
    async with ctx.connect(tiny_window=True) as connection:
        call = connection.rpc.SubscribeRuntimeEvents(Request(), timeout=60, metadata=connection.metadata)
        await call.initial_metadata()
        fast = await _subscribe(ctx)
        await ctx.generate_all(*(ctx.steady(max_tokens=24) for _ in range(3)))
        expected = [response.runtime_event.event_id for response in await fast.collect(QUIET)]
        expect(expected, "the other subscriber got nothing")
        for event_id in expected:
            response = await call.read()
            if not isinstance(response, Response):
                fail(f"the slow subscriber's stream ended {(await call.code()).name} without an EngineError")
            if response.HasField("error"):
                expect_equal(response.error.code, errors_pb2.ERROR_CODE_OVERLOADED, "the EngineError's code")
                for violation in error_violations(response.error):
                    fail(f"the last response {violation.problem}", violation.rule)
                break
            expect_equal(response.runtime_event.event_id, event_id, "the slow subscriber's event")
        call.cancel()


@case(
    "runtime_events.cancel",
    "Subscriptions that are cancelled leave the server working.",
    "RTE-01",
    needs=[needs.GENERATES],
    exclusive=True,
)
async def cancel(ctx: Context) -> None:
    for _ in range(5):
        subscription = await _subscribe(ctx)
        await subscription.close()
    await ctx.still_serves()
