"""The KV plane over the reference engine: real requests, real evictions, and the engine's own cache as the judge."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from typing import Any

import grpc

from openengine.v1 import generate_pb2, inputs_pb2, kv_pb2, service_pb2_grpc
from openengine_adapters.core.servicer import OpenEngineServicer
from openengine_adapters.reference.engine import ReferenceEngine
from openengine_adapters.reference.settings import MODEL_ID, Settings
from openengine_adapters.server import Server
from tests.core.conftest import until
from tests.core.kv.conftest import KvServed, Subscriber
from tests.core.kv.view import View, view_of


@contextlib.asynccontextmanager
async def reference(**settings: Any) -> AsyncIterator[tuple[ReferenceEngine, KvServed]]:
    """A served reference engine."""
    engine = ReferenceEngine(Settings(**settings))
    servicer = OpenEngineServicer(engine, "instance-1", "v1")
    server = Server(servicer, "127.0.0.1", 0)
    port = await server.start()
    servicer.opened(await engine.start())
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield engine, KvServed(servicer, service_pb2_grpc.OpenEngineStub(channel), f"127.0.0.1:{port}")
    finally:
        await servicer.closed()
        await server.stop(0)
        await engine.stop()


def cached(engine: ReferenceEngine, rank: int) -> set[bytes]:
    """What the engine has in its cache, by its own account."""
    return {block.to_bytes(8) for block in engine._schedulers()[rank].cache._blocks}


def seen(view: View) -> set[bytes]:
    return {key[0] for key in view.copies}


async def generate(kv: KvServed, request_id: str, prompt: list[int], tokens: int, **kv_options: Any) -> None:
    request = generate_pb2.GenerateRequest(
        request_id=request_id,
        model=MODEL_ID,
        token_ids=inputs_pb2.TokenIds(ids=prompt),
        stopping=generate_pb2.StoppingOptions(max_tokens=tokens),
        kv=generate_pb2.KvOptions(**kv_options),
    )
    async for _ in kv.stub.Generate(request):
        pass


async def load(kv: KvServed, requests: int, seed: int, **kv_options: Any) -> None:
    """Requests that share prefixes and overflow the cache."""
    chance = random.Random(seed)

    async def one(number: int) -> None:
        prefix = [chance.randrange(4) + 10] * (16 * chance.randrange(1, 6))
        tail = [chance.randrange(200) for _ in range(chance.randrange(1, 120))]
        await generate(kv, f"r{seed}-{number}", prefix + tail, chance.randrange(1, 40), **kv_options)

    for begin in range(0, requests, 6):
        await asyncio.gather(*(one(number) for number in range(begin, min(begin + 6, requests))))


async def quiet(engine: ReferenceEngine, kv: KvServed) -> None:
    """Wait until the engine is idle and its events have arrived."""
    await until(lambda: engine.unfinished() == 0)
    numbers: list[int] = []

    def unchanged() -> bool:
        numbers.append(sum(stats.next_sequence_number for stats in kv.servicer.kv.stats()))
        return len(numbers) > 20 and len(set(numbers[-20:])) == 1

    await until(unchanged)


async def stored_more_than(kv: KvServed, blocks: int) -> None:
    await until(lambda: kv.servicer.kv.stats()[0].stored_blocks > blocks)


async def snapshot(kv: KvServed, rank: int = 0) -> kv_pb2.KvEventBatch:
    subscriber = await kv.subscribe(include_snapshot=True, data_parallel_ranks=[rank])
    batch = await subscriber.batch()
    subscriber.call.cancel()
    return batch


async def followed(subscriber: Subscriber, kv: KvServed) -> View:
    """All that the subscriber was sent so far."""
    last = kv.servicer.kv.stats()[0].next_sequence_number - 1
    return view_of(await subscriber.batches(upto=last))


async def test_history_snapshot_and_cache_agree_after_thousands_of_events() -> None:
    """KVE-04: the snapshot, a full history, and late subscribers all equal the engine's own cache."""
    async with reference(kv_blocks=64, max_context=512) as (engine, kv):
        await until(lambda: kv.servicer.kv.stats()[0].next_sequence_number > 0)
        history = await kv.subscribe(include_snapshot=True)
        loading = asyncio.create_task(load(kv, 450, seed=1))
        late = []
        for share in (100, 400, 900):
            await stored_more_than(kv, share)
            late.append(await kv.subscribe(include_snapshot=True))
        await loading
        await quiet(engine, kv)
        stats = kv.servicer.kv.stats()[0]
        assert stats.stored_blocks > 2000
        assert stats.removed_blocks > 1900
        assert (stats.gaps, stats.restarts, stats.unknown_removals) == (0, 0, 0)
        expected = cached(engine, 0)
        assert 40 < len(expected) <= 64
        assert seen(view_of([await snapshot(kv)])) == expected
        views = [await followed(subscriber, kv) for subscriber in (history, *late)]
        assert all(seen(view) == expected for view in views)
        assert all(view.content == views[0].content for view in views)


async def test_ranks_have_caches_of_their_own() -> None:
    async with reference(kv_blocks=64, max_context=512, data_parallel_size=2) as (engine, kv):
        await asyncio.gather(load(kv, 20, 1, data_parallel_rank=0), load(kv, 20, 2, data_parallel_rank=1))
        await quiet(engine, kv)
        for rank in (0, 1):
            batch = await snapshot(kv, rank)
            assert batch.data_parallel_rank == rank
            assert seen(view_of([batch])) == cached(engine, rank)
        assert cached(engine, 0) != cached(engine, 1)


async def test_prefixes_can_be_followed_from_block_to_block() -> None:
    """KVE-01: parents and tokens are enough to tell which prompt a block belongs to."""
    async with reference() as (engine, kv):
        prompt = [7 + at % 50 for at in range(64)]
        await generate(kv, "r", [*prompt, 9], 1)
        await quiet(engine, kv)
        view = view_of([await snapshot(kv)])
        tokens: list[int] = []
        parent = b""
        while following := [(key, item) for key, item in view.content.items() if item[0] == parent]:
            ((key, item),) = following
            tokens += item[1]
            parent = key[0]
        assert tokens == prompt
