"""Where KV events can be had from outside: the answer to GetKvEventSources (KVS-01 … KVS-03)."""

from __future__ import annotations

import ipaddress
import logging
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from openengine.v1 import kv_pb2
from openengine_adapters.core.kv.channel import KEPT_BATCHES
from openengine_adapters.engine import KvEventPublisher

log = logging.getLogger(__name__)

SOURCES = ("grpc", "native", "both")
SCHEMA_VERSION = 1

# An address of the documentation range: a datagram socket that is connected to it tells our own, and sends nothing.
_ELSEWHERE = ("192.0.2.1", 9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reachable:
    """Where this server is reached: what the operator says, else what can be derived from what it listens on."""

    advertise_host: str = ""
    listen_host: str = "127.0.0.1"
    port: int = 0

    def host(self) -> str:
        """A host that others can connect to, never a wildcard."""
        if self.advertise_host:
            return self.advertise_host
        return own_address() if is_wildcard(self.listen_host) else self.listen_host.strip("[]")


def is_wildcard(host: str) -> bool:
    """Whether a host means "every interface"."""
    host = host.strip("[]")
    if host in ("", "*"):
        return True
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def own_address() -> str:
    """This machine's address on the way out; the loopback address when there is no way out."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(_ELSEWHERE)
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


def sources(
    kind: str, publishers: Sequence[KvEventPublisher], ranks: Iterable[int], reachable: Reachable
) -> kv_pb2.GetKvEventSourcesResponse:
    """Describe the sources of `ranks`: this server's stream, the engine's publishers, or both."""
    wanted = set(ranks)
    found: list[kv_pb2.KvEventSource] = []
    for publisher in publishers:
        if publisher.rank not in wanted:
            continue
        if kind != "native":
            found.append(_stream(publisher.rank, reachable))
        if kind != "grpc" and (native := _native(publisher, reachable)) is not None:
            found.append(native)
    return kv_pb2.GetKvEventSourcesResponse(sources=found)


def warn_of_unreachable(kind: str, publishers: Sequence[KvEventPublisher]) -> None:
    """Say so when a native source is asked for that nobody outside can connect to."""
    for publisher in publishers:
        if kind != "grpc" and _address(publisher.endpoint) is None:
            log.warning(
                "rank %d: KV events at %s cannot be advertised; give the engine a tcp:// endpoint",
                publisher.rank,
                publisher.endpoint,
            )


def _stream(rank: int, reachable: Reachable) -> kv_pb2.KvEventSource:
    return kv_pb2.KvEventSource(
        transport="grpc",
        endpoint_addr=kv_pb2.KvEndpoint(host=reachable.host(), port=reachable.port, protocol="grpc"),
        data_parallel_rank=rank,
        encoding="protobuf",
        schema_version=SCHEMA_VERSION,
        buffer_steps=KEPT_BATCHES,
    )


def _native(publisher: KvEventPublisher, reachable: Reachable) -> kv_pb2.KvEventSource | None:
    address = _address(publisher.endpoint)
    if address is None:
        return None
    replay = _address(publisher.replay_endpoint)
    source = kv_pb2.KvEventSource(
        transport="zmq",
        endpoint_addr=kv_pb2.KvEndpoint(
            host=_seen_from_outside(address[0], publisher, reachable), port=address[1], protocol="tcp"
        ),
        topic=publisher.topic,
        data_parallel_rank=publisher.rank,
        encoding="msgpack",
        schema_version=SCHEMA_VERSION,
        buffer_steps=publisher.buffer_steps,
        hwm=publisher.hwm,
        max_queue_size=publisher.max_queue_size,
    )
    if replay is not None:
        host = _seen_from_outside(replay[0], publisher, reachable)
        source.replay_endpoint = f"tcp://{f'[{host}]' if ':' in host else host}:{replay[1]}"
    return source


def _address(endpoint: str) -> tuple[str, int] | None:
    parts = urlsplit(endpoint)
    if parts.scheme != "tcp" or not parts.hostname or not parts.port:
        return None
    return parts.hostname, parts.port


def _seen_from_outside(host: str, publisher: KvEventPublisher, reachable: Reachable) -> str:
    # What listens on one address only is reached there and nowhere else.
    return reachable.host() if publisher.every_interface or is_wildcard(host) else host
