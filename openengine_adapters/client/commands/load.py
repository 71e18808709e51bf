"""`openengine load`."""

from __future__ import annotations

import argparse
import asyncio
import time
from typing import TYPE_CHECKING

from openengine.v1 import observability_pb2
from openengine_adapters.client.arguments import positive
from openengine_adapters.client.commands._common import connected
from openengine_adapters.client.layout import Cell, Line, facts, one_line, table
from openengine_adapters.client.messages import to_json

if TYPE_CHECKING:
    from openengine_adapters.client.terminal import Terminal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """How much, and how often."""
    parser.add_argument("--per-rank", action="store_true", help="each data-parallel rank too")
    parser.add_argument(
        "--watch",
        nargs="?",
        const=1.0,
        type=positive,
        metavar="SECONDS",
        help="ask again and again until interrupted (default: every second)",
    )


async def run(args: argparse.Namespace, terminal: Terminal) -> int:
    """Print the load once, or keep it on the screen."""
    async with connected(args) as client:
        load = await client.load(per_rank=args.per_rank)
        if args.watch is None:
            terminal.record(to_json(load)) if terminal.json else terminal.lines(_view(load))
            return 0
        if terminal.interactive:
            with terminal.live(lambda: _view(load)):
                while True:
                    await asyncio.sleep(args.watch)
                    load = await client.load(per_rank=args.per_rank)
        while True:
            terminal.record(to_json(load)) if terminal.json else terminal.line(_summary(load))
            await asyncio.sleep(args.watch)
            load = await client.load(per_rank=args.per_rank)


def _view(load: observability_pb2.LoadInfo) -> list[Line]:
    """Return all numbers of the contract, also those that the engine does not report."""
    reported = to_json(load)
    numbers: dict[str, Cell] = {
        field.name.replace("_", " "): reported.get(field.name)
        for field in load.DESCRIPTOR.fields
        if field.has_presence and field.name != "timestamp_unix_nanos"
    }
    lines = facts(numbers | dict(load.attributes))
    if load.ranks:
        names = [field.name for field in observability_pb2.RankLoadInfo.DESCRIPTOR.fields]
        rows = [[to_json(rank).get(name) for name in names] for rank in load.ranks]
        lines += [Line(""), *table(["rank", *(name.replace("_", " ") for name in names[1:])], rows)]
    return lines


def _summary(load: observability_pb2.LoadInfo) -> str:
    taken = load.timestamp_unix_nanos / 1e9 if load.timestamp_unix_nanos else time.time()
    reported = {name: value for name, value in to_json(load).items() if isinstance(value, int)}
    reported.pop("timestamp_unix_nanos", None)
    words = [f"{name}={value}" for name, value in reported.items()]
    words += [f"{name}={one_line(value)}" for name, value in load.attributes.items()]
    return " ".join([time.strftime("%H:%M:%S", time.localtime(taken)), *words])
