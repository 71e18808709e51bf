"""The index against the plain way: replaying the whole history."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openengine.v1 import kv_pb2
from openengine_adapters.core.kv.channel import Channel, Response
from openengine_adapters.core.kv.index import BlockIndex
from openengine_adapters.core.kv.messages import event_message, native_hash
from openengine_adapters.core.kv.native import decode
from tests.core.kv.publisher import cleared, payload, removed, stored
from tests.core.kv.view import View, view_of

_hash = st.integers(0, 12)
_place = st.fixed_dictionaries(
    {"medium": st.sampled_from(["GPU", "CPU", None]), "group_idx": st.sampled_from([0, 1])}
)
_stored = st.builds(
    lambda hashes, parent, place, name: {**stored(*hashes, parent=parent, lora_name=name), **place},
    st.lists(_hash, min_size=1, max_size=4),
    st.none() | _hash,
    _place,
    st.sampled_from([None, "ada"]),
)
_removed = st.builds(
    lambda hashes, place: {**removed(*hashes), **place}, st.lists(_hash, min_size=1, max_size=3), _place
)
_event = st.one_of(_stored, _stored, _removed, _removed, st.just(cleared()))
_history = st.lists(st.lists(_event, max_size=3), min_size=1, max_size=40)


@given(_history, st.data())
def test_a_snapshot_and_what_follows_equal_the_whole_history(history: list[list[Any]], data: Any) -> None:
    cut = data.draw(st.integers(1, len(history)))
    asyncio.run(_check_snapshot(history, cut))


async def _check_snapshot(history: list[list[Any]], cut: int) -> None:
    channel = Channel(0, native_hash)
    for number, events in enumerate(history[:cut]):
        channel.apply(number, payload(*events))
    late, following = await channel.snapshot()
    assert late is not None
    assert late.batch.sequence_number == following - 1 == cut - 1
    assert late.batch.events[0].HasField("all_blocks_cleared")
    for number, events in enumerate(history[cut:], start=cut):
        channel.apply(number, payload(*events))
    rest = channel.cursor(following)
    view = view_of([late.batch])
    while (response := rest.take()) is not None:
        view.apply(response.batch)
    everything = _whole(channel)
    assert view.copies == everything.copies
    assert view.content == everything.content


async def test_snapshots_are_shared_by_those_who_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    channel, made = Channel(0, native_hash), 0
    take = Channel._take_snapshot

    def counted(self: Channel) -> Response:
        nonlocal made
        made += 1
        return take(self)

    monkeypatch.setattr(Channel, "_take_snapshot", counted)
    assert await channel.snapshot() == (None, 0)
    channel.apply(0, payload(stored(1)))
    waiting = [asyncio.create_task(channel.snapshot()) for _ in range(50)]
    first = await asyncio.gather(*waiting)
    assert await channel.snapshot() == first[0]
    assert made == 1
    channel.apply(1, payload(stored(2)))
    leaving, staying = (asyncio.create_task(channel.snapshot()) for _ in range(2))
    await asyncio.sleep(0)
    leaving.cancel()
    response, following = await staying
    assert response is not None
    assert following == 2
    assert made == 2


async def test_a_history_that_begins_anew_spoils_no_snapshot() -> None:
    channel = Channel(0, native_hash)
    channel.apply(0, payload(stored(1)))
    waiting = asyncio.create_task(channel.snapshot())
    await asyncio.sleep(0)
    channel.restart(0, "a test")
    assert await waiting == (None, 0)


def _whole(channel: Channel) -> View:
    cursor, view = channel.cursor(0), View()
    while (response := cursor.take()) is not None:
        view.apply(response.batch)
    return view


@given(_history)
def test_the_index_counts_what_the_history_leaves(history: list[list[Any]]) -> None:
    channel = Channel(0, native_hash)
    for number, events in enumerate(history):
        channel.apply(number, payload(*events))
    assert channel.read_stats().blocks == len(_whole(channel).copies)


def _index(*events: Any) -> BlockIndex:
    index = BlockIndex(native_hash)
    for event in decode(payload(*events)).events:
        index.apply(event, event_message(event, native_hash))
    return index


def _blocks(index: BlockIndex) -> list[kv_pb2.BlockStored]:
    return [kv_pb2.KvEventBatch.FromString(record).events[0].block_stored for record in index.records()]


def test_copies_are_counted_one_by_one() -> None:
    index = _index(stored(1), stored(1), stored(1, medium="CPU"), removed(1))
    assert len(index) == 2
    assert sum(1 for _ in index.records()) == 2
    two = _index(stored(1), stored(1))
    assert sum(1 for _ in two.records()) == 2


def test_a_block_of_several_keeps_its_own_share() -> None:
    index = _index(stored(5, 6, 7, parent=4, extra_keys=[["a"], None, ["b"]]), removed(5, 7))
    (block,) = _blocks(index)
    assert block.parent_block_hash.value == (5).to_bytes(8)
    assert list(block.token_ids) == [6, 7]
    assert not block.extra_keys
    assert block.block_size == 2


def test_blocks_of_a_span_with_holes_have_no_tokens() -> None:
    index = _index({**stored(5, 6), "token_ids": list(range(6))}, {**stored(9), "token_ids": [1]})
    assert [list(block.token_ids) for block in _blocks(index)] == [[], [], [1]]


def test_a_removal_of_the_unknown_is_counted() -> None:
    index = _index(stored(1), removed(2), removed(1), removed(1))
    assert len(index) == 0
    assert index.unknown_removals == 2


def test_a_cleared_cache_is_known_completely() -> None:
    channel = Channel(0, native_hash)
    channel.restart(5, "a test")
    channel.apply(5, payload(stored(1)))
    assert not channel.read_stats().complete
    channel.apply(6, payload(cleared(), stored(2)))
    assert channel.read_stats().complete
    assert channel.read_stats().blocks == 1
