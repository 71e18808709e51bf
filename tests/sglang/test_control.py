"""Discovery, load, abort, priority and cancellation on the real engine."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import grpc
import pytest

from openengine.v1 import discovery_pb2, generate_pb2, lifecycle_pb2, model_pb2, observability_pb2
from tests.support.wire import PATIENCE_S, Answer, Wire

pytestmark = pytest.mark.asyncio(loop_scope="session")

LONG = generate_pb2.StoppingOptions(max_tokens=900, ignore_eos=True)
CANCELLED = generate_pb2.FINISH_REASON_CANCELLED


async def collected(call: Any) -> Answer:
    async with asyncio.timeout(PATIENCE_S):
        return Answer([response async for response in call])


async def load(wire: Wire) -> observability_pb2.LoadInfo:
    found: observability_pb2.LoadInfo = await wire.stub.GetLoad(
        observability_pb2.GetLoadRequest(include_per_rank=True)
    )
    assert sum(rank.running_requests for rank in found.ranks) == found.running_requests
    assert found.used_kv_blocks <= found.total_kv_blocks == wire.description.total_kv_blocks
    return found


async def until_running(wire: Wire, count: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while (await load(wire)).running_requests != count:
            await asyncio.sleep(0.01)


async def test_discovery_is_the_running_engines(tiny: Wire) -> None:
    """DISC-01, DISC-06, DISC-07, MODEL-02, MODEL-03, MODEL-06, MODEL-09."""
    info = await tiny.stub.GetEngineInfo(discovery_pb2.GetEngineInfoRequest())
    assert (info.engine_name, info.engine_version) == ("sglang", "0.5.23")
    (name,) = info.supported_models
    for alias in (name, "tiny"):
        model = await tiny.stub.GetModelInfo(model_pb2.GetModelInfoRequest(model=alias))
        assert model.model_id == name
    assert model.served_model_name == "tiny"
    assert (model.kv_block_size, model.total_kv_blocks, model.max_running_requests) == (1, 8192, 8)
    # Of a context of 1024 SGLang keeps six tokens for itself.
    assert model.max_context_length == 1018
    assert model.generation.max_num_sequences == 8
    assert model.generation.supports_priority and model.generation.supports_prefix_cache_bypass
    assert not model.HasField("max_output_tokens")


async def test_initial_metadata_comes_before_the_first_token(tiny: Wire) -> None:
    """GEN-08: also while the request is queued."""
    at_once = tiny.description.max_running_requests
    assert at_once is not None
    calls = [await tiny.accepted([9, 8, 7], stopping=LONG) for _ in range(at_once + 2)]
    async with asyncio.timeout(PATIENCE_S):
        while (await load(tiny)).queued_requests != 2:
            await asyncio.sleep(0.01)
    for call in calls:
        call.cancel()
    await tiny.until_idle()


async def test_load_follows_running_requests_and_returns_to_zero(tiny: Wire) -> None:
    """LOAD-01 … LOAD-03."""
    calls = [await tiny.accepted(stopping=LONG) for _ in range(3)]
    await until_running(tiny, 3)
    assert (await load(tiny)).used_kv_blocks > 0
    for call in calls:
        call.cancel()
    await until_running(tiny, 0)


async def test_the_probe_runs_a_real_inference(tiny: Wire) -> None:
    """HEALTH-02."""
    answer = await tiny.stub.Health(lifecycle_pb2.HealthRequest(include_inference_probe=True))
    assert {c.name: c.state for c in answer.checks}["inference_probe"] == lifecycle_pb2.HEALTH_STATE_READY
    await tiny.until_idle()


@pytest.mark.parametrize("sequences", [1, 4])
async def test_abort_ends_every_sequence_and_frees_the_id_at_once(tiny: Wire, sequences: int) -> None:
    """ABORT-02, ABORT-05, GEN-04."""
    sampling = generate_pb2.SamplingParams(temperature=1.0, num_sequences=sequences)
    call = await tiny.accepted(request_id="aborted", stopping=LONG, sampling=sampling)
    status = (await tiny.stub.Abort(lifecycle_pb2.AbortRequest(request_id="aborted"))).status
    assert status == lifecycle_pb2.ABORT_STATUS_ABORTED
    again = await tiny.accepted(request_id="aborted", stopping=LONG)
    answer = await collected(call)
    assert {output.reason for output in answer.outputs.values()} == {CANCELLED}
    assert sorted(answer.outputs) == list(range(sequences))
    assert answer.usage.completion_tokens == sum(len(output.ids) for output in answer.outputs.values())
    again.cancel()
    await tiny.until_idle()


async def test_abort_of_a_queued_request(tiny: Wire) -> None:
    """ABORT-02: SGLang answers that in another form."""
    at_once = tiny.description.max_running_requests
    assert at_once is not None
    calls = [await tiny.accepted(stopping=LONG) for _ in range(at_once)]
    queued = await tiny.accepted(request_id="queued", stopping=LONG)
    await tiny.stub.Abort(lifecycle_pb2.AbortRequest(request_id="queued"))
    answer = await collected(queued)
    assert answer.first.reason == CANCELLED and answer.usage.completion_tokens == 0
    for call in calls:
        call.cancel()
    await tiny.until_idle()


async def test_abort_while_the_guide_is_compiled(tiny: Wire) -> None:
    """ABORT-02: not accepted yet, so a status; SGLang calls it a bad request."""
    slow = generate_pb2.GuidedDecoding(json_schema='{"type":"array","items":' * 400 + "{}" + "}" * 400)
    call = tiny.stub.Generate(tiny.request(request_id="slow", guided=slow))
    ended = asyncio.ensure_future(collected(call))
    async with asyncio.timeout(PATIENCE_S):
        while not tiny.engine.unfinished():
            await asyncio.sleep(0.01)
    await tiny.stub.Abort(lifecycle_pb2.AbortRequest(request_id="slow"))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ended
    assert caught.value.code() is grpc.StatusCode.CANCELLED
    await tiny.until_idle()


async def test_abort_compares_whole_ids_and_all_means_all(tiny: Wire) -> None:
    """ABORT-03, ABORT-04: SGLang itself aborts every id that begins alike."""
    calls = {name: await tiny.accepted(request_id=name, stopping=LONG) for name in ("p1", "p10")}
    await tiny.stub.Abort(lifecycle_pb2.AbortRequest(request_id="p1"))
    assert (await collected(calls["p1"])).first.reason == CANCELLED
    assert {request.request_id for request in tiny.servicer.requests} == {"p10"}
    await tiny.stub.Abort(lifecycle_pb2.AbortRequest(all_requests=lifecycle_pb2.AllRequests()))
    assert (await collected(calls["p10"])).first.reason == CANCELLED
    await tiny.until_idle()


async def fill(wire: Wire, rank: int, running: int, queued: int = 0) -> list[Any]:
    """Give one rank so many requests, one after the other: a short queue would refuse them all at once."""
    calls = []
    for number in range(1, running + queued + 1):
        kv = generate_pb2.KvOptions(data_parallel_rank=rank)
        calls.append(await wire.accepted(stopping=LONG, kv=kv, priority=0))
        async with asyncio.timeout(PATIENCE_S):
            while True:
                found = (await wire.engine.load()).ranks[rank]
                if (found.running_requests, found.queued_requests) == (
                    min(number, running),
                    max(0, number - running),
                ):
                    break
                await asyncio.sleep(0.01)
    return calls


async def order_of(
    wire: Wire, priorities: tuple[int, ...], at_once: int, rank: int | None = None
) -> list[int]:
    """The order in which requests run that waited while every slot was taken."""
    kv = generate_pb2.KvOptions(data_parallel_rank=0)
    blockers = await fill(wire, 0, at_once)
    order: list[int] = []

    async def waiting(priority: int) -> None:
        stopping = generate_pb2.StoppingOptions(max_tokens=1)
        await collected(await wire.accepted(priority=priority, stopping=stopping, kv=kv))
        order.append(priority)

    tasks = [asyncio.create_task(waiting(priority)) for priority in priorities]
    async with asyncio.timeout(PATIENCE_S):
        while (await wire.engine.load()).ranks[0].queued_requests != len(priorities):
            await asyncio.sleep(0.01)
    blockers.pop().cancel()
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*tasks)
    for call in blockers:
        call.cancel()
    await wire.until_idle()
    return order


async def test_the_larger_priority_runs_earlier(tiny: Wire) -> None:
    """GEN-09."""
    at_once = tiny.description.max_running_requests
    assert at_once is not None
    assert await order_of(tiny, (-5, 1, 7), at_once) == [7, 1, -5]


async def test_250_requests_cancelled_at_random_moments_leave_nothing(tiny: Wire) -> None:
    """STREAM-11: neither in our tables nor in SGLang's, whatever the request was about."""
    chance = random.Random(1)
    guide = generate_pb2.GuidedDecoding(regex="[a-z]{500}")
    stop = generate_pb2.StopCondition(stop_text="zzzz")
    late = generate_pb2.StoppingOptions(max_tokens=900, min_tokens=5, conditions=[stop])
    scores = generate_pb2.ResponseOptions(return_prompt_logprobs=True, return_output_logprobs=True)

    async def one() -> None:
        sampling = generate_pb2.SamplingParams(temperature=1.0, num_sequences=chance.choice((1, 1, 1, 3)))
        extras: dict[str, Any] = chance.choice(
            ({"stopping": LONG}, {"stopping": late}, {"stopping": LONG, "response": scores})
        )
        if chance.random() < 0.1:
            extras = {"guided": guide}
        call = tiny.stub.Generate(tiny.request(sampling=sampling, **extras))
        read_at_most, moment = chance.randrange(6), chance.random() * 0.3
        try:
            async with asyncio.timeout(moment):
                async for _ in call:
                    read_at_most -= 1
                    if read_at_most < 0:
                        break
        except TimeoutError:
            pass
        finally:
            call.cancel()

    for _ in range(5):
        await asyncio.gather(*(one() for _ in range(50)))
    await tiny.until_idle()
    await until_running(tiny, 0)
    assert (await load(tiny)).queued_requests == 0
    assert len(tiny.servicer.requests) == 0
    assert not tiny.engine._calls and not tiny.engine.manager.rid_to_state


async def test_a_duplicate_id_is_refused_while_the_first_runs(tiny: Wire) -> None:
    """GEN-04."""
    call = await tiny.accepted(request_id="twice", stopping=LONG)
    code, _ = await tiny.refused(request_id="twice")
    assert code is grpc.StatusCode.ALREADY_EXISTS
    call.cancel()
    await tiny.until_idle()


async def test_rpcs_without_their_ability_say_so(tiny: Wire) -> None:
    """LORA-05, TASK-02."""
    from openengine.v1 import lora_pb2, tasks_pb2

    context = tasks_pb2.TaskRequestContext(request_id="t", model="tiny")
    item = tasks_pb2.TaskInput(item_id="a", text="x")
    for call in (
        tiny.stub.ListLoras(lora_pb2.ListLorasRequest()),
        tiny.stub.Embed(tasks_pb2.EmbedRequest(context=context, inputs=[item])),
        tiny.stub.Classify(tasks_pb2.ClassifyRequest(context=context, inputs=[item])),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_a_stopped_scheduler_shows_as_a_hang_and_only_then(tiny: Wire) -> None:
    """ERR-07: with a request in the engine its steps stand still; a long wait without one is no hang."""
    (scheduler,) = [p for p in tiny.engine._processes if "sglang::scheduler" in " ".join(p.cmdline())]
    assert tiny.engine.unfinished() == 0
    call = await tiny.accepted(stopping=LONG)
    await until_running(tiny, 1)

    async def grows(seconds: float) -> bool:
        steps = tiny.engine.steps()
        await asyncio.sleep(seconds)
        return bool(tiny.engine.steps() > steps)

    assert await grows(0.5)
    scheduler.suspend()
    try:
        await asyncio.sleep(0.5)  # what was on its way
        assert not await grows(1.0)
        assert tiny.engine.unfinished() == 1
        await tiny.engine.load()  # answers all the same
    finally:
        scheduler.resume()
    assert await grows(0.5)
    call.cancel()
    await tiny.until_idle()
