"""The prefix cache, and the KV events that tell of it."""

from __future__ import annotations

import asyncio
import pathlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgpack
import zmq
import zmq.asyncio

from openengine_adapters.engine import KvEventPublisher, Lora
from openengine_adapters.reference.engine import ReferenceEngine
from tests.reference.harness import SOON_S, ask, running, write_adapter

LONG = list(range(40, 110))  # 70 tokens: four full blocks and six tokens more


async def _cached(engine: ReferenceEngine, prompt: list[int] = LONG, **fields: Any) -> int | None:
    return (await ask(engine, prompt, max_tokens=1, **fields)).cached


async def test_a_repeated_prompt_hits_its_full_blocks() -> None:
    async with running() as engine:
        assert await _cached(engine) == 0
        assert await _cached(engine) == 64
        assert await _cached(engine, LONG[:32]) == 16  # the last token is always computed
        assert await _cached(engine, LONG[:40] + [1] * 30) == 32


async def test_a_hit_changes_nothing_about_the_output() -> None:
    async with running() as engine:
        cold = await ask(engine, LONG)
        warm = await ask(engine, LONG)
    assert (cold.cached, warm.cached) == (0, 64)
    assert cold.one.ids == warm.one.ids


async def test_outputs_are_cached_for_those_who_continue_them() -> None:
    async with running() as engine:
        answer = await ask(engine, LONG, max_tokens=40, stopping={"ignore_eos": True})
        assert await _cached(engine, LONG + answer.one.ids) == 96


async def test_bypass_reads_nothing_and_still_fills_the_cache() -> None:
    async with running() as engine:
        assert await _cached(engine, kv={"bypass_prefix_cache": True}) == 0
        assert await _cached(engine, kv={"bypass_prefix_cache": True}) == 0
        assert await _cached(engine) == 64


async def test_salts_share_nothing_but_with_themselves() -> None:
    async with running() as engine:
        assert await _cached(engine, kv={"cache_salt": "a"}) == 0
        assert await _cached(engine, kv={"cache_salt": "b"}) == 0
        assert await _cached(engine) == 0
        assert await _cached(engine, kv={"cache_salt": "a"}) == 64


async def test_adapters_share_nothing_and_leave_nothing_behind(tmp_path: pathlib.Path) -> None:
    one, other = (Lora(1, "a", str(write_adapter(tmp_path / name, name.encode() * 9))) for name in ("x", "y"))
    async with running() as engine:
        await engine.load_lora(one)
        assert await _cached(engine) == 0
        assert await _cached(engine, lora=one) == 0
        assert await _cached(engine, lora=one) == 64
        await engine.unload_lora(one)
        await engine.load_lora(other)  # another path under the freed name
        assert await _cached(engine, lora=other) == 0


async def test_the_oldest_unused_blocks_make_room() -> None:
    async with running(kv_blocks=8) as engine:
        first, second = LONG, [token + 1 for token in LONG]
        await _cached(engine, first)
        await _cached(engine, second)
        assert await _cached(engine, second) == 64
        assert await _cached(engine, first) < 64  # type: ignore[operator]  # the engine counts


async def test_ranks_have_caches_of_their_own() -> None:
    async with running(data_parallel_size=2) as engine:
        assert await _cached(engine, kv={"data_parallel_rank": 0}) == 0
        assert await _cached(engine, kv={"data_parallel_rank": 1}) == 0
        assert await _cached(engine, kv={"data_parallel_rank": 1}) == 64


# ------------------------------------------------------------------------------------------------ KV events


@asynccontextmanager
async def _subscribed(publisher: KvEventPublisher) -> AsyncIterator[zmq.asyncio.Socket]:
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.SUB)
    try:
        socket.connect(publisher.endpoint)
        socket.subscribe(b"")
        yield socket
    finally:
        context.destroy(linger=0)


async def _replay(publisher: KvEventPublisher, start: int = 0) -> list[tuple[int, Any]]:
    """Every kept batch from `start` on, as a bridge asks for them."""
    context = zmq.asyncio.Context()
    try:
        socket = context.socket(zmq.DEALER)
        socket.connect(publisher.replay_endpoint)
        await socket.send_multipart([b"", start.to_bytes(8)])
        batches: list[tuple[int, Any]] = []
        async with asyncio.timeout(SOON_S):
            while True:
                empty, _topic, number, payload = await socket.recv_multipart()
                assert empty == b""
                if number == b"\xff" * 8:
                    return batches
                batches.append((int.from_bytes(number), msgpack.unpackb(payload)))
    finally:
        context.destroy(linger=0)


async def _events(publisher: KvEventPublisher) -> list[dict[str, Any]]:
    return [event for _, (_, events, _) in await _replay(publisher) for event in events]


async def test_a_new_engine_says_that_its_cache_is_empty_and_numbers_from_zero() -> None:
    async with running(kv_events=True) as engine:
        (publisher,) = engine.kv_event_publishers()
        await ask(engine, LONG)
        batches = await _replay(publisher)
    assert [number for number, _ in batches] == list(range(len(batches)))
    assert batches[0][1][1] == [{"type": "AllBlocksCleared"}]
    assert all(rank == 0 for _, (_, _, rank) in batches)


async def test_stored_blocks_name_their_tokens_and_their_parent() -> None:
    async with running(kv_events=True) as engine:
        (publisher,) = engine.kv_event_publishers()
        await ask(engine, LONG, max_tokens=30, stopping={"ignore_eos": True})
        stored = [event for event in await _events(publisher) if event["type"] == "BlockStored"]
    assert stored[0]["token_ids"] == LONG[:64]
    assert len(stored[0]["block_hashes"]) == 4
    assert (stored[0]["parent_block_hash"], stored[0]["block_size"], stored[0]["medium"]) == (None, 16, "GPU")
    assert stored[1]["parent_block_hash"] == stored[0]["block_hashes"][-1]
    assert stored[1]["token_ids"][:6] == LONG[64:]
    assert all(0 <= value < 2**64 for event in stored for value in event["block_hashes"])


async def test_replaying_all_events_gives_what_the_cache_holds() -> None:
    async with running(kv_events=True, kv_blocks=10) as engine:
        (publisher,) = engine.kv_event_publishers()
        for shift in range(6):
            await ask(engine, [token + shift for token in LONG], max_tokens=20)
        await ask(engine, LONG[:33], max_tokens=1)
        held: set[int] = set()
        kinds = set()
        for event in await _events(publisher):
            kinds.add(event["type"])
            if event["type"] == "AllBlocksCleared":
                held.clear()
            elif event["type"] == "BlockStored":
                assert not held & set(event["block_hashes"]), "stored twice"
                held |= set(event["block_hashes"])
            else:
                assert held >= set(event["block_hashes"]), "removed without having been stored"
                held -= set(event["block_hashes"])
        cache = engine._ranks[0].scheduler.cache
        assert held == {block for block in held if cache.holds(block)}
        assert len(held) == len(cache._blocks) <= 10
    assert kinds == {"AllBlocksCleared", "BlockStored", "BlockRemoved"}


async def test_live_events_are_those_of_the_replay() -> None:
    async with running(kv_events=True) as engine:
        (publisher,) = engine.kv_event_publishers()
        async with _subscribed(publisher) as socket:
            live: list[tuple[int, Any]] = []
            shift = 0
            while not live:  # a subscriber joins late
                await ask(engine, [token + shift for token in LONG])
                shift += 1
                while await socket.poll(20):
                    _topic, number, payload = await socket.recv_multipart()
                    live.append((int.from_bytes(number), msgpack.unpackb(payload)))
        assert await _replay(publisher, live[0][0]) == live


async def test_events_carry_adapter_and_salt_and_unloading_removes_the_adapters_blocks(
    tmp_path: pathlib.Path,
) -> None:
    lora = Lora(7, "a", str(write_adapter(tmp_path / "a")))
    async with running(kv_events=True) as engine:
        (publisher,) = engine.kv_event_publishers()
        await engine.load_lora(lora)
        await ask(engine, LONG, max_tokens=1, lora=lora, kv={"cache_salt": "s"})
        await engine.unload_lora(lora)
        await asyncio.sleep(0)
        await ask(engine, [1], max_tokens=1)
        events = await _events(publisher)
    (stored,) = [event for event in events if event["type"] == "BlockStored"]
    assert (stored["lora_id"], stored["lora_name"]) == (7, "a")
    assert stored["extra_keys"] == [["a", "s"]] * 4
    removed = [
        value for event in events if event["type"] == "BlockRemoved" for value in event["block_hashes"]
    ]
    assert sorted(removed) == sorted(stored["block_hashes"])


async def test_only_the_last_batches_are_kept_for_replay() -> None:
    async with running(kv_events=True, kv_buffer_steps=3) as engine:
        (publisher,) = engine.kv_event_publishers()
        for shift in range(6):
            await ask(engine, [token + shift for token in LONG], max_tokens=1)
        numbers = [number for number, _ in await _replay(publisher)]
    assert numbers == [numbers[-1] - 2, numbers[-1] - 1, numbers[-1]]
    assert publisher.buffer_steps == 3


async def test_each_rank_publishes_for_itself_and_none_when_switched_off() -> None:
    async with running(kv_events=True, data_parallel_size=2) as engine:
        publishers = engine.kv_event_publishers()
        assert [publisher.rank for publisher in publishers] == [0, 1]
        await ask(engine, LONG, max_tokens=1, kv={"data_parallel_rank": 1})
        assert [event["type"] for event in await _events(publishers[0])] == ["AllBlocksCleared"]
        ((_, (_, _, rank)), *_) = await _replay(publishers[1])
        assert rank == 1
    async with running() as engine:
        assert engine.kv_event_publishers() == []
