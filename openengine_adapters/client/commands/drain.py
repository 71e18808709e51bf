"""`openengine drain`."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
from typing import TYPE_CHECKING

from openengine_adapters.client import DrainStep
from openengine_adapters.client.arguments import seconds
from openengine_adapters.client.commands._common import connected

if TYPE_CHECKING:
    from openengine_adapters.client.terminal import Terminal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """How long, and what then."""
    parser.add_argument(
        "--deadline", type=seconds, metavar="SECONDS", help="wait for so long (default: for ever)"
    )
    parser.add_argument("--abort-after-deadline", action="store_true", help="then abort what still runs")
    parser.add_argument("--keep-accepting", action="store_true", help="go on taking new requests meanwhile")


async def run(args: argparse.Namespace, terminal: Terminal) -> int:
    """Print the drain's progress until it is complete."""
    async with (
        connected(args) as client,
        client.drain(
            stop_accepting=not args.keep_accepting,
            deadline=args.deadline,
            abort_after_deadline=args.abort_after_deadline,
            timeout=args.timeout,
        ) as steps,
    ):
        try:
            async for step in steps:
                if terminal.json:
                    terminal.record(dataclasses.asdict(step))
                else:
                    terminal.line(_text(step), "green" if step.state == "COMPLETE" else "")
        except asyncio.CancelledError:
            if not terminal.json:
                terminal.note("the server goes on draining")
            raise
    return 0


def _text(step: DrainStep) -> str:
    counts = []
    if step.in_flight_requests is not None:
        counts.append(f"{step.in_flight_requests} requests in flight")
    if step.open_kv_sessions is not None:
        counts.append(f"{step.open_kv_sessions} KV sessions open")
    state = step.state.lower().replace("_", " ")
    return ": ".join(filter(None, (state, ", ".join(counts), step.message)))
