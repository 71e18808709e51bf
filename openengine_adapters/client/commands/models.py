"""`openengine models`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from openengine_adapters.client.commands._common import connected
from openengine_adapters.client.layout import Cell, facts
from openengine_adapters.client.messages import to_json

if TYPE_CHECKING:
    from openengine_adapters.client.terminal import Terminal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which models."""
    parser.add_argument("model", nargs="*", help="names of models (default: all that are served)")


async def run(args: argparse.Namespace, terminal: Terminal) -> int:
    """Print limits and abilities, a model after the other."""
    async with connected(args) as client:
        for number, name in enumerate(args.model or client.engine.supported_models):
            model = await client.model_info(name)
            if terminal.json:
                terminal.record(to_json(model))
                continue
            if number:
                terminal.line()
            values = dict(_flat(to_json(model)))
            del values["model id"]
            terminal.lines(facts(values, title=model.model_id))
    return 0


def _flat(message: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Cell]]:
    """Yield a nested message as one list of names and values, leaving out what is empty."""
    for name, value in message.items():
        label = prefix + name.replace("_", " ")
        if isinstance(value, Mapping):
            yield from _flat(value, f"{label}: ")
        elif isinstance(value, list):
            if value:
                yield label, ", ".join(map(str, value))
        elif value != "":
            yield label, value
