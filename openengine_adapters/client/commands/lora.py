"""`openengine lora load|unload|list`."""

from __future__ import annotations

import argparse
import os
import zlib
from typing import TYPE_CHECKING

from openengine_adapters.client.arguments import add_actions, int64
from openengine_adapters.client.commands._common import LONG_TIMEOUT, connected
from openengine_adapters.client.layout import Cell, table
from openengine_adapters.client.messages import to_json

if TYPE_CHECKING:
    from openengine_adapters.client.terminal import Terminal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to do with which adapter."""
    action = add_actions(parser)
    load = action("load", "make an adapter available")
    load.add_argument("name", help="the name that requests use")
    load.add_argument("path", type=os.path.abspath, help="its directory, as the server sees it")
    load.add_argument("--id", type=int64, help="its number, above 0 (default: made from the name)")
    unload = action("unload", "take an adapter away, once no request uses it")
    unload.add_argument("name", help="the name it was loaded under")
    action("list", "adapters loaded at present")


async def run(args: argparse.Namespace, terminal: Terminal) -> int:
    """Carry the action out."""
    timeout = args.timeout or LONG_TIMEOUT
    async with connected(args) as client:
        match args.action:
            case "load":
                lora_id = _id_of(args.name) if args.id is None else args.id
                loaded = await client.load_lora(args.name, args.path, lora_id, timeout=timeout)
                record = to_json(loaded)
                done = "was loaded already" if loaded.already_loaded else "loaded"
                adapters = [loaded.adapter]
            case "unload":
                unloaded = await client.unload_lora(args.name, timeout=timeout)
                record, done, adapters = to_json(unloaded), "unloaded", [unloaded.adapter]
            case _:
                listed = await client.list_loras(timeout=timeout)
                record, done, adapters = to_json(listed), "", list(listed.adapters)
    if terminal.json:
        terminal.record(record)
    elif done:
        adapter = adapters[0]
        terminal.line(f"{done}: {adapter.lora_name} (id {adapter.lora_id}) from {adapter.source_path}")
    else:
        rows: list[list[Cell]] = [[each.lora_name, each.lora_id, each.source_path] for each in adapters]
        terminal.lines(table(["name", "id", "path"], rows))
    return 0


def _id_of(name: str) -> int:
    """Return a number that is the same for a name everywhere."""
    return zlib.crc32(name.encode()) & 0x7FFFFFFF or 1
