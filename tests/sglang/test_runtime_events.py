"""Runtime events of the real SGLang (RTE-01, RTE-02)."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from openengine.v1 import observability_pb2 as obs
from tests.support.wire import PATIENCE_S, Wire

pytestmark = pytest.mark.asyncio(loop_scope="session")

FORWARD = obs.RUNTIME_EVENT_TYPE_FORWARD_PASS
BATCH = obs.RUNTIME_EVENT_TYPE_BATCH
QUEUE = obs.RUNTIME_EVENT_TYPE_QUEUE


def numbers(events: list[obs.RuntimeEvent], kind: int, key: str) -> list[int]:
    return [int(event.attributes[key]) for event in events if event.type == kind]


async def test_events_tell_what_the_steps_did(tiny: Wire) -> None:
    await tiny.until_idle()
    call = tiny.stub.SubscribeRuntimeEvents(obs.SubscribeRuntimeEventsRequest())
    async with asyncio.timeout(PATIENCE_S):
        await call.initial_metadata()
    prompts = [[n * 100 + at for at in range(60)] for n in range(5, 8)]
    await asyncio.gather(*(tiny.generate(prompt, max_tokens=40) for prompt in prompts))
    events: list[obs.RuntimeEvent] = []
    async with asyncio.timeout(PATIENCE_S):
        while not (3 in numbers(events, QUEUE, "running") and numbers(events, QUEUE, "running")[-1] == 0):
            response = await call.read()
            assert response is not grpc.aio.EOF
            events.append(response.runtime_event)
    call.cancel()
    assert {event.type for event in events} == {FORWARD, BATCH, QUEUE}
    assert {event.attributes["rank"] for event in events} == {"0"}
    assert sum(numbers(events, FORWARD, "prompt_tokens")) == 180
    steps = numbers(events, FORWARD, "step")
    assert steps == list(range(1, len(steps) + 1))
    assert max(numbers(events, BATCH, "running")) == 3
    times = [event.timestamp_unix_nanos for event in events]
    assert times == sorted(times)
    async with asyncio.timeout(PATIENCE_S):
        while tiny.engine._events is not None:
            await asyncio.sleep(0.01)
