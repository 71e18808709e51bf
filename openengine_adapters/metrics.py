# SPDX-License-Identifier: Apache-2.0
"""What a server counts, as Prometheus reads it. Imported only when it is wanted: prometheus-client is an extra."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from openengine_adapters.core.kv.stats import RankStats
from openengine_adapters.engine import StartupError

_PREFIX = "openengine_kv_"

# Name, help, and how to read it: what only grows is a counter, the rest is as it is now.
_COUNTERS: tuple[tuple[str, str, Callable[[RankStats], float]], ...] = (
    ("batches", "KV event batches received from the engine", lambda rank: rank.batches),
    ("stored_blocks", "Blocks that the engine stored", lambda rank: rank.stored_blocks),
    ("removed_blocks", "Blocks that the engine removed", lambda rank: rank.removed_blocks),
    ("clears", "Times that the engine cleared its cache", lambda rank: rank.cleared),
    ("unknown_removals", "Removals of blocks that the index did not know", lambda rank: rank.unknown_removals),
    ("undecoded_payloads", "Payloads that could not be decoded", lambda rank: rank.skipped.payloads),
    ("unknown_events", "Events of unknown kinds, passed over", lambda rank: rank.skipped.kinds),
    ("malformed_events", "Events of known kinds, malformed, passed over", lambda rank: rank.skipped.events),
    ("unknown_fields", "Unknown fields of events, passed over", lambda rank: rank.skipped.fields),
    ("gaps", "Breaks in the engine's sequence numbers", lambda rank: rank.gaps),
    ("repaired_gaps", "Breaks closed from the engine's replay socket", lambda rank: rank.repaired),
    ("restarts", "Times that the history began anew", lambda rank: rank.restarts),
    ("dropped_subscribers", "Subscribers ended because they read too slowly", lambda rank: rank.overloaded),
)  # fmt: skip
_GAUGES: tuple[tuple[str, str, Callable[[RankStats], float]], ...] = (
    ("subscribers", "Subscribers now", lambda rank: rank.subscribers),
    ("index_blocks", "Distinct blocks in the index now", lambda rank: rank.blocks),
    ("index_complete", "1 while the index holds the whole cache", lambda rank: rank.complete),
    ("lag_seconds", "From the last batch's timestamp to its arrival", lambda rank: rank.lag_s),
    ("next_sequence_number", "The sequence number that comes next", lambda rank: rank.next_sequence_number),
)

_CLOSE_S = 5.0


class KvMetrics(Collector):
    """The counters of the KV plane, by data-parallel rank, as a Prometheus collector."""

    def __init__(self, read: Callable[[], Iterable[RankStats]]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        """Each metric, with one sample for each rank."""
        ranks = list(self._read())
        for family, table in ((CounterMetricFamily, _COUNTERS), (GaugeMetricFamily, _GAUGES)):
            for name, text, value in table:
                metric = family(_PREFIX + name, text, labels=["data_parallel_rank"])
                for rank in ranks:
                    metric.add_metric([str(rank.rank)], value(rank))
                yield metric


@contextlib.contextmanager
def serving(host: str, port: int, read: Callable[[], Iterable[RankStats]]) -> Iterator[int]:
    """Answer GET /metrics in a thread while the block runs, over plain HTTP; yields the port, 0 is a free one.

    Raises `StartupError` if the port cannot be had.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(KvMetrics(read))
    try:
        server, thread = start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        raise StartupError(f"--metrics-port {port}: {error.strerror}; choose another port") from error
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join(_CLOSE_S)
