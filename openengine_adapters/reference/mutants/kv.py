"""Mutants of the KV plane and of disaggregation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import grpc

from openengine_adapters.reference.mutants.seams import Tamper, request_of, response_of, tampers

_SOURCES, _EVENTS = "GetKvEventSources", "SubscribeKvEvents"


@response_of(_SOURCES, "wildcard_endpoint", "KVS-01", "A source's address is a wildcard.")
def _(response: Any) -> None:
    for source in response.sources:
        source.endpoint_addr.host = "0.0.0.0"


@request_of(_SOURCES, "sources_unfiltered", "KVS-01", "The ranks asked for are not looked at.")
def _(request: Any) -> None:
    del request.data_parallel_ranks[:]


@response_of(_SOURCES, "source_without_rank", "KVS-03", "A source does not name its rank.")
def _(response: Any) -> None:
    for source in response.sources:
        source.ClearField("data_parallel_rank")


@tampers(_EVENTS, "one_number", "KVE-02", "All batches have the same sequence number.")
class _OneNumber(Tamper):
    number = -1

    def response(self, response: Any) -> Iterable[Any]:
        if response.HasField("batch"):
            if self.number < 0:
                self.number = response.batch.sequence_number
            response.batch.sequence_number = self.number
        return (response,)


@response_of(_EVENTS, "blocks_without_tokens", "KVE-01", "Stored blocks do not name their tokens.")
def _(response: Any) -> None:
    for event in response.batch.events:
        if event.HasField("block_stored"):
            del event.block_stored.token_ids[:]


@response_of(_EVENTS, "batch_without_time", "KVE-01", "Batches have no timestamp.")
def _(response: Any) -> None:
    response.batch.timestamp_unix_nanos = 0


@tampers(_EVENTS, "silent_loss", "KVE-02", "Every third batch gets lost, and nobody says so.")
class _SilentLoss(Tamper):
    count = 0

    def response(self, response: Any) -> Iterable[Any]:
        self.count += 1
        return () if self.count % 3 == 0 else (response,)


@request_of(_EVENTS, "start_ignored", "KVE-03", "Batches come from now on whatever start was asked for.")
def _(request: Any) -> None:
    request.start_sequence_number = 0


@request_of(_EVENTS, "no_snapshot", "KVE-04", "A snapshot is asked for and does not come.")
def _(request: Any) -> None:
    request.include_snapshot = False


@request_of(
    _EVENTS, "ranks_unfiltered", "KVE-05", "Events of every rank come.", settings={"data_parallel_size": 2}
)
def _(request: Any) -> None:
    del request.data_parallel_ranks[:]


@tampers(_EVENTS, "quiet_subscription", "KVE-07", "The initial metadata waits for the first event.")
class _QuietSubscription(Tamper):
    sends_headers = False


@response_of(_EVENTS, "little_endian_hashes", "KVE-08", "Hashes are written in the other byte order.")
def _(response: Any) -> None:
    for event in response.batch.events:
        for name in ("block_stored", "block_removed"):
            if event.HasField(name):
                for value in getattr(event, name).block_hashes:
                    value.value = value.value[:-1]


@tampers(
    _EVENTS, "off_without_a_way", "KVE-06", "The refusal does not say how KV events come on.",
    settings={"kv_events": False},
)  # fmt: skip
class _OffWithoutAWay(Tamper):
    def refusal(self, code: grpc.StatusCode, details: str) -> tuple[grpc.StatusCode, str]:
        return code, "not here"
