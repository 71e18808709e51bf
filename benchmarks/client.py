"""The client process of the benchmark: read streams to their end, as raw bytes.

Run as `python -m benchmarks.client TARGET METHOD MODEL STREAMS TOKENS`.
"""

from __future__ import annotations

import asyncio
import sys
import uuid
from typing import Any

import grpc

from openengine.v1 import generate_pb2

PROMPT = "The capital of France is"


def request_bytes(model: str, tokens: int) -> bytes:
    """One greedy request of `tokens` tokens with an id of its own."""
    return generate_pb2.GenerateRequest(
        request_id=uuid.uuid4().hex,
        model=model,
        prompt=PROMPT,
        sampling=generate_pb2.SamplingParams(temperature=0.0),
        stopping=generate_pb2.StoppingOptions(max_tokens=tokens, ignore_eos=True),
    ).SerializeToString()


async def main(target: str, method: str, model: str, streams: int, tokens: int) -> None:
    """Read `streams` streams at once."""
    async with grpc.aio.insecure_channel(target) as channel:
        call: Any = channel.unary_stream(method)

        async def read() -> None:
            async for _ in call(request_bytes(model, tokens)):
                pass

        await asyncio.gather(*(read() for _ in range(streams)))


if __name__ == "__main__":
    _, to, rpc, name, at_once, length = sys.argv
    asyncio.run(main(to, rpc, name, int(at_once), int(length)))
