"""`make bench`: the front end's CPU per output token, as a ratio to a direct AsyncLLM consumer in the same run.

Three ways to consume the same streams from one running vLLM: directly, through a bare grpc.aio handler that only
builds and sends each delta, and through the adapter. The clients run in a process of their own, so that only
the server's side is counted. Rounds are interleaved; the median is shown.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from benchmarks.client import PROMPT
from tests.support import cpu_env

BARE = "/bench.Bare/Generate"
ADAPTER = "/openengine.v1.OpenEngine/Generate"


async def measure(work: Callable[[], Awaitable[None]]) -> float:
    """CPU seconds of this process, all threads, while `work` runs."""
    before = time.process_time()
    await work()
    return time.process_time() - before


async def main(streams_list: list[int], tokens: int, rounds: int) -> dict[str, Any]:
    """Start vLLM once and measure every combination."""
    import grpc
    from vllm import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind, SamplingParams
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from openengine.v1 import generate_pb2
    from openengine_adapters.vllm.engine import VllmEngine
    from tests.support.wire import serving

    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    engine = VllmEngine.from_flags(parser.parse_args(cpu_env.vllm_flags(cpu_env.TINY_LLAMA)))
    params = SamplingParams(
        temperature=0.0, max_tokens=tokens, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )
    results: dict[str, Any] = {}
    async with serving(engine) as wire:
        llm = engine.llm

        async def outputs() -> AsyncIterator[Any]:
            async for output in llm.generate({"prompt": PROMPT}, params, uuid.uuid4().hex):
                yield output

        async def bare(request: bytes, context: Any) -> AsyncIterator[bytes]:
            asked = generate_pb2.GenerateRequest.FromString(request)
            async for output in outputs():
                for one in output.outputs:
                    infos = [generate_pb2.TokenInfo(token_id=token_id) for token_id in one.token_ids]
                    token = generate_pb2.TokenOutput(output_index=one.index, tokens=infos, text=one.text)
                    response = generate_pb2.GenerateResponse(request_id=asked.request_id, token=token)
                    yield response.SerializeToString()

        plain = grpc.aio.server()
        handler = grpc.method_handlers_generic_handler(
            "bench.Bare", {"Generate": grpc.unary_stream_rpc_method_handler(bare)}
        )
        plain.add_generic_rpc_handlers((handler,))
        port = plain.add_insecure_port("127.0.0.1:0")
        await plain.start()

        async def remote(target: str, method: str, streams: int) -> None:
            words = (
                "-m",
                "benchmarks.client",
                target,
                method,
                wire.description.model_id,
                str(streams),
                str(tokens),
            )
            process = await asyncio.create_subprocess_exec(sys.executable, *words)
            if await process.wait():
                raise RuntimeError(f"the client ended with {process.returncode}")

        async def direct(streams: int) -> None:
            async def read() -> None:
                async for _ in outputs():
                    pass

            await asyncio.gather(*(read() for _ in range(streams)))

        for streams in streams_list:
            ways: dict[str, Callable[[], Awaitable[None]]] = {
                "direct": lambda streams=streams: direct(streams),  # type: ignore[misc]  # bound per round
                "bare": lambda streams=streams: remote(f"127.0.0.1:{port}", BARE, streams),  # type: ignore[misc]
                "adapter": lambda streams=streams: remote(wire.target, ADAPTER, streams),  # type: ignore[misc]
            }
            for work in ways.values():
                await work()
            cpu: dict[str, list[float]] = {name: [] for name in ways}
            for _ in range(rounds):
                for name, work in ways.items():
                    cpu[name].append(await measure(work))
            per_token = {
                name: statistics.median(values) / (streams * tokens) * 1e6 for name, values in cpu.items()
            }
            results[str(streams)] = {
                "cpu_us_per_token": {name: round(value, 1) for name, value in per_token.items()},
                "ratio_bare": round(per_token["bare"] / per_token["direct"], 2),
                "ratio_adapter": round(per_token["adapter"] / per_token["direct"], 2),
            }
        await plain.stop(0)
    return results


if __name__ == "__main__":
    options = argparse.ArgumentParser(prog="make bench")
    options.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64])
    options.add_argument("--tokens", type=int, default=128)
    options.add_argument("--rounds", type=int, default=5)
    chosen = options.parse_args()
    os.environ.update(cpu_env.vllm_env() | cpu_env.UNPAUSED)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    import uvloop

    found = uvloop.run(main(chosen.streams, chosen.tokens, chosen.rounds))
    print(json.dumps(found, indent=2), file=sys.stdout)
