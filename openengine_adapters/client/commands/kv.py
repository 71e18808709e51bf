"""`openengine kv sources|watch`."""

from __future__ import annotations

import argparse
import time
from collections import deque
from typing import TYPE_CHECKING

from openengine.v1 import kv_pb2
from openengine_adapters.client import OpenEngineClient
from openengine_adapters.client.arguments import add_actions, uint32, uint64
from openengine_adapters.client.commands._common import connected
from openengine_adapters.client.kv_view import CacheView
from openengine_adapters.client.layout import Cell, Line, table
from openengine_adapters.client.messages import to_json

if TYPE_CHECKING:
    from openengine_adapters.client.terminal import Terminal

_RATE_WINDOW = 10  # views over which a rate is taken


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Sources or events, of which ranks."""
    action = add_actions(parser)
    sources = action("sources", "where the server's KV events can be had")
    watch = action("watch", "the prefix cache as it changes; a live view on a terminal, else a line a batch")
    for each in (sources, watch):
        each.add_argument(
            "--rank",
            action="append",
            type=uint32,
            default=[],
            help="only this data-parallel rank; may be repeated",
        )
    watch.add_argument("--snapshot", action="store_true", help="begin with what the cache holds now")
    watch.add_argument(
        "--start", type=uint64, default=0, metavar="N", help="replay from this sequence number"
    )


async def run(args: argparse.Namespace, terminal: Terminal) -> int:
    """Carry the action out."""
    async with connected(args) as client:
        if args.action == "sources":
            await _sources(client, args, terminal)
        else:
            await _watch(client, args, terminal)
    return 0


async def _sources(client: OpenEngineClient, args: argparse.Namespace, terminal: Terminal) -> None:
    sources = (await client.kv_event_sources(args.rank)).sources
    if terminal.json:
        for source in sources:
            terminal.record(to_json(source))
        return
    header = [
        "rank",
        "transport",
        "endpoint",
        "topic",
        "replay",
        "encoding",
        "schema",
        "buffer",
        "hwm",
        "queue",
    ]
    terminal.lines(table(header, [_source_row(source) for source in sources]))


def _source_row(source: kv_pb2.KvEventSource) -> list[Cell]:
    reported = to_json(source)
    address = source.endpoint_addr
    endpoint = f"{address.protocol or 'tcp'}://{address.host}:{address.port}" if address.host else "-"
    numbers = ("schema_version", "buffer_steps", "hwm", "max_queue_size")
    return [
        reported.get("data_parallel_rank"),
        source.transport,
        endpoint,
        source.topic or "-",
        source.replay_endpoint or "-",
        source.encoding,
        *(reported.get(name) for name in numbers),
    ]


async def _watch(client: OpenEngineClient, args: argparse.Namespace, terminal: Terminal) -> None:
    stream = client.kv_events(args.rank, snapshot=args.snapshot, start=args.start, timeout=args.timeout)
    async with stream as batches:
        if terminal.interactive:
            view = _LiveView()
            with terminal.live(view.lines):
                async for batch in batches:
                    view.cache.apply(batch)
            return
        async for batch in batches:
            if terminal.json:
                terminal.record(to_json(batch))
            else:
                terminal.line(_summary(batch))


def _summary(batch: kv_pb2.KvEventBatch) -> str:
    counts = {"stored": 0, "removed": 0, "cleared": 0}
    for event in batch.events:
        match event.WhichOneof("event"):
            case "block_stored":
                counts["stored"] += len(event.block_stored.block_hashes)
            case "block_removed":
                counts["removed"] += len(event.block_removed.block_hashes)
            case "all_blocks_cleared":
                counts["cleared"] += 1
    changes = " ".join(f"{name}={count}" for name, count in counts.items() if count)
    return f"rank={batch.data_parallel_rank} sequence={batch.sequence_number} {changes}".rstrip()


class _LiveView:
    """The cache's state with the rates of its change."""

    def __init__(self) -> None:
        self.cache = CacheView()
        self._history: deque[tuple[float, dict[int, tuple[int, int]]]] = deque(maxlen=_RATE_WINDOW)

    def lines(self) -> list[Line]:
        """Return the view of this moment."""
        ranks = self.cache.ranks
        if not ranks:
            return [Line("no event yet", "dim")]
        now = time.monotonic()
        self._history.append((now, {rank: (view.stored, view.removed) for rank, view in ranks.items()}))
        then, counts = self._history[0]
        span = max(now - then, 1e-9)
        header = [
            "rank",
            "blocks",
            "chains",
            "longest",
            "stored/s",
            "removed/s",
            "clears",
            "lag ms",
            "sequence",
            "skipped",
        ]
        rows: list[list[Cell]] = []
        for rank, view in sorted(ranks.items()):
            stored, removed = counts.get(rank, (view.stored, view.removed))
            rates = [round((view.stored - stored) / span, 1), round((view.removed - removed) / span, 1)]
            lag = None if view.lag is None else round(view.lag * 1000, 1)
            place = [view.cleared, lag, view.sequence_number, view.skipped]
            rows.append([rank, view.blocks, *view.chains(), *rates, *place])
        return table(header, rows)
