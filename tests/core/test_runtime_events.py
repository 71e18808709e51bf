"""SubscribeRuntimeEvents over the wire (RTE-01 … RTE-03)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest

from openengine.v1 import errors_pb2, observability_pb2
from openengine_adapters.core import runtime_events
from openengine_adapters.core.errors import EngineDied
from openengine_adapters.engine import RuntimeEvent
from tests.core.conftest import SOON_S, Served, serve, until
from tests.core.fake_engine import FakeEngine

FORWARD = observability_pb2.RUNTIME_EVENT_TYPE_FORWARD_PASS
BATCH = observability_pb2.RUNTIME_EVENT_TYPE_BATCH
QUEUE = observability_pb2.RUNTIME_EVENT_TYPE_QUEUE


class TellingEngine(FakeEngine):
    """A fake engine that emits what the test wants."""

    sink: Callable[[RuntimeEvent], None] | None = None

    def observed(self) -> bool:
        return self.sink is not None

    def observe(self, sink: Callable[[RuntimeEvent], None] | None) -> None:
        self.sink = sink

    def tell(
        self, kind: observability_pb2.RuntimeEventType.ValueType, at: int = 1, **attributes: str
    ) -> None:
        assert self.sink is not None
        self.sink(RuntimeEvent(kind, at, attributes))


@contextlib.asynccontextmanager
async def telling() -> AsyncIterator[tuple[TellingEngine, Served]]:
    engine = TellingEngine()
    async with serve(engine) as served:
        yield engine, served


async def subscribe(served: Served, *types: Any) -> Any:
    call = served.stub.SubscribeRuntimeEvents(observability_pb2.SubscribeRuntimeEventsRequest(types=types))
    async with asyncio.timeout(SOON_S):
        await call.initial_metadata()
    return call


async def read(call: Any) -> observability_pb2.RuntimeEvent:
    async with asyncio.timeout(SOON_S):
        response = await call.read()
    assert response.HasField("runtime_event"), response
    return response.runtime_event  # type: ignore[no-any-return]


async def last_error(call: Any) -> Any:
    async with asyncio.timeout(SOON_S):
        while (response := await call.read()).HasField("runtime_event"):
            pass
        assert await call.read() is grpc.aio.EOF
        assert await call.code() == grpc.StatusCode.OK
    return response.error


async def test_events_come_as_they_are_to_everybody() -> None:
    async with telling() as (engine, served):
        one, two = await subscribe(served), await subscribe(served)
        engine.tell(FORWARD, 5, step="1")
        for call in (one, two):
            event = await read(call)
            assert (event.type, event.timestamp_unix_nanos, dict(event.attributes)) == (
                FORWARD,
                5,
                {"step": "1"},
            )


async def test_ids_are_unique_and_timestamps_do_not_go_back() -> None:
    async with telling() as (engine, served):
        call = await subscribe(served)
        for at in (10, 30, 20, 40, 40):
            engine.tell(QUEUE, at)
        events = [await read(call) for _ in range(5)]
        assert [event.timestamp_unix_nanos for event in events] == [10, 30, 30, 40, 40]
        call.cancel()
        await until(lambda: not engine.observed())
        again = await subscribe(served)
        engine.tell(QUEUE, 5)
        events.append(await read(again))
        assert events[-1].timestamp_unix_nanos == 40
        assert len({event.event_id for event in events}) == 6


async def test_types_filter_and_unknown_ones_are_ignored() -> None:
    async with telling() as (engine, served):
        some = await subscribe(served, QUEUE, FORWARD, 77)
        none = await subscribe(served, 0, 77)
        for kind in (BATCH, QUEUE, BATCH, FORWARD):
            engine.tell(kind)
        assert [(await read(some)).type for _ in range(2)] == [QUEUE, FORWARD]
        served.servicer.runtime_events.fail(EngineDied())
        async with asyncio.timeout(SOON_S):
            assert (await none.read()).HasField("error")


async def test_an_engine_is_observed_only_while_somebody_subscribes() -> None:
    async with telling() as (engine, served):
        assert not engine.observed()
        one = await subscribe(served)
        two = await subscribe(served)
        assert engine.observed()
        one.cancel()
        await until(lambda: served.servicer.runtime_events.subscribers == 1)
        assert engine.observed()
        two.cancel()
        await until(lambda: not engine.observed())


async def test_a_slow_reader_ends_overloaded_and_disturbs_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime_events, "KEPT_EVENTS", 32)
    async with telling() as (engine, served):
        slow, quick = await subscribe(served), await subscribe(served)
        big = "x" * 400_000
        for step in range(200):
            engine.tell(FORWARD, step=str(step), big=big)
            assert (await read(quick)).attributes["step"] == str(step)
        error = await last_error(slow)
        assert error.code == errors_pb2.ERROR_CODE_OVERLOADED
        assert error.retryable
        engine.tell(FORWARD, step="end")
        assert (await read(quick)).attributes["step"] == "end"
        assert served.servicer.runtime_events.overloaded == 1


async def test_the_engine_s_death_ends_the_stream() -> None:
    async with telling() as (engine, served):
        call = await subscribe(served)
        engine.dead = True
        error = await last_error(call)
        assert error.retryable
        assert "died" in error.message


async def test_a_closing_server_ends_the_stream() -> None:
    async with telling() as (_, served):
        call = await subscribe(served)
        await served.servicer.closed()
        assert (await last_error(call)).code == errors_pb2.ERROR_CODE_DRAINING


async def test_an_engine_without_events_is_unimplemented(served: Served) -> None:
    call = served.stub.SubscribeRuntimeEvents(observability_pb2.SubscribeRuntimeEventsRequest())
    code, message = await served.refused(call)
    assert code == grpc.StatusCode.UNIMPLEMENTED
    assert "GetLoad" in message
