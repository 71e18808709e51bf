"""`openengine load`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from openengine.v1 import observability_pb2
from openengine_adapters.client.commands._common import connected
from openengine_adapters.client.messages import to_json

if TYPE_CHECKING:
    from openengine_adapters.client.terminal import Cell, Terminal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """How much, and how often."""
    parser.add_argument("--per-rank", action="store_true", help="each data-parallel rank too")


async def run(args: argparse.Namespace, terminal: Terminal) -> int:
    """Print the load."""
    async with connected(args) as client:
        load = await client.load(per_rank=args.per_rank)
    if terminal.json:
        terminal.record(to_json(load))
    else:
        show(load, terminal)
    return 0


def show(load: observability_pb2.LoadInfo, terminal: Terminal) -> None:
    """Print one snapshot: all numbers of the contract, also those the engine does not report."""
    reported = to_json(load)
    numbers = (f.name for f in load.DESCRIPTOR.fields if f.has_presence and f.name != "timestamp_unix_nanos")
    facts: dict[str, Cell] = {name.replace("_", " "): reported.get(name) for name in numbers}
    terminal.facts(facts | dict(load.attributes))
    if load.ranks:
        names = [field.name for field in observability_pb2.RankLoadInfo.DESCRIPTOR.fields]
        rows = [[to_json(rank).get(name) for name in names] for rank in load.ranks]
        terminal.line()
        terminal.table(["rank", *(name.replace("_", " ") for name in names[1:])], rows)
