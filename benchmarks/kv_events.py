"""`make bench-kv`: what KV events cost an engine, as ratios to the same engine without them in the same run.

Two vLLM servers with a small cache, one with `--kv-events`, serve the same load in turn: prompts that are all new, so
that every block is stored and evicts another. The one with events does it without subscribers and with two hundred,
some of which do not read. Clients and subscribers take their part of the same cores.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import time
import uuid
from dataclasses import dataclass, field

import grpc
import psutil

from benchmarks.beside import cpu_seconds, running
from openengine.v1 import generate_pb2, inputs_pb2, observability_pb2, service_pb2_grpc
from tests.support import cpu_env
from tests.support.server import Server, serving

SMALL_CACHE = ["--num-gpu-blocks-override", "600"]
PROMPT_TOKENS, OUTPUT_TOKENS, AT_ONCE = 480, 32, 16
STEADY, STALLED = 180, 20


@dataclass
class Figures:
    """One way to serve: seconds for the load, median step in microseconds, CPU seconds of the front end."""

    seconds: list[float] = field(default_factory=list)
    step_us: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)

    def medians(self) -> dict[str, float]:
        """The median of the rounds, by name."""
        return {name: statistics.median(values) for name, values in vars(self).items()}


async def serve_load(server: Server, figures: Figures, requests: int, chance: random.Random) -> None:
    """Send `requests` requests, `AT_ONCE` at a time, and note what they took."""
    process = psutil.Process(server.pid)
    async with grpc.aio.insecure_channel(server.target) as channel:
        stub = service_pb2_grpc.OpenEngineStub(channel)
        free = asyncio.Semaphore(AT_ONCE)
        steps: list[int] = []

        async def one() -> None:
            prompt = [chance.randrange(300, 900) for _ in range(PROMPT_TOKENS)]
            request = generate_pb2.GenerateRequest(
                request_id=uuid.uuid4().hex,
                model="tiny",
                token_ids=inputs_pb2.TokenIds(ids=prompt),
                sampling=generate_pb2.SamplingParams(temperature=0.0),
                stopping=generate_pb2.StoppingOptions(max_tokens=OUTPUT_TOKENS, ignore_eos=True),
            )
            async with free:
                async for _ in stub.Generate(request):
                    pass

        watched = stub.SubscribeRuntimeEvents(
            observability_pb2.SubscribeRuntimeEventsRequest(
                types=[observability_pb2.RUNTIME_EVENT_TYPE_FORWARD_PASS]
            )
        )
        await watched.initial_metadata()

        async def watch() -> None:
            with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
                async for response in watched:
                    duration = int(response.runtime_event.attributes["duration_us"])
                    steps.append(duration)

        watching = asyncio.create_task(watch())
        cpu, began = cpu_seconds(process), time.perf_counter()
        await asyncio.gather(*(one() for _ in range(requests)))
        figures.seconds.append(time.perf_counter() - began)
        figures.cpu_seconds.append(cpu_seconds(process) - cpu)
        figures.step_us.append(statistics.median(steps))
        watched.cancel()
        await watching


def main(rounds: int, requests: int) -> None:
    """Measure the three ways in turn, `rounds` times, and print medians and ratios."""
    chance = random.Random(0)
    off, alone, followed = Figures(), Figures(), Figures()
    # vLLM tells how long a step took only when it is asked for details.
    flags = [*SMALL_CACHE, "--served-model-name", "tiny", "--enable-logging-iteration-details"]
    env = cpu_env.UNPAUSED
    with (
        serving("vllm", flags=flags, env=env) as plain,
        serving("vllm", flags=[*flags, "--kv-events"], env=env) as events,
    ):
        for server in (plain, events):
            asyncio.run(serve_load(server, Figures(), requests, chance))  # the first load warms up
        for _ in range(rounds):
            asyncio.run(serve_load(plain, off, requests, chance))
            asyncio.run(serve_load(events, alone, requests, chance))
            with running("benchmarks.subscribers", events.target, str(STEADY), str(STALLED)):
                asyncio.run(serve_load(events, followed, requests, chance))
    base = off.medians()
    print(json.dumps({"without": {name: round(value, 3) for name, value in base.items()}}))
    for name, figures in (("events", alone), (f"{STEADY + STALLED} subscribers", followed)):
        ratios = {key: round(value / base[key], 3) for key, value in figures.medians().items()}
        print(json.dumps({f"{name}, ratio": ratios}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=48)
    chosen = parser.parse_args()
    main(chosen.rounds, chosen.requests)
