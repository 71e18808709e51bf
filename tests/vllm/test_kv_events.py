"""KV events of the real vLLM: snapshot, history and cache hits must all tell the same."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import Any

import grpc
import pytest
import zmq.asyncio

from openengine.v1 import generate_pb2, inputs_pb2, kv_pb2, service_pb2_grpc
from tests.core.kv.conftest import KvServed, Subscriber
from tests.core.kv.view import View, view_of
from tests.support import cpu_env
from tests.support.server import serving
from tests.support.wire import PATIENCE_S, Wire
from tests.vllm.conftest import vllm_engine

pytestmark = pytest.mark.asyncio(loop_scope="session")

BLOCK = 32
BLOCKS = 48


def kv(wire: Wire) -> KvServed:
    return KvServed(wire.servicer, wire.stub, wire.target)


async def arrived(wire: Wire) -> int:
    """Wait until the engine is idle and its last batch has come; return that one's number."""
    await wire.until_idle()
    numbers: list[int] = []
    async with asyncio.timeout(PATIENCE_S):
        while len(numbers) < 10 or len(set(numbers[-10:])) > 1:
            await asyncio.sleep(0.02)
            numbers.append(wire.servicer.kv.stats()[0].next_sequence_number)
    return numbers[-1] - 1


async def snapshot(wire: Wire) -> View:
    subscriber = await kv(wire).subscribe(include_snapshot=True)
    view = view_of([await subscriber.batch()])
    subscriber.call.cancel()
    return view


def hit(view: View, prompt: list[int]) -> int:
    """How many tokens of `prompt` are cached, by the events: whole blocks, never the last token."""
    children = {(parent, tokens): key[0] for key, (parent, tokens, _) in view.content.items()}
    parent, found = b"", 0
    while found + BLOCK < len(prompt):
        block = children.get((parent, tuple(prompt[found : found + BLOCK])))
        if block is None:
            break
        parent, found = block, found + BLOCK
    return found


async def load(wire: Wire, requests: int, seed: int) -> None:
    """Requests that share prefixes and overflow the cache, eight at a time."""
    chance = random.Random(seed)
    slots = asyncio.Semaphore(8)

    async def one() -> None:
        prompt = prefix(chance) + [chance.randrange(3, 1000) for _ in range(chance.randrange(40, 260))]
        async with slots:
            await wire.generate(prompt, max_tokens=chance.randrange(1, 40))

    await asyncio.gather(*(one() for _ in range(requests)))


def prefix(chance: random.Random) -> list[int]:
    return [chance.randrange(4) + 10] * (BLOCK * chance.randrange(1, 5))


async def test_the_history_begins_with_a_cleared_cache(evicting: Wire) -> None:
    """An engine that never had a request has a snapshot, and it is empty."""
    subscriber = await kv(evicting).subscribe(include_snapshot=True)
    batch = await subscriber.batch()
    assert batch.events[0].HasField("all_blocks_cleared")
    assert batch.timestamp_unix_nanos > 10**18


async def test_a_request_stores_its_blocks_in_full(evicting: Wire) -> None:
    """KVE-01, KVE-08."""
    subscriber = await kv(evicting).subscribe()
    prompt = list(range(100, 100 + 3 * BLOCK + 5))
    await evicting.generate(prompt, max_tokens=2, kv=generate_pb2.KvOptions(cache_salt="pepper"))
    batches = await subscriber.batches(upto=await arrived(evicting))
    stored = [
        event.block_stored for batch in batches for event in batch.events if event.HasField("block_stored")
    ]
    assert [token for event in stored for token in event.token_ids] == prompt[: 3 * BLOCK]
    first = stored[0]
    assert (first.block_size, first.medium, first.group_idx) == (BLOCK, kv_pb2.STORAGE_MEDIUM_GPU, 0)
    assert first.kv_cache_spec_kind == "full_attention"
    assert not first.HasField("parent_block_hash")
    assert {(block.encoding, len(block.value)) for block in first.block_hashes} == {("int64", 8)}
    assert len(first.extra_keys) == len(first.block_hashes)
    assert list(first.extra_keys[0].values) == ["pepper"]


async def test_snapshot_history_and_real_hits_agree_after_thousands_of_events(evicting: Wire) -> None:
    """KVE-02, KVE-04: the proof is what vLLM itself reports as cached for the next prompts."""
    history = await kv(evicting).subscribe(include_snapshot=True)
    loading = asyncio.create_task(load(evicting, 400, seed=1))
    await asyncio.sleep(0)
    late = await kv(evicting).subscribe(include_snapshot=True)
    await loading
    last = await arrived(evicting)
    stats = evicting.servicer.kv.stats()[0]
    assert stats.stored_blocks > 1500
    assert stats.removed_blocks > 1400
    assert (stats.gaps, stats.restarts, stats.unknown_removals) == (0, 0, 0)
    assert stats.complete
    view = await snapshot(evicting)
    assert 0 < sum(view.copies.values()) < BLOCKS
    for subscriber in (history, late):
        whole = view_of(await subscriber.batches(upto=last))
        assert (whole.copies, whole.content) == (view.copies, view.content)

    chance = random.Random(2)
    hits = 0
    for _ in range(30):
        prompt = prefix(chance) + [chance.randrange(3, 1000) for _ in range(chance.randrange(1, 60))]
        predicted = hit(await snapshot(evicting), prompt)
        answer = await evicting.generate(prompt, max_tokens=1)
        assert answer.usage.cached_prompt_tokens == predicted
        hits += predicted > 0
        await arrived(evicting)
    assert hits > 10


async def test_a_plain_zmq_subscriber_sees_the_same(evicting: Wire) -> None:
    """KVE-02: our numbers are the engine's own, and nothing of its history is missing."""
    await evicting.generate(list(range(300, 300 + 2 * BLOCK + 1)), max_tokens=1)
    last = await arrived(evicting)
    (publisher,) = evicting.engine.kv_event_publishers()
    native: list[int] = []
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as asking:
        asking.set_hwm(0)
        asking.connect(publisher.replay_endpoint)
        await asking.send_multipart((b"", bytes(8)))
        async with asyncio.timeout(PATIENCE_S):
            while (frames := await asking.recv_multipart())[-2] != b"\xff" * 8:
                native.append(int.from_bytes(frames[-2]))
    assert native == list(range(last + 1))
    ours = await kv(evicting).subscribe(start_sequence_number=1)
    assert [batch.sequence_number for batch in await ours.batches(upto=last)] == native[1:]


async def test_a_cleared_cache_is_seen_while_the_engine_is_idle(evicting: Wire) -> None:
    from openengine_adapters.vllm.kv import clear_cache

    await evicting.generate(list(range(500, 500 + 2 * BLOCK)), max_tokens=1)
    await arrived(evicting)
    subscriber = await kv(evicting).subscribe()
    assert await clear_cache(evicting.engine.llm, range(1))
    assert [event.WhichOneof("event") for event in (await subscriber.batch()).events] == [
        "all_blocks_cleared"
    ]
    assert not (await snapshot(evicting)).copies


async def test_events_that_are_off_cost_no_publisher(tiny: Wire) -> None:
    """KVE-06."""
    assert tiny.engine.kv_event_publishers() == []
    _, message = await kv(tiny).refused()
    assert "--kv-events" in message
    answer = await tiny.stub.GetKvEventSources(kv_pb2.GetKvEventSourcesRequest())
    assert not answer.sources


@pytest.mark.parametrize(
    ("flags", "wanted", "reason"),
    [
        (["--kv-events-config.endpoint", "tcp://127.0.0.1:5557"], True, "contradicts"),
        (
            ["--kv-events-config", '{"enable_kv_cache_events": true, "endpoint": "tcp://0.0.0.0:5557"}'],
            False,
            "connect to",
        ),
        (["--no-enable-prefix-caching"], True, "--enable-prefix-caching"),
    ],
)
async def test_what_cannot_work_is_refused_at_start(flags: list[str], wanted: bool, reason: str) -> None:
    from openengine_adapters.engine import StartupError
    from openengine_adapters.publishers import KvEventsWanted

    engine = vllm_engine(cpu_env.TINY_LLAMA, *flags, kv_events=KvEventsWanted(events=wanted))
    with pytest.raises(StartupError, match=reason):
        await engine.start()
    await engine.stop()


async def test_two_ranks_from_the_command_line() -> None:
    """KVS-01, KVS-02: native publishers on every interface, and each rank's stream."""
    options = ("--kv-events", "--kv-source", "both", "--advertise-host", "127.0.0.1")
    with contextlib.ExitStack() as stack:
        server = await asyncio.to_thread(
            stack.enter_context, serving("vllm", flags=["--data-parallel-size", "2", *options])
        )
        async with grpc.aio.insecure_channel(server.target) as channel:
            await _check_ranks(service_pb2_grpc.OpenEngineStub(channel))


async def _check_ranks(stub: Any) -> None:
    answer = await stub.GetKvEventSources(kv_pb2.GetKvEventSourcesRequest())
    assert [(s.data_parallel_rank, s.transport) for s in answer.sources] == [
        (0, "grpc"), (0, "zmq"), (1, "grpc"), (1, "zmq"),
    ]  # fmt: skip
    assert len({s.endpoint_addr.port for s in answer.sources}) == 3
    subscriber = Subscriber(stub.SubscribeKvEvents(kv_pb2.SubscribeKvEventsRequest(include_snapshot=True)))
    first = [await subscriber.batch(), await subscriber.batch()]
    assert {batch.data_parallel_rank for batch in first} == {0, 1}
    for rank in (0, 1):
        request = generate_pb2.GenerateRequest(
            request_id=f"r{rank}",
            model=str(cpu_env.model(cpu_env.TINY_LLAMA)),
            token_ids=inputs_pb2.TokenIds(ids=list(range(40))),
            stopping=generate_pb2.StoppingOptions(max_tokens=1),
            kv=generate_pb2.KvOptions(data_parallel_rank=rank),
        )
        async for _ in stub.Generate(request):
            pass
        batch = await subscriber.batch()
        assert batch.data_parallel_rank == rank
        assert list(batch.events[0].block_stored.token_ids) == list(range(BLOCK))
    subscriber.call.cancel()
