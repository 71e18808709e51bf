"""SubscribeKvEvents over the wire (KVE-01 … KVE-08)."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import grpc
import pytest

from openengine.v1 import errors_pb2, kv_pb2
from openengine_adapters.core.errors import EngineDied
from openengine_adapters.core.kv import channel as channel_module
from openengine_adapters.core.kv import plane as plane_module
from openengine_adapters.core.kv.plane import KvOptions
from tests.core.conftest import until
from tests.core.kv.conftest import KvServed, kv_serving
from tests.core.kv.publisher import FakePublisher, cleared, publishing, removed, stored
from tests.core.kv.view import view_of

BIG = stored(1, lora_name="x" * 400_000)  # a few of them fill a reader's window


def numbers(batches: list[kv_pb2.KvEventBatch]) -> list[int]:
    return [batch.sequence_number for batch in batches]


async def caught_up(kv: KvServed, publisher: FakePublisher) -> None:
    """Wait until all that was published has arrived."""
    rank = publisher.rank
    await until(
        lambda: {s.rank: s.next_sequence_number for s in kv.servicer.kv.stats()}[rank] == publisher.next
    )


async def test_live_batches_as_the_engine_sent_them(kv: KvServed, publisher: FakePublisher) -> None:
    subscriber = await kv.subscribe()
    await publisher.publish(stored(1, 2, parent=9), removed(5))
    await publisher.publish(cleared())
    first, second = await subscriber.batches(upto=1)
    assert [event.WhichOneof("event") for event in first.events] == ["block_stored", "block_removed"]
    assert first.data_parallel_rank == 0
    assert first.timestamp_unix_nanos
    assert second.events[0].HasField("all_blocks_cleared")


async def test_metadata_comes_before_any_event(kv: KvServed) -> None:
    await kv.subscribe()  # it would wait for ever


async def test_without_a_snapshot_the_past_stays_away(kv: KvServed, publisher: FakePublisher) -> None:
    await publisher.publish(stored(1))
    await caught_up(kv, publisher)
    subscriber = await kv.subscribe()
    await publisher.publish(stored(2))
    assert (await subscriber.batch()).sequence_number == 1


async def test_a_snapshot_is_one_batch_with_the_last_number(kv: KvServed, publisher: FakePublisher) -> None:
    await publisher.publish(stored(1, 2), stored(1))
    await publisher.publish(removed(2), stored(3, parent=1, lora_name="ada", lora_id=1))
    await caught_up(kv, publisher)
    subscriber = await kv.subscribe(include_snapshot=True)
    snapshot = await subscriber.batch()
    assert snapshot.sequence_number == 1
    assert snapshot.timestamp_unix_nanos
    assert [event.WhichOneof("event") for event in snapshot.events] == [
        "all_blocks_cleared",
        "block_stored",  # block 1 has two copies
        "block_stored",
        "block_stored",
    ]
    last = snapshot.events[-1].block_stored
    assert (last.lora_name, last.parent_block_hash.value) == ("ada", (1).to_bytes(8))
    await publisher.publish(removed(1))
    assert (await subscriber.batch()).sequence_number == 2


async def test_before_the_first_batch_there_is_nothing_to_snapshot(
    kv: KvServed, publisher: FakePublisher
) -> None:
    subscriber = await kv.subscribe(include_snapshot=True)
    await publisher.publish(stored(1))
    assert (await subscriber.batch()).sequence_number == 0


async def test_a_snapshot_under_load_loses_and_doubles_nothing(
    kv: KvServed, publisher: FakePublisher
) -> None:
    chance = random.Random(1)
    present: list[int] = []
    ended = asyncio.Event()

    async def load() -> None:
        for fresh in range(2000):
            events: list[Any] = [stored(fresh)]
            present.append(fresh)
            if len(present) > 40:
                events.append(removed(present.pop(chance.randrange(40))))
            await publisher.publish(*events)
            if fresh % 20 == 0:
                await asyncio.sleep(0.001)
        ended.set()

    async def late(wait: int) -> list[int]:
        await until(lambda: publisher.next >= wait)
        subscriber = await kv.subscribe(include_snapshot=True)
        view = view_of(await subscriber.batches(upto=1999))
        return sorted(int.from_bytes(key[0]) for key in view.copies.elements())

    loading = asyncio.create_task(load())
    found = await asyncio.gather(*(late(wait) for wait in (0, 1, 300, 700, 701, 1500)))
    await loading
    assert all(each == sorted(present) for each in found)


async def test_a_replay_begins_where_asked(kv: KvServed, publisher: FakePublisher) -> None:
    for number in range(6):
        await publisher.publish(stored(number))
    await caught_up(kv, publisher)
    subscriber = await kv.subscribe(start_sequence_number=2)
    await publisher.publish(stored(6))
    assert numbers(await subscriber.batches(upto=6)) == [2, 3, 4, 5, 6]
    following = await kv.subscribe(start_sequence_number=7)
    await publisher.publish(stored(7))
    assert (await following.batch()).sequence_number == 7


async def test_what_is_not_held_is_out_of_range(
    kv: KvServed, publisher: FakePublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (await kv.refused(start_sequence_number=5))[0] == grpc.StatusCode.OUT_OF_RANGE
    monkeypatch.setattr(channel_module, "KEPT_BATCHES", 8)
    async with kv_serving([publisher.describe()]) as small:
        for number in range(20):
            await publisher.publish(stored(number))
        await caught_up(small, publisher)
        code, message = await small.refused(start_sequence_number=10)
        assert code == grpc.StatusCode.OUT_OF_RANGE
        assert "from 16 to 20" in message
        assert "include_snapshot" in message
        assert numbers(await (await small.subscribe(start_sequence_number=16)).batches(upto=19)) == [
            16,
            17,
            18,
            19,
        ]


async def test_a_snapshot_and_a_start_exclude_each_other(kv: KvServed) -> None:
    code, message = await kv.refused(include_snapshot=True, start_sequence_number=1)
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert message.startswith("start_sequence_number")


async def test_events_that_are_off_are_unimplemented_and_say_how_to_enable_them() -> None:
    async with kv_serving([]) as served:
        code, message = await served.refused(include_snapshot=True)
        assert code == grpc.StatusCode.UNIMPLEMENTED
        assert "--kv-events" in message


async def test_ranks_are_filtered_and_attributed() -> None:
    async with (
        publishing(rank=0) as zero,
        publishing(rank=1) as one,
        kv_serving([one.describe(), zero.describe()]) as kv,
    ):
        await zero.subscribed()
        await one.subscribed()
        await zero.publish(stored(1))
        await caught_up(kv, zero)
        both = await kv.subscribe(include_snapshot=True)
        only = await kv.subscribe(data_parallel_ranks=[1, 1])
        await one.publish(stored(2))
        await zero.publish(stored(3))
        await one.publish(stored(4))
        got = [await both.batch() for _ in range(4)]
        assert sorted((batch.data_parallel_rank, batch.sequence_number) for batch in got) == [
            (0, 0),
            (0, 1),
            (1, 0),
            (1, 1),
        ]
        assert [(b.data_parallel_rank, b.sequence_number) for b in await only.batches(upto=1)] == [
            (1, 0),
            (1, 1),
        ]
        code, message = await kv.refused(data_parallel_ranks=[0, 2])
        assert code == grpc.StatusCode.INVALID_ARGUMENT
        assert message.startswith("data_parallel_ranks: 2")


async def test_a_loss_ends_streams_and_a_fresh_one_starts_clean(
    kv: KvServed, publisher: FakePublisher
) -> None:
    subscriber = await kv.subscribe()
    await publisher.publish(stored(1))
    publisher.skip()
    await publisher.publish(stored(3))
    error = await subscriber.error()
    assert error.code == errors_pb2.ERROR_CODE_INTERNAL
    assert error.retryable
    assert error.details["reason"] == "kv_events_lost"
    fresh = await kv.subscribe(include_snapshot=True)
    view = view_of([await fresh.batch()])
    assert {int.from_bytes(key[0]) for key in view.copies} == {3}
    await publisher.publish(stored(4))
    assert (await fresh.batch()).sequence_number == 3


async def test_a_subscription_waits_for_a_rebuild_but_not_for_ever(
    publisher: FakePublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plane_module, "READY_S", 0.1)
    deaf = publisher.describe(replay_endpoint="tcp://127.0.0.1:9")
    async with kv_serving([deaf]) as kv:
        code, message = await kv.refused()
        assert code == grpc.StatusCode.UNAVAILABLE
        assert "synchronised" in message


@pytest.mark.parametrize("encoding", ["native", "decimal_int64"])
async def test_hash_encodings(publisher: FakePublisher, encoding: str) -> None:
    async with kv_serving([publisher.describe()], KvOptions(hash_encoding=encoding)) as kv:
        await publisher.subscribed()
        await publisher.publish(stored(2**64 - 5, parent=6))
        await caught_up(kv, publisher)
        event = (await (await kv.subscribe(include_snapshot=True)).batch()).events[-1].block_stored
        expected = (b"-5", b"6") if encoding != "native" else ((-5).to_bytes(8, signed=True), (6).to_bytes(8))
        assert (event.block_hashes[0].value, event.parent_block_hash.value) == expected
        assert event.block_hashes[0].encoding == ("int64" if encoding == "native" else encoding)


async def test_the_engine_s_death_ends_streams_at_once(kv: KvServed) -> None:
    subscriber = await kv.subscribe()
    kv.servicer.watchdog.declare_dead(EngineDied())
    error = await subscriber.error()
    assert error.retryable
    assert "died" in error.message
    assert (await kv.refused())[0] == grpc.StatusCode.UNAVAILABLE


async def test_a_closing_server_ends_streams(kv: KvServed) -> None:
    subscriber = await kv.subscribe()
    await kv.servicer.closed()
    error = await subscriber.error()
    assert error.code == errors_pb2.ERROR_CODE_DRAINING
    assert error.retryable


async def test_a_reader_that_leaves_is_not_counted_any_more(kv: KvServed, publisher: FakePublisher) -> None:
    subscriber = await kv.subscribe()
    assert kv.servicer.kv.stats()[0].subscribers == 1
    subscriber.call.cancel()
    await until(lambda: kv.servicer.kv.stats()[0].subscribers == 0)


async def test_a_slow_reader_ends_overloaded_and_disturbs_nobody(
    publisher: FakePublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel_module, "KEPT_BATCHES", 64)
    async with kv_serving([publisher.describe()]) as kv:
        await publisher.subscribed()
        slow, quick = await kv.subscribe(), await kv.subscribe()
        for _ in range(200):
            await publisher.publish(BIG)
            await quick.batch()
        error = await slow.error()
        assert error.code == errors_pb2.ERROR_CODE_OVERLOADED
        assert error.retryable
        assert error.details["reason"] == "slow_subscriber"
        await publisher.publish(stored(1))
        assert (await quick.batch()).sequence_number == 200
        assert kv.servicer.kv.stats()[0].overloaded == 1
