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


async def test_discovery_is_the_running_engines(tiny: Wire) -> None:
    """DISC-01, DISC-06, DISC-07, MODEL-02, MODEL-03, MODEL-06, MODEL-09."""
    info = await tiny.stub.GetEngineInfo(discovery_pb2.GetEngineInfoRequest())
    assert (info.engine_name, info.engine_version) == ("vllm", "0.32.0")
    (name,) = info.supported_models
    for alias in (name, "tiny", "small"):
        model = await tiny.stub.GetModelInfo(model_pb2.GetModelInfoRequest(model=alias))
        assert model.model_id == name
    assert (model.served_model_name, list(model.served_model_aliases)) == ("tiny", ["small"])
    assert (model.max_context_length, model.kv_block_size, model.max_running_requests) == (1024, 32, 64)
    assert model.total_kv_blocks == tiny.engine.llm.vllm_config.cache_config.num_gpu_blocks > 0
    assert model.generation.output_logprobs.max_top_n == tiny.description.vocab_size
    assert model.generation.supports_priority
    assert not model.HasField("max_output_tokens")


async def test_load_follows_running_requests_and_returns_to_zero(tiny: Wire) -> None:
    """LOAD-01 … LOAD-03."""
    calls = [await tiny.accepted(stopping=LONG) for _ in range(3)]

    async def load() -> observability_pb2.LoadInfo:
        found: observability_pb2.LoadInfo = await tiny.stub.GetLoad(
            observability_pb2.GetLoadRequest(include_per_rank=True)
        )
        assert found.ranks[0].running_requests == found.running_requests
        assert found.used_kv_blocks <= found.total_kv_blocks == tiny.description.total_kv_blocks
        return found

    async with asyncio.timeout(PATIENCE_S):
        while (await load()).running_requests != 3:
            await asyncio.sleep(0.01)
    assert (await load()).used_kv_blocks > 0
    for call in calls:
        call.cancel()
    async with asyncio.timeout(PATIENCE_S):
        while (await load()).running_requests:
            await asyncio.sleep(0.01)


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
    assert answer.usage.prompt_tokens == 5
    again.cancel()
    await tiny.until_idle()


async def test_abort_compares_whole_ids_and_all_means_all(tiny: Wire) -> None:
    """ABORT-03, ABORT-04."""
    calls = {name: await tiny.accepted(request_id=name, stopping=LONG) for name in ("p1", "p10")}
    await tiny.stub.Abort(lifecycle_pb2.AbortRequest(request_id="p1"))
    assert (await collected(calls["p1"])).first.reason == CANCELLED
    assert {request.request_id for request in tiny.servicer.requests} == {"p10"}
    await tiny.stub.Abort(lifecycle_pb2.AbortRequest(all_requests=lifecycle_pb2.AllRequests()))
    assert (await collected(calls["p10"])).first.reason == CANCELLED
    await tiny.until_idle()


async def test_the_larger_priority_runs_earlier(tiny: Wire) -> None:
    """GEN-09: with every slot taken, the order of the waiting ones is theirs."""
    at_once = tiny.description.max_running_requests
    assert at_once is not None
    blockers = await asyncio.gather(*(tiny.accepted(stopping=LONG) for _ in range(at_once)))
    order: list[int] = []

    async def waiting(priority: int) -> None:
        call = await tiny.accepted(priority=priority, stopping=generate_pb2.StoppingOptions(max_tokens=1))
        await collected(call)
        order.append(priority)

    async def until(running: int, queued: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                (rank,) = (await tiny.engine.load()).ranks
                if (rank.running_requests, rank.queued_requests) == (running, queued):
                    return
                await asyncio.sleep(0.01)

    # Accepted is not yet running, and who waits with a larger priority would overtake the last of them.
    await until(at_once, 0)
    tasks = [asyncio.create_task(waiting(priority)) for priority in (-5, 1, 7)]
    await until(at_once, 3)
    blockers.pop().cancel()
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*tasks)
    for call in blockers:
        call.cancel()
    assert order == [7, 1, -5]
    await tiny.until_idle()


async def test_500_requests_cancelled_at_random_moments_leave_nothing(tiny: Wire) -> None:
    """STREAM-11: neither in our table nor in vLLM's own."""
    chance = random.Random(1)
    processor = tiny.engine.llm.output_processor
    before = {name: len(table) for name, table in vars(processor).items() if isinstance(table, dict)}

    async def one() -> None:
        sampling = generate_pb2.SamplingParams(temperature=1.0, num_sequences=chance.choice((1, 1, 1, 3)))
        call = tiny.stub.Generate(tiny.request(stopping=LONG, sampling=sampling))
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

    for _ in range(10):
        await asyncio.gather(*(one() for _ in range(50)))
    await tiny.until_idle()
    async with asyncio.timeout(PATIENCE_S):
        while (await tiny.engine.load()).ranks[0].running_requests:
            await asyncio.sleep(0.01)
    after = {name: len(table) for name, table in vars(processor).items() if isinstance(table, dict)}
    assert after == before
    assert len(tiny.servicer.requests) == 0


async def test_a_duplicate_id_is_refused_while_the_first_runs(tiny: Wire) -> None:
    """GEN-04: vLLM itself would take it."""
    call = await tiny.accepted(request_id="twice", stopping=LONG)
    code, _ = await tiny.refused(request_id="twice")
    assert code is grpc.StatusCode.ALREADY_EXISTS
    call.cancel()
    await tiny.until_idle()


async def test_rpcs_without_their_ability_say_so(tiny: Wire) -> None:
    """LORA-05, TASK-02, KVE-06."""
    from openengine.v1 import kv_pb2, lora_pb2, tasks_pb2

    context = tasks_pb2.TaskRequestContext(request_id="t", model="tiny")
    item = tasks_pb2.TaskInput(item_id="a", text="x")
    precondition, unimplemented = grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNIMPLEMENTED
    for call, code in (
        (tiny.stub.ListLoras(lora_pb2.ListLorasRequest()), precondition),
        (tiny.stub.UnloadLora(lora_pb2.UnloadLoraRequest(lora_name="x")), precondition),
        (tiny.stub.Embed(tasks_pb2.EmbedRequest(context=context, inputs=[item])), precondition),
        (tiny.stub.Classify(tasks_pb2.ClassifyRequest(context=context, inputs=[item])), precondition),
        (anext(aiter(tiny.stub.SubscribeKvEvents(kv_pb2.SubscribeKvEventsRequest()))), unimplemented),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() is code
