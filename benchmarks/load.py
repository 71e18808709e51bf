"""`make bench-load`: what ten pollers of GetLoad cost the streams of a server, as ratios to the same load without them.

One server serves the same batch of streams in turn without pollers and with ten that ask a hundred times a second
each. Clients and pollers take their part of the same cores.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator

import psutil

from benchmarks import client
from benchmarks.beside import cpu_seconds, running
from tests.support import cpu_env
from tests.support.server import Server, serving

POLLERS, RATE = 10, 100.0
METHOD = "/openengine.v1.OpenEngine/Generate"

Figures = defaultdict[str, list[float]]


def serve_streams(server: Server, figures: Figures, streams: int, tokens: int) -> None:
    """Read a batch of streams; note tokens a second, and CPU seconds of the server's own process."""
    process = psutil.Process(server.pid)
    model = str(cpu_env.model(cpu_env.TINY_LLAMA))
    cpu, began = cpu_seconds(process), time.perf_counter()
    asyncio.run(client.main(server.target, METHOD, model, streams, tokens))
    seconds, spent = time.perf_counter() - began, cpu_seconds(process)
    figures["tokens_per_s"].append(streams * tokens / seconds)
    figures["cpu_share"].append((spent - cpu) / seconds)


@contextlib.contextmanager
def polled(server: Server, figures: Figures) -> Iterator[None]:
    """Ten pollers while the block runs; what they saw joins the figures."""
    with running("benchmarks.pollers", server.target, str(POLLERS), str(RATE)) as process:
        yield
        seen, _ = process.communicate()
        for name, value in json.loads(seen).items():
            figures[name].append(value)


def main(engine: str, rounds: int, streams: int, tokens: int) -> None:
    """Measure both in turn, `rounds` times, and print medians and the ratio."""
    alone, followed = Figures(list), Figures(list)
    with serving(engine, env=cpu_env.UNPAUSED) as server:
        serve_streams(server, Figures(list), streams, tokens)  # the first batch warms up
        for _ in range(rounds):
            serve_streams(server, alone, streams, tokens)
            with polled(server, followed):
                serve_streams(server, followed, streams, tokens)
    for name, figures in (("without", alone), (f"{POLLERS} pollers", followed)):
        medians = {key: round(statistics.median(values), 2) for key, values in figures.items()}
        print(json.dumps({f"{engine}, {name}": medians}))
    ratios = [more / less for more, less in zip(followed["tokens_per_s"], alone["tokens_per_s"], strict=True)]
    print(json.dumps({f"{engine}, tokens a second, ratio": [round(ratio, 2) for ratio in sorted(ratios)]}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=cpu_env.ENGINES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    chosen = parser.parse_args()
    main(chosen.engine, chosen.rounds, chosen.streams, chosen.tokens)
