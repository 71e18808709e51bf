"""The subscribers of the KV event benchmark, in a process of their own: they read raw bytes until they are killed.

Run as `python -m benchmarks.subscribers TARGET STEADY STALLED`; prints a line when all are subscribed.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import grpc

from openengine.v1 import kv_pb2

METHOD = "/openengine.v1.OpenEngine/SubscribeKvEvents"
CHANNELS = 8


async def main(target: str, steady: int, stalled: int) -> None:
    """Subscribe `steady` times and read, and `stalled` times without reading."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    channels = [grpc.aio.insecure_channel(target, options) for _ in range(CHANNELS)]
    request = kv_pb2.SubscribeKvEventsRequest(include_snapshot=True).SerializeToString()

    async def subscribe(at: int) -> Any:
        method: Any = channels[at % CHANNELS].unary_stream(METHOD)
        call = method(request)
        await call.initial_metadata()
        return call

    async def follow(call: Any) -> None:
        async for _ in call:
            pass

    calls = [await subscribe(at) for at in range(steady + stalled)]
    print("subscribed", flush=True)
    await asyncio.gather(*(follow(call) for call in calls[:steady]))


if __name__ == "__main__":
    _, to, reading, waiting = sys.argv
    asyncio.run(main(to, int(reading), int(waiting)))
