"""Admission, slots, the queue, aborts, slow readers, load and failures."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Any

import grpc
import pytest

from openengine.v1 import errors_pb2, observability_pb2
from openengine_adapters.core.errors import EngineDied, EngineFailure, Rejected
from openengine_adapters.engine import FinishKind, RuntimeEvent, Step
from openengine_adapters.reference.engine import ReferenceEngine
from openengine_adapters.reference.outbox import CAPACITY
from openengine_adapters.reference.settings import Faults
from tests.reference.harness import Answer, ask, call, running, until

ENDLESS: dict[str, Any] = {"max_tokens": 1500, "stopping": {"ignore_eos": True}}


async def _start(engine: ReferenceEngine, **fields: Any) -> AsyncGenerator[Step, None]:
    return await engine.generate(call(**{**ENDLESS, **fields}))


async def _load(engine: ReferenceEngine) -> tuple[int | None, int | None]:
    (rank,) = (await engine.load()).ranks
    return rank.running_requests, rank.queued_requests


async def _finish(stream: AsyncGenerator[Step, None], answer: Answer | None = None) -> Answer:
    answer = answer or Answer()
    async for step in stream:
        answer.add(step)
    return answer


async def test_a_request_is_admitted_before_its_first_token() -> None:
    async with running(latency=0.3) as engine:
        begin = time.monotonic()
        stream = await engine.generate(call(max_tokens=1))
        assert time.monotonic() - begin < 0.1
        await _finish(stream)
        assert time.monotonic() - begin >= 0.3


async def test_speed_is_tokens_a_second() -> None:
    async with running(speed=200) as engine:
        begin = time.monotonic()
        await ask(engine, max_tokens=41, stopping={"ignore_eos": True})
        assert 0.19 < time.monotonic() - begin < 0.6


@pytest.mark.parametrize("reading", [0, 1])
async def test_closing_a_stream_frees_its_slot_and_its_blocks_at_once(reading: int) -> None:
    async with running() as engine:
        stream = await _start(engine)
        for _ in range(reading):
            await anext(stream)
        await stream.aclose()
        (rank,) = (await engine.load()).ranks
        assert (rank.running_requests, rank.queued_requests, rank.used_kv_blocks) == (0, 0, 0)
        assert engine.unfinished() == 0


async def test_slots_and_queue_are_bounded() -> None:
    async with running(max_running=2, max_waiting=1, speed=50) as engine:
        streams = [await _start(engine) for _ in range(3)]
        with pytest.raises(Rejected) as refused:
            await _start(engine)
        assert refused.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        await anext(streams[0])
        assert await _load(engine) == (2, 1)
        await streams[0].aclose()
        await anext(streams[2])
        assert await _load(engine) == (2, 0)


async def test_a_higher_priority_leaves_the_queue_first() -> None:
    async with running(max_running=1) as engine:
        blocker = await _start(engine)
        await anext(blocker)
        order: list[int] = []

        async def follow(stream: AsyncGenerator[Step, None], priority: int) -> None:
            await anext(stream)
            order.append(priority)
            await stream.aclose()

        async with asyncio.TaskGroup() as group:
            for priority in (0, 5, -3, 9, 5):
                group.create_task(follow(await _start(engine, priority=priority), priority))
            await blocker.aclose()
    assert order == [9, 5, 5, 0, -3]


async def test_abort_ends_each_output_as_cancelled() -> None:
    async with running() as engine:
        made = call(**{**ENDLESS, "sampling": {"num_sequences": 3}})
        stream = await engine.generate(made)
        await anext(stream)
        await engine.abort(made.id)
        answer = await _finish(stream)
        kinds = {index: output.kind for index, output in answer.outputs.items()}
        assert kinds == dict.fromkeys(range(3), FinishKind.CANCELLED)
        assert await _load(engine) == (0, 0)


async def test_abort_reaches_a_queued_request_and_nobody_else() -> None:
    async with running(max_running=1) as engine:
        blocker = await _start(engine)
        await anext(blocker)
        made = call(**ENDLESS)
        waiting = await engine.generate(made)
        await engine.abort(made.id)
        await engine.abort("unknown")
        assert (await _finish(waiting)).one.kind is FinishKind.CANCELLED
        await anext(blocker)
        assert await _load(engine) == (1, 0)


async def test_a_slow_reader_pauses_its_request_and_no_other() -> None:
    async with running() as engine:
        slow = await _start(engine)
        await until(lambda: engine._ranks[0].scheduler.works()[0].paused)
        assert (await ask(engine, max_tokens=CAPACITY * 2)).one.ids
        (rank,) = (await engine.load()).ranks
        assert rank.running_tokens is not None
        assert rank.running_tokens < CAPACITY * 2
        answer = await _finish(slow)
        assert len(answer.one.ids) == ENDLESS["max_tokens"]


async def test_load_counts_what_runs_and_returns_to_zero() -> None:
    async with running(max_running=2, speed=100) as engine:
        streams = [await _start(engine) for _ in range(3)]
        await anext(streams[0])
        (rank,) = (await engine.load()).ranks
        assert (rank.running_requests, rank.queued_requests) == (2, 1)
        assert rank.used_kv_blocks
        assert rank.running_tokens
        assert rank.waiting_tokens
        assert rank.prefill_batch_size == 2
        for stream in streams:
            await stream.aclose()
        (rank,) = (await engine.load()).ranks
        assert not (
            rank.running_requests or rank.queued_requests or rank.used_kv_blocks or rank.running_tokens
        )
        assert (rank.prefill_batch_size, rank.decode_batch_size) == (0, 0)


async def test_a_request_runs_on_the_rank_asked_for_and_otherwise_on_the_idlest() -> None:
    async with running(data_parallel_size=3, speed=100) as engine:
        await _start(engine, kv={"data_parallel_rank": 2})
        first = await _start(engine)
        second = await _start(engine)
        await anext(first)
        await anext(second)
        assert [rank.running_requests for rank in (await engine.load()).ranks] == [1, 1, 1]


async def test_a_request_that_needs_more_blocks_than_are_free_waits_for_them() -> None:
    async with running(kv_blocks=130, speed=100) as engine:
        first = await _start(engine)
        second = await _start(engine)
        await anext(first)
        assert await _load(engine) == (1, 1)
        await first.aclose()
        await anext(second)


async def test_a_request_that_can_never_fit_is_refused() -> None:
    async with running(kv_blocks=50) as engine:
        with pytest.raises(Rejected) as refused:
            await _start(engine)
    assert refused.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED


# ------------------------------------------------------------------------------------------------- failures


async def test_fail_after_fails_each_request_after_its_tokens() -> None:
    async with running(faults=Faults(fail_after=5)) as engine:
        for _ in range(2):
            answer = Answer()
            with pytest.raises(EngineFailure):
                await _finish(await _start(engine), answer)
            assert len(answer.one.ids) == 5
        engine.check()


async def test_die_after_kills_the_engine_and_all_its_streams() -> None:
    async with running(faults=Faults(die_after=20)) as engine:
        streams = [await _start(engine) for _ in range(3)]
        for stream in streams:
            with pytest.raises(EngineDied):
                await _finish(stream)
        with pytest.raises(EngineDied):
            engine.check()
        with pytest.raises(EngineDied):
            await _start(engine)


async def test_hang_after_stops_the_steps_with_work_left() -> None:
    async with running(faults=Faults(hang_after=8)) as engine:
        stream = await _start(engine)
        for _ in range(8):
            await anext(stream)
        await asyncio.sleep(0)
        steps = engine.steps()
        await asyncio.sleep(0.05)
        assert (engine.steps(), engine.unfinished()) == (steps, 1)


async def test_stop_ends_open_streams_and_can_be_repeated() -> None:
    async with running() as engine:
        stream = await _start(engine)
        await engine.stop()
        with pytest.raises(EngineFailure) as failure:
            await _finish(stream)
        assert failure.value.code == errors_pb2.ERROR_CODE_INTERNAL
        await engine.stop()
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("reference-")]


# ------------------------------------------------------------------------------------------- runtime events


async def test_runtime_events_tell_of_steps_batches_and_the_queue_until_switched_off() -> None:
    events: list[RuntimeEvent] = []
    async with running() as engine:
        engine.observe(events.append)
        await ask(engine, max_tokens=4, stopping={"ignore_eos": True})
        engine.observe(None)
        count = len(events)
        await ask(engine, max_tokens=4)
    assert len(events) == count
    passes = [e.attributes for e in events if e.type == observability_pb2.RUNTIME_EVENT_TYPE_FORWARD_PASS]
    assert [int(p["generated_tokens"]) for p in passes] == [1, 1, 1, 1]
    assert int(passes[0]["prompt_tokens"]) > 0
    kinds = {e.type for e in events}
    assert kinds >= {
        observability_pb2.RUNTIME_EVENT_TYPE_BATCH,
        observability_pb2.RUNTIME_EVENT_TYPE_QUEUE,
    }
    stamps = [e.taken_at for e in events]
    assert stamps == sorted(stamps)
