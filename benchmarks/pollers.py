"""The pollers of the load benchmark, in a process of their own: each asks GetLoad at a steady rate until told to stop.

Run as `python -m benchmarks.pollers TARGET POLLERS RATE`; prints a line when all poll, and once its standard input is
closed what they saw, as JSON.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from typing import Any

import grpc

from openengine.v1 import observability_pb2

METHOD = "/openengine.v1.OpenEngine/GetLoad"


async def main(target: str, pollers: int, rate: float) -> None:
    """Poll from `pollers` connections, `rate` times a second each."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    request = observability_pb2.GetLoadRequest(include_per_rank=True).SerializeToString()
    loop = asyncio.get_running_loop()
    milliseconds: list[float] = []

    async def poll(ask: Any, at: float) -> None:
        while True:
            await asyncio.sleep(at - loop.time())
            sent = time.perf_counter()
            await ask(request)
            milliseconds.append((time.perf_counter() - sent) * 1000)
            # A poller that is late asks next when it is its turn again, and does not catch up.
            at = max(at + 1 / rate, loop.time())

    channels = [grpc.aio.insecure_channel(target, options) for _ in range(pollers)]
    asks: list[Any] = [channel.unary_unary(METHOD) for channel in channels]
    for ask in asks:
        await ask(request)  # connects
    began = loop.time()
    polling = [
        asyncio.create_task(poll(ask, began + number / pollers / rate)) for number, ask in enumerate(asks)
    ]
    print("polling", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    seconds = loop.time() - began
    for task in polling:
        task.cancel()
    await asyncio.gather(*polling, return_exceptions=True)
    cuts = statistics.quantiles(milliseconds, n=100)
    print(json.dumps({"polls_per_s": len(milliseconds) / seconds, "p50_ms": cuts[49], "p99_ms": cuts[98]}))


if __name__ == "__main__":
    _, to, at_once, each = sys.argv
    asyncio.run(main(to, int(at_once), float(each)))
