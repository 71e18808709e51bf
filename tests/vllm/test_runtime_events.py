"""Runtime events of the real vLLM (RTE-01, RTE-02) and the batch sizes in GetLoad."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from openengine.v1 import observability_pb2 as obs
from tests.support.wire import PATIENCE_S, Wire

pytestmark = pytest.mark.asyncio(loop_scope="session")

FORWARD = obs.RUNTIME_EVENT_TYPE_FORWARD_PASS
BATCH = obs.RUNTIME_EVENT_TYPE_BATCH
QUEUE = obs.RUNTIME_EVENT_TYPE_QUEUE


@contextlib.asynccontextmanager
async def subscribed(wire: Wire) -> AsyncIterator[Any]:
    call = wire.stub.SubscribeRuntimeEvents(obs.SubscribeRuntimeEventsRequest())
    async with asyncio.timeout(PATIENCE_S):
        await call.initial_metadata()
    yield call
    call.cancel()


async def events_of_work(wire: Wire) -> list[obs.RuntimeEvent]:
    """The events of three requests, up to the queue being empty again."""
    await wire.until_idle()
    async with subscribed(wire) as call:
        await asyncio.gather(*(wire.generate(list(range(50 + n, 110 + n)), max_tokens=6) for n in range(3)))
        found: list[obs.RuntimeEvent] = []
        async with asyncio.timeout(PATIENCE_S):
            while not (found and found[-1].type == QUEUE and found[-1].attributes["running"] == "0"):
                response = await call.read()
                assert response is not grpc.aio.EOF
                found.append(response.runtime_event)
    return found


def numbers(events: list[obs.RuntimeEvent], kind: int, key: str) -> list[int]:
    return [int(event.attributes[key]) for event in events if event.type == kind]


async def test_events_tell_what_the_steps_did(evicting: Wire) -> None:
    """With vLLM's details of each step every key is there, and the sums are the work that was asked for."""
    events = await events_of_work(evicting)
    assert {event.type for event in events} == {FORWARD, BATCH, QUEUE}
    assert {event.attributes["rank"] for event in events} == {"0"}
    times = [event.timestamp_unix_nanos for event in events]
    assert times == sorted(times)
    assert len({event.event_id for event in events}) == len(events)
    assert sum(numbers(events, FORWARD, "generated_tokens")) == 18
    assert 3 * 60 - 2 * 32 * 3 <= sum(numbers(events, FORWARD, "prompt_tokens")) <= 3 * 60
    assert all(duration > 0 for duration in numbers(events, FORWARD, "duration_us"))
    steps = numbers(events, FORWARD, "step")
    assert steps == sorted(set(steps))
    assert max(numbers(events, BATCH, "running")) == 3
    assert max(numbers(events, BATCH, "decode")) >= 2
    assert max(numbers(events, QUEUE, "running")) == 3


async def test_without_details_only_what_is_known_is_told(tiny: Wire) -> None:
    events = await events_of_work(tiny)
    assert {event.type for event in events} == {FORWARD, BATCH, QUEUE}
    assert sum(numbers(events, FORWARD, "generated_tokens")) == 18
    assert not any(
        "duration_us" in event.attributes or "prompt_tokens" in event.attributes for event in events
    )


async def test_nobody_listening_costs_nothing(tiny: Wire) -> None:
    await events_of_work(tiny)
    async with asyncio.timeout(PATIENCE_S):
        while tiny.engine._board.events is not None:
            await asyncio.sleep(0.01)


async def test_load_has_batch_sizes_where_vllm_counts_them(evicting: Wire, tiny: Wire) -> None:
    """LOAD-01: absent is unavailable, zero is measured."""
    requests = [asyncio.create_task(evicting.generate(list(range(40)), max_tokens=200)) for _ in range(2)]
    async with asyncio.timeout(PATIENCE_S):
        while (load := await evicting.stub.GetLoad(obs.GetLoadRequest())).decode_batch_size != 2:
            await asyncio.sleep(0.01)
    assert load.HasField("prefill_batch_size")
    await asyncio.gather(*requests)
    await evicting.until_idle()
    async with asyncio.timeout(PATIENCE_S):
        while (load := await evicting.stub.GetLoad(obs.GetLoadRequest())).decode_batch_size:
            await asyncio.sleep(0.01)
    assert load.HasField("decode_batch_size")
    assert not (await tiny.stub.GetLoad(obs.GetLoadRequest())).HasField("decode_batch_size")


async def test_transfers_are_told_one_by_one() -> None:
    """NIXL's statistics, by themselves and below a MultiConnector's."""
    from vllm.v1.metrics.stats import SchedulerStats

    from openengine_adapters.vllm.steps import StepEvents

    nixl = {"transfer_duration": [0.5, 0.25], "bytes_transferred": [100, 200], "num_failed_transfers": [1]}
    for stats in (nixl, {"NixlConnector": {"data": nixl}}):
        events: list[Any] = []
        StepEvents(events.append).record(3, 1, SchedulerStats(kv_connector_stats=stats), None)
        transfers = [
            dict(event.attributes) for event in events if event.type == obs.RUNTIME_EVENT_TYPE_TRANSFER
        ]
        assert transfers == [
            {"rank": "3", "event": "transferred", "bytes": "100", "duration_us": "500000"},
            {"rank": "3", "event": "transferred", "bytes": "200", "duration_us": "250000"},
            {"rank": "3", "event": "failed"},
        ]
