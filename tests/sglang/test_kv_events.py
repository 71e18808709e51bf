"""KV events of the real SGLang: snapshot, history and cache hits must all tell the same."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from openengine.v1 import generate_pb2, kv_pb2
from openengine_adapters.engine import StartupError
from openengine_adapters.publishers import KvEventsWanted
from tests.core.kv.conftest import KvServed
from tests.core.kv.view import View, view_of
from tests.support import cpu_env
from tests.support.wire import PATIENCE_S, Wire, serving

pytestmark = pytest.mark.asyncio(loop_scope="session")

BLOCK, BLOCKS = 16, 64
"""Tokens of a block, and blocks of a rank."""

FLAGS = (
    *("--page-size", str(BLOCK)),
    *("--max-total-tokens", str(BLOCK * BLOCKS)),
    *("--context-length", "512"),
    *("--dp-size", "2"),
    *("--log-level", "error"),
)


def engine(*flags: str, wanted: bool = True) -> Any:
    from openengine_adapters.sglang.config import parse_flags
    from openengine_adapters.sglang.engine import SglangEngine

    args = parse_flags([*cpu_env.sglang_flags(cpu_env.TINY_LLAMA), *flags])
    return SglangEngine(args, kv_events=KvEventsWanted(events=wanted))


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def evicting() -> AsyncIterator[Wire]:
    """Two ranks with few cache blocks each."""
    async with serving(engine(*FLAGS)) as wire:
        yield wire


def kv(wire: Wire) -> KvServed:
    return KvServed(wire.servicer, wire.stub, wire.target)


def on(rank: int, **more: Any) -> generate_pb2.KvOptions:
    return generate_pb2.KvOptions(data_parallel_rank=rank, **more)


async def arrived(wire: Wire, rank: int = 0) -> int:
    """Wait until the engine is idle and its last batch has come; return that one's number."""
    await wire.until_idle()
    numbers: list[int] = []
    async with asyncio.timeout(PATIENCE_S):
        while len(numbers) < 10 or len(set(numbers[-10:])) > 1:
            await asyncio.sleep(0.02)
            numbers.append(wire.servicer.kv.stats()[rank].next_sequence_number)
    return numbers[-1] - 1


async def snapshot(wire: Wire, rank: int = 0) -> View:
    subscriber = await kv(wire).subscribe(include_snapshot=True, data_parallel_ranks=[rank])
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


def prefix(chance: random.Random) -> list[int]:
    return [chance.randrange(4) + 10] * (BLOCK * chance.randrange(1, 8))


async def test_a_new_engine_has_an_empty_snapshot(evicting: Wire) -> None:
    subscriber = await kv(evicting).subscribe(include_snapshot=True)
    for _ in range(2):
        batch = await subscriber.batch()
        assert [event.WhichOneof("event") for event in batch.events] == ["all_blocks_cleared"] * len(
            batch.events
        )


async def test_a_request_stores_its_blocks_on_its_rank(evicting: Wire) -> None:
    """KVE-01, KVE-08."""
    subscriber = await kv(evicting).subscribe(data_parallel_ranks=[1])
    prompt = list(range(100, 100 + 3 * BLOCK + 5))
    await evicting.generate(prompt, max_tokens=2, kv=on(1, cache_salt="pepper"))
    batches = await subscriber.batches(upto=await arrived(evicting, 1))
    stored = [
        event.block_stored for batch in batches for event in batch.events if event.HasField("block_stored")
    ]
    assert {batch.data_parallel_rank for batch in batches} == {1}
    assert [token for event in stored for token in event.token_ids][: 3 * BLOCK] == prompt[: 3 * BLOCK]
    first = stored[0]
    assert (first.block_size, first.medium) == (BLOCK, kv_pb2.STORAGE_MEDIUM_GPU)
    assert not first.HasField("parent_block_hash")
    assert {(block.encoding, len(block.value)) for block in first.block_hashes} == {("int64", 8)}
    assert list(first.extra_keys[0].values) == ["pepper"]


async def test_snapshot_history_and_real_hits_agree_after_many_events(evicting: Wire) -> None:
    """KVE-02, KVE-04: the proof is what SGLang itself reports as cached for the next prompts."""
    history = await kv(evicting).subscribe(include_snapshot=True, data_parallel_ranks=[0])
    chance = random.Random(1)
    slots = asyncio.Semaphore(6)

    async def one() -> None:
        prompt = prefix(chance) + [chance.randrange(3, 1000) for _ in range(chance.randrange(20, 150))]
        async with slots:
            await evicting.generate(prompt, max_tokens=chance.randrange(1, 20), kv=on(0))

    await asyncio.gather(*(one() for _ in range(150)))
    last = await arrived(evicting)
    stats = evicting.servicer.kv.stats()[0]
    assert stats.stored_blocks > 600
    assert stats.removed_blocks > 500
    assert (stats.gaps, stats.restarts, stats.unknown_removals) == (0, 0, 0)
    assert stats.complete
    view = await snapshot(evicting)
    assert 0 < sum(view.copies.values()) <= BLOCKS
    whole = view_of(await history.batches(upto=last))
    assert (whole.copies, whole.content) == (view.copies, view.content)

    hits = 0
    for _ in range(20):
        prompt = prefix(chance) + [chance.randrange(3, 1000) for _ in range(chance.randrange(1, 60))]
        predicted = hit(await snapshot(evicting), prompt)
        answer = await evicting.generate(prompt, max_tokens=1, kv=on(0))
        assert answer.usage.cached_prompt_tokens == predicted
        hits += predicted > 0
        await arrived(evicting)
    assert hits > 5


async def test_a_cleared_cache_is_seen_while_the_engine_is_idle(evicting: Wire) -> None:
    await evicting.generate(list(range(500, 500 + 3 * BLOCK)), max_tokens=1, kv=on(0))
    await arrived(evicting)
    subscriber = await kv(evicting).subscribe(data_parallel_ranks=[0])
    assert (await evicting.engine.manager.flush_cache()).success
    batch = await subscriber.batch()
    assert batch.events[-1].HasField("all_blocks_cleared")
    assert not (await snapshot(evicting)).copies


@pytest.mark.parametrize(
    ("flags", "wanted", "reason"),
    [
        (["--kv-events-config", '{"publisher": "null"}'], True, "contradicts"),
        (["--kv-events-config", "{"], False, "cannot be read"),
        (
            ["--kv-events-config", '{"publisher": "zmq", "endpoint": "tcp://127.0.0.1:5557"}'],
            False,
            "connect to",
        ),
        (["--disable-radix-cache"], True, "--disable-radix-cache"),
    ],
)
async def test_what_cannot_work_is_refused_at_start(flags: list[str], wanted: bool, reason: str) -> None:
    with pytest.raises(StartupError, match=reason):
        await engine(*flags, wanted=wanted).start()
