"""Two hundred subscribers, some stalled and some vanishing, while thousands of blocks come and go."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import grpc
import psutil

from openengine.v1 import kv_pb2, service_pb2_grpc
from tests.core.conftest import until
from tests.core.kv.conftest import Subscriber, kv_serving
from tests.core.kv.publisher import publishing, removed, stored
from tests.core.kv.view import view_of

STEADY, STALLED, VANISHING = 160, 20, 20
REBUILDING = 8
"""Of the steady ones, so many follow the content as well as the numbers."""

BATCHES, BLOCKS = 100, 40
HELD = 2000
"""Blocks in the cache at the end."""


async def test_two_hundred_subscribers() -> None:
    """KVE-05: the steady ones see every batch, the others harm nobody, and memory stays bounded."""
    chance = random.Random(7)
    async with publishing() as publisher, kv_serving([publisher.describe()]) as kv:
        await publisher.subscribed()
        channels = [
            grpc.aio.insecure_channel(kv.target, [("grpc.use_local_subchannel_pool", 1)]) for _ in range(8)
        ]
        stubs: list[Any] = [service_pb2_grpc.OpenEngineStub(channel) for channel in channels]

        async def subscribe(at: int) -> Subscriber:
            call = stubs[at % len(stubs)].SubscribeKvEvents(
                kv_pb2.SubscribeKvEventsRequest(include_snapshot=at % 2 == 0)
            )
            await call.initial_metadata()
            return Subscriber(call)

        everybody = await asyncio.gather(*(subscribe(at) for at in range(STEADY + STALLED + VANISHING)))
        steady, stalled = everybody[:STEADY], everybody[STEADY : STEADY + STALLED]
        vanishing = everybody[STEADY + STALLED :]

        async def follow(subscriber: Subscriber) -> None:
            numbers = [(await subscriber.batch()).sequence_number]
            while numbers[-1] < BATCHES - 1:
                numbers.append((await subscriber.batch()).sequence_number)
            assert numbers == list(range(numbers[0], BATCHES))

        async def rebuild(subscriber: Subscriber) -> list[bytes]:
            view = view_of(await subscriber.batches(upto=BATCHES - 1))
            return sorted(key[0] for key in view.copies.elements())

        following = [asyncio.create_task(follow(one)) for one in steady[REBUILDING:]]
        rebuilding = [asyncio.create_task(rebuild(one)) for one in steady[:REBUILDING]]
        before = psutil.Process().memory_info().rss
        present: list[int] = []
        for fresh in range(BATCHES):
            new = range(fresh * BLOCKS, (fresh + 1) * BLOCKS)
            present.extend(new)
            events: list[Any] = [stored(*new)]
            while len(present) > HELD:
                events.append(removed(present.pop(chance.randrange(len(present)))))
            await publisher.publish(*events)
            if fresh % 4 == 0 and vanishing:
                vanishing.pop().call.cancel()
            await asyncio.sleep(0.002)
        await asyncio.gather(*following)
        found = await asyncio.gather(*rebuilding)
        expected = sorted(number.to_bytes(8) for number in present)
        assert all(each == expected for each in found)
        assert psutil.Process().memory_info().rss - before < 300 * 2**20
        await until(lambda: kv.servicer.kv.stats()[0].subscribers == STEADY + STALLED)
        assert kv.servicer.kv.stats()[0].blocks == HELD
        for one in stalled:
            one.call.cancel()
        await asyncio.gather(*(channel.close() for channel in channels))
        await until(lambda: kv.servicer.kv.stats()[0].subscribers == 0)
