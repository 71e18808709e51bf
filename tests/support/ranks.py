"""What the tests of data parallelism share: both engines run two ranks, and must say the same of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import grpc

from openengine.v1 import generate_pb2, lifecycle_pb2
from openengine.v1 import observability_pb2 as obs
from tests.support.wire import PATIENCE_S, Wire

LONG: Final = generate_pb2.StoppingOptions(max_tokens=1000, ignore_eos=True)
POLLERS: Final = 10
POLLS_EACH: Final = 100


async def load(wire: Wire) -> obs.LoadInfo:
    answer: obs.LoadInfo = await wire.stub.GetLoad(obs.GetLoadRequest(include_per_rank=True))
    return answer


async def until_load(wire: Wire, condition: Callable[[obs.LoadInfo], bool]) -> obs.LoadInfo:
    """Wait until GetLoad tells what the test expects; every answer on the way adds up (LOAD-02)."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            answer = await load(wire)
            adds_up(answer)
            if condition(answer):
                return answer
            await asyncio.sleep(0.01)


def adds_up(answer: obs.LoadInfo) -> None:
    """LOAD-02, LOAD-03: one entry for each rank, whose sums are the totals."""
    assert [rank.data_parallel_rank for rank in answer.ranks] == [0, 1]
    for name in ("running_requests", "queued_requests", "used_kv_blocks", "total_kv_blocks"):
        assert getattr(answer, name) == sum(getattr(rank, name) for rank in answer.ranks), name
        assert all(rank.HasField(name) for rank in answer.ranks), name
    assert all(rank.used_kv_blocks <= rank.total_kv_blocks for rank in answer.ranks)


def running(answer: obs.LoadInfo) -> list[int]:
    return [rank.running_requests for rank in answer.ranks]


@contextlib.asynccontextmanager
async def busy(wire: Wire, *ranks: int, stopping: Any = LONG) -> AsyncIterator[list[Any]]:
    """One long request on each of these ranks, named by the caller, once all of them run there."""
    calls = [
        await wire.accepted(
            [5 + number, 6, 7], stopping=stopping, kv=generate_pb2.KvOptions(data_parallel_rank=rank)
        )
        for number, rank in enumerate(ranks)
    ]
    counts = Counter(ranks)
    try:
        await until_load(wire, lambda answer: running(answer) == [counts[0], counts[1]])
        yield calls
    finally:
        for call in calls:
            call.cancel()
        await until_load(wire, lambda answer: running(answer) == [0, 0])


async def requests_run_on_the_rank_they_name(wire: Wire) -> None:
    """KVOPT-03, LOAD-01, LOAD-02: and a rank beyond is refused with the range."""
    async with busy(wire, 1, 1):
        pass
    async with busy(wire, 0, 1, 0):
        pass
    code, message = await wire.refused(kv=generate_pb2.KvOptions(data_parallel_rank=2))
    assert code is grpc.StatusCode.INVALID_ARGUMENT and message.startswith("kv.data_parallel_rank")


async def events_name_their_rank(wire: Wire) -> None:
    """RTE-01, RTE-02: each rank's steps and queue are told under its own number."""
    call = wire.stub.SubscribeRuntimeEvents(obs.SubscribeRuntimeEventsRequest())
    async with asyncio.timeout(PATIENCE_S):
        await call.initial_metadata()
    found: dict[str, list[obs.RuntimeEvent]] = {"0": [], "1": []}

    async def collect(rank: str) -> None:
        """Up to the moment at which the rank, having run something, runs nothing."""
        ran = False
        async with asyncio.timeout(PATIENCE_S):
            while True:
                response = await call.read()
                assert response is not grpc.aio.EOF
                event = response.runtime_event
                found[event.attributes["rank"]].append(event)
                if event.attributes["rank"] == rank and event.type == obs.RUNTIME_EVENT_TYPE_QUEUE:
                    if ran and event.attributes["running"] == "0":
                        return
                    ran = event.attributes["running"] != "0"

    stopping = generate_pb2.StoppingOptions(max_tokens=40, ignore_eos=True)
    for number in (1, 0):
        options = generate_pb2.KvOptions(data_parallel_rank=number)
        generated = asyncio.create_task(wire.generate([5, 6, 7], stopping=stopping, kv=options))
        await collect(str(number))
        await generated
        other = [event for event in found[str(1 - number)] if event.attributes.get("running", "0") != "0"]
        assert number == 0 or not other
    call.cancel()
    for events in found.values():
        kinds = {event.type for event in events}
        assert {obs.RUNTIME_EVENT_TYPE_FORWARD_PASS, obs.RUNTIME_EVENT_TYPE_QUEUE} <= kinds
    ids = [event.event_id for events in found.values() for event in events]
    assert len(set(ids)) == len(ids)


async def a_drain_counts_the_requests_of_all_ranks(wire: Wire) -> None:
    """DRAIN-01, DRAIN-02: what was in flight at its start, on whichever rank."""
    request = lifecycle_pb2.DrainRequest()
    async with busy(wire, 0, 1, 1) as calls, asyncio.timeout(PATIENCE_S):
        drain = wire.stub.Drain(request)
        first = await drain.read()
        assert (first.state, first.in_flight_requests) == (lifecycle_pb2.DRAIN_STATE_STARTED, 3)
        left = 3
        for call in calls:
            call.cancel()
            left -= 1
            while (now := await drain.read()).in_flight_requests > left:
                assert now.state == lifecycle_pb2.DRAIN_STATE_IN_PROGRESS
            assert now.in_flight_requests == left
        assert now.state == lifecycle_pb2.DRAIN_STATE_COMPLETE
        assert now.HasField("in_flight_requests")
        assert await drain.read() is grpc.aio.EOF


async def pollers_disturb_nobody(wire: Wire) -> None:
    """LOAD-04: a thousand answers while requests run, each of which adds up, and the requests end as they should."""
    stopping = generate_pb2.StoppingOptions(max_tokens=200, ignore_eos=True)

    async def poll() -> int:
        answers = 0
        for _ in range(POLLS_EACH):
            adds_up(await load(wire))
            answers += 1
            await asyncio.sleep(0.01)
        return answers

    async with asyncio.timeout(PATIENCE_S):
        requests = [
            asyncio.create_task(wire.generate([5 + number, 6, 7], stopping=stopping)) for number in range(8)
        ]
        counts = await asyncio.gather(*(poll() for _ in range(POLLERS)))
        answers = await asyncio.gather(*requests)
    assert counts == [POLLS_EACH] * POLLERS
    assert [answer.usage.completion_tokens for answer in answers] == [200] * len(answers)
