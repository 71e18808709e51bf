"""Losses, repairs and restarts, between a real ZMQ publisher and a channel."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
import zmq.asyncio

from openengine_adapters.core.errors import EngineFailure
from openengine_adapters.core.journal import Cursor
from openengine_adapters.core.kv import source as source_module
from openengine_adapters.core.kv.channel import Channel, Response
from openengine_adapters.core.kv.follower import Follower
from openengine_adapters.core.kv.messages import native_hash
from openengine_adapters.core.kv.source import NativeSource
from tests.core.conftest import until
from tests.core.kv.publisher import FakePublisher, publishing, removed, stored
from tests.core.kv.view import View

NEVER_IDLE_S = 60.0


@contextlib.asynccontextmanager
async def following(publisher: FakePublisher, idle_s: float = NEVER_IDLE_S) -> AsyncIterator[Channel]:
    """A channel that follows `publisher`, synchronised and connected."""
    context = zmq.asyncio.Context()
    source = NativeSource(context, publisher.describe())
    channel = Channel(0, native_hash)
    task = asyncio.create_task(Follower(source, channel, idle_s).run())
    try:
        async with asyncio.timeout(10):
            await publisher.subscribed()
            await channel.wait_ready()
        yield channel
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        source.close()
        context.destroy(linger=0)


def take_all(cursor: Cursor[Response], view: View) -> View:
    while (response := cursor.take()) is not None:
        view.apply(response.batch)
    return view


def blocks(view: View) -> list[int]:
    return sorted(int.from_bytes(key[0]) for key in view.copies.elements())


async def snapshot(channel: Channel) -> list[int]:
    response, _ = await channel.snapshot()
    assert response is not None
    view = View()
    view.apply(response.batch)
    return blocks(view)


def ended(cursor: Cursor[Response]) -> EngineFailure:
    """The failure that a reader of an old history gets, after what was still good."""
    with pytest.raises(EngineFailure) as caught:
        take_all(cursor, View())
    return caught.value


async def test_history_before_the_subscription_is_replayed(publisher: FakePublisher) -> None:
    for number in range(300):
        await publisher.publish(stored(number))
    async with following(publisher) as channel:
        assert channel.next == 300
        await publisher.publish(removed(7))
        await until(lambda: channel.next == 301)
        assert await snapshot(channel) == [n for n in range(300) if n != 7]
        assert channel.read_stats().complete


async def test_a_gap_is_repaired_and_nobody_notices(publisher: FakePublisher) -> None:
    async with following(publisher) as channel:
        cursor = channel.cursor(0)
        await publisher.publish(stored(0))
        await until(lambda: channel.next == 1)
        publisher.lose(stored(1))
        publisher.lose(removed(0))
        await publisher.publish(stored(3))
        await until(lambda: channel.next == 4)
        view = take_all(cursor, View())
        assert view.numbers == [0, 1, 2, 3]
        assert blocks(view) == [1, 3]
        stats = channel.read_stats()
        assert (stats.gaps, stats.repaired, stats.restarts) == (1, 1, 0)
        assert (
            publisher.asked[-1] == 0
        )  # from the newest batch known, which proves that the history is the same


async def test_a_replay_that_loses_messages_is_asked_again(publisher: FakePublisher) -> None:
    async with following(publisher) as channel:
        await publisher.publish(stored(0))
        await until(lambda: channel.next == 1)
        for number in range(1, 9):
            publisher.lose(stored(number))
        publisher.mute = {3, 4, 7}
        await publisher.publish(stored(9))
        await until(lambda: channel.next == 10)
        assert await snapshot(channel) == list(range(10))
        assert channel.read_stats().restarts == 0


async def test_a_replay_without_an_end_is_asked_again(
    publisher: FakePublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_module, "REPLAY_SILENCE_S", 0.2)
    for number in range(5):
        await publisher.publish(stored(number))
    monkeypatch.setattr("tests.core.kv.publisher.END", b"\xff")  # a frame that nobody understands
    async with following(publisher) as channel:
        assert await snapshot(channel) == list(range(5))


async def test_a_gap_that_cannot_be_repaired_ends_streams_and_begins_anew(publisher: FakePublisher) -> None:
    async with following(publisher) as channel:
        cursor = channel.cursor(0)
        await publisher.publish(stored(0))
        publisher.skip()
        await publisher.publish(stored(2))
        await until(lambda: channel.next == 3)
        failure = ended(cursor)
        assert failure.retryable
        assert failure.details["reason"] == "kv_events_lost"
        # Block 0 may have been removed in the batch that is gone, so it is not claimed.
        assert await snapshot(channel) == [2]
        stats = channel.read_stats()
        assert not stats.complete
        assert stats.repaired == 0
        fresh = channel.cursor(channel.next)
        await publisher.publish(stored(3))
        await until(lambda: channel.next == 4)
        assert take_all(fresh, View()).numbers == [3]


async def test_without_a_replay_socket_a_gap_is_a_loss() -> None:
    async with publishing(replays=False) as publisher, following(publisher) as channel:
        cursor = channel.cursor(0)
        await publisher.publish(stored(0))
        publisher.lose(stored(1))
        await publisher.publish(stored(2))
        await until(lambda: channel.next == 3)
        assert "batches 1 to 1 were lost" in str(ended(cursor))
        assert await snapshot(channel) == [2]
        assert channel.read_stats().restarts == 1


async def test_a_publisher_that_forgot_its_beginning(publisher: FakePublisher) -> None:
    for number in range(10):
        await publisher.publish(stored(number))
    publisher.forget(before=6)
    async with following(publisher) as channel:
        assert await snapshot(channel) == [6, 7, 8, 9]
        assert not channel.read_stats().complete
        assert channel.replayable == 6


async def test_a_history_with_a_hole_counts_from_behind_it(publisher: FakePublisher) -> None:
    for number in range(4):
        await publisher.publish(stored(number))
    publisher.skip()
    for number in range(5, 8):
        await publisher.publish(stored(number))
    async with following(publisher) as channel:
        assert await snapshot(channel) == [5, 6, 7]


async def test_a_restart_shows_in_lower_numbers(publisher: FakePublisher) -> None:
    async with following(publisher) as channel:
        cursor = channel.cursor(0)
        for number in range(5):
            await publisher.publish(stored(number))
        await until(lambda: channel.next == 5)
        publisher.restart()
        await publisher.publish(stored(70))
        await until(lambda: channel.next == 1)
        assert "restarted" in str(ended(cursor))
        assert await snapshot(channel) == [70]
        assert channel.read_stats().complete
        await publisher.publish(stored(71))
        await until(lambda: channel.next == 2)
        assert channel.read_stats().restarts == 1


async def test_a_restart_is_not_taken_for_a_gap(publisher: FakePublisher) -> None:
    """The new publisher is already beyond our last number when it is first heard."""
    async with following(publisher) as channel:
        cursor = channel.cursor(0)
        await publisher.publish(stored(0))
        await publisher.publish(stored(1))
        await until(lambda: channel.next == 2)
        publisher.restart()
        for number in range(70, 75):
            publisher.lose(stored(number))
        await publisher.publish(stored(75))
        await until(lambda: channel.next == 6)
        assert "restarted" in str(ended(cursor))
        assert await snapshot(channel) == list(range(70, 76))


async def test_a_loss_at_the_end_is_found_while_idle(publisher: FakePublisher) -> None:
    async with following(publisher, idle_s=0.05) as channel:
        cursor = channel.cursor(0)
        await publisher.publish(stored(0))
        await until(lambda: channel.next == 1)
        publisher.lose(stored(1))
        await until(lambda: channel.next == 2)
        assert take_all(cursor, View()).numbers == [0, 1]
        assert channel.read_stats().restarts == 0


async def test_a_restart_is_found_while_idle(publisher: FakePublisher) -> None:
    async with following(publisher, idle_s=0.05) as channel:
        for number in range(3):
            await publisher.publish(stored(number))
        await until(lambda: channel.next == 3)
        publisher.restart()
        publisher.lose(stored(70))
        await until(lambda: channel.next == 1)
        assert await snapshot(channel) == [70]
        await publisher.publish(stored(71))
        await until(lambda: channel.next == 2)
        assert channel.read_stats().restarts == 1


async def test_a_publisher_that_keeps_nothing_is_not_taken_for_another(publisher: FakePublisher) -> None:
    async with following(publisher, idle_s=0.02) as channel:
        await publisher.publish(stored(0))
        await until(lambda: channel.next == 1)
        publisher.forget(before=1)
        asked = len(publisher.asked)
        await until(lambda: len(publisher.asked) > asked + 4)
        assert channel.read_stats().restarts == 0


async def test_a_batch_twice_counts_as_a_restart_but_harms_nothing(publisher: FakePublisher) -> None:
    async with following(publisher) as channel:
        await publisher.publish(stored(0))
        await publisher.publish(stored(1))
        await publisher.resend(1)
        await publisher.publish(stored(2))
        await until(lambda: channel.next == 3)
        assert await snapshot(channel) == [0, 1, 2]


async def test_what_does_not_decode_keeps_its_number(publisher: FakePublisher) -> None:
    async with following(publisher) as channel:
        cursor = channel.cursor(0)
        await publisher.publish(stored(0))
        await publisher.publish(raw=b"\xc1 not msgpack")
        await publisher.publish({"type": "BlockMoved"}, stored(2))
        await until(lambda: channel.next == 3)
        view = take_all(cursor, View())
        assert view.numbers == [0, 1, 2]
        assert blocks(view) == [0, 2]
        assert channel.read_stats().skipped.payloads == 1
        assert channel.read_stats().skipped.kinds == 1


async def test_only_the_topic_is_heard() -> None:
    async with publishing(topic="kv@model") as publisher, following(publisher) as channel:
        await publisher.publish(stored(0))
        await until(lambda: channel.next == 1)


@pytest.mark.parametrize("seed", range(5))
async def test_any_mixture_of_losses_ends_in_the_same_content(publisher: FakePublisher, seed: int) -> None:
    """Thousands of stores and removals, a fifth of them lost on the way: the index equals the whole history."""
    import random

    chance = random.Random(seed)
    present: list[int] = []
    async with following(publisher, idle_s=0.05) as channel:
        cursor, view = channel.cursor(0), View()
        for fresh in range(1500):
            events: list[Any] = [stored(fresh)]
            present.append(fresh)
            if len(present) > 50:
                events.append(removed(present.pop(chance.randrange(len(present)))))
            if chance.random() < 0.2:
                publisher.lose(*events)
            else:
                await publisher.publish(*events)
            if chance.random() < 0.02:
                await asyncio.sleep(0)
                take_all(cursor, view)
        await until(lambda: channel.next == publisher.next)
        assert blocks(take_all(cursor, view)) == sorted(present)
        assert await snapshot(channel) == sorted(present)
        assert channel.read_stats().restarts == 0
