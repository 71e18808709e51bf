"""Bounded journals and their readers."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openengine.v1 import errors_pb2
from openengine_adapters.core.errors import EngineFailure
from openengine_adapters.core.journal import Cursor, Journal, read


def journal(begin: int = 0, max_items: int = 4, max_bytes: int = 1000) -> Journal[int]:
    return Journal(begin, max_items=max_items, max_bytes=max_bytes)


@given(st.integers(0, 5), st.lists(st.integers(0, 60), max_size=40), st.integers(1, 6), st.integers(1, 100))
def test_no_more_is_kept_than_allowed(begin: int, sizes: list[int], items: int, size: int) -> None:
    kept = journal(begin, items, size)
    for number, each in enumerate(sizes, start=begin):
        kept.append(number, each)
        held = range(kept.oldest, kept.next)
        assert len(held) <= items
        assert sum(sizes[at - begin] for at in held) <= size or len(held) == 1
        assert [kept.get(at) for at in held] == list(held)
        assert kept.oldest <= kept.replayable <= kept.next
    assert kept.next == begin + len(sizes)


def test_all_is_replayable_until_something_is_dropped() -> None:
    kept = journal(10)
    for number in range(4):
        kept.append(number, 1)
    assert kept.replayable == 10
    kept.append(4, 1)
    assert (kept.oldest, kept.replayable) == (11, 13)


def test_a_cursor_takes_each_once_then_waits() -> None:
    kept = journal()
    cursor = Cursor(kept, 0)
    assert cursor.take() is None
    kept.append(7, 1)
    kept.append(8, 1)
    assert [cursor.take(), cursor.take(), cursor.take()] == [7, 8, None]


def test_a_cursor_that_falls_behind_is_told() -> None:
    kept = journal(max_items=2)
    cursor = Cursor(kept, 0)
    for number in range(5):
        kept.append(number, 1)
    with pytest.raises(EngineFailure, match="missed 3") as caught:
        cursor.take()
    assert caught.value.code == errors_pb2.ERROR_CODE_OVERLOADED
    assert caught.value.retryable


async def test_readers_get_what_is_left_then_the_failure() -> None:
    one, two = journal(), journal()
    got: list[int] = []

    async def reader() -> None:
        async for item in read([Cursor(one, 0), Cursor(two, 0)]):
            got.append(item)  # noqa: PERF401  # what came before the failure counts

    reading = asyncio.create_task(reader())
    one.append(1, 1)
    await asyncio.sleep(0)
    two.append(10, 1)
    two.append(11, 1)
    one.append(2, 1)
    failure = EngineFailure("over")
    one.close(failure)
    one.close(EngineFailure("too late"))
    with pytest.raises(EngineFailure, match="over"):
        await asyncio.wait_for(reading, 5)
    assert [item for item in got if item < 10] == [1, 2]
    assert [item for item in got if item >= 10] == [10, 11][: len(got) - 2]


async def test_a_reader_that_leaves_is_forgotten() -> None:
    kept = journal()
    reading = read([Cursor(kept, 0)])
    kept.append(1, 1)
    assert await anext(reading) == 1
    assert kept._listeners
    await reading.aclose()
    assert not kept._listeners
