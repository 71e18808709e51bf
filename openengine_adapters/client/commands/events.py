"""`openengine events`."""

from __future__ import annotations

import argparse
from datetime import datetime
from typing import TYPE_CHECKING

from openengine.v1 import observability_pb2
from openengine_adapters.client.commands._common import connected
from openengine_adapters.client.layout import one_line
from openengine_adapters.client.messages import enum_name, enum_value, to_json

if TYPE_CHECKING:
    from openengine_adapters.client.terminal import Terminal

_TYPES = ("forward-pass", "batch", "queue", "transfer")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which events."""
    parser.add_argument(
        "--type",
        action="append",
        choices=_TYPES,
        default=[],
        help="only events of this type; may be repeated (default: all)",
    )


async def run(args: argparse.Namespace, terminal: Terminal) -> int:
    """Print events as they come, until the server ends or the command is interrupted."""
    types = [enum_value(observability_pb2.RuntimeEventType, name) for name in args.type]
    async with (
        connected(args) as client,
        client.runtime_events(types, timeout=args.timeout) as events,
    ):
        async for event in events:
            if terminal.json:
                terminal.record(to_json(event))
            else:
                terminal.line(_text(event))
    return 0


def _text(event: observability_pb2.RuntimeEvent) -> str:
    taken = datetime.fromtimestamp(event.timestamp_unix_nanos / 1e9)
    kind = enum_name(observability_pb2.RuntimeEventType, event.type)
    attributes = " ".join(f"{key}={one_line(value)}" for key, value in sorted(event.attributes.items()))
    return f"{taken:%H:%M:%S.%f} {kind:<12} {attributes}"
