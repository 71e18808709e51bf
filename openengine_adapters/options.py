"""The options that every server command shares, in one group of its `--help`."""

from __future__ import annotations

import argparse
import os
import socket
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from openengine_adapters.core.capabilities import DEFAULT_SCHEMA_RELEASE, check_schema_release
from openengine_adapters.core.fetch import HostRule
from openengine_adapters.core.handoff.roles import HandOffWanted
from openengine_adapters.core.kv.discovery import SOURCES, Reachable, is_wildcard
from openengine_adapters.core.kv.messages import HASH_ENCODERS
from openengine_adapters.core.media import MediaPolicy
from openengine_adapters.engine import Lora, StartupError

ROLES = ("aggregated", "prefill", "decode")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Parsed server options. Times are seconds, sizes MiB."""

    host: str
    port: int
    instance_id: str
    schema_release: str
    advertise_host: str
    role: str | None
    kv_session_port: int
    kv_session_timeout: float
    kv_transfer_timeout: float
    kv_events: bool
    kv_source: str
    kv_hash_encoding: str
    metrics_port: int | None
    stall_timeout: float
    hang_timeout: float
    drain_grace: float
    stay_up: bool
    max_message_mib: int
    media: MediaPolicy
    log_level: str
    log_format: str
    print_capabilities: bool

    @property
    def hand_off(self) -> HandOffWanted:
        """What a disaggregated server needs of these options."""
        host = Reachable(advertise_host=self.advertise_host, listen_host=self.host).host()
        return HandOffWanted(
            role=self.role,
            host=host,
            port=self.kv_session_port,
            timeout=self.kv_session_timeout,
            transfer_timeout=self.kv_transfer_timeout,
        )


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """Add the shared options to `parser`."""
    group = parser.add_argument_group("OpenEngine server")
    group.add_argument("--host", default="0.0.0.0", help="address to listen on (default: all)")
    group.add_argument(
        "--port", type=_port, default=50051, help="gRPC port, 0 for a free one (default: 50051)"
    )
    group.add_argument(
        "--instance-id", default="", help="name of this server in discovery (default: host and a random part)"
    )
    group.add_argument(
        "--schema-release",
        type=_release,
        default=DEFAULT_SCHEMA_RELEASE,
        help="OpenEngine release or commit to report; never a moving name (default: the commit this was built from)",
    )
    group.add_argument(
        "--advertise-host", type=_routable,
        help="host that others reach this one by (default: derived)",
    )  # fmt: skip
    group.add_argument(
        "--role", choices=ROLES, help="role, where the engine's own configuration leaves it open"
    )
    group.add_argument(
        "--kv-session-port", type=_port, default=0, metavar="PORT",
        help="port where a prefill server answers decode servers, 0 for a free one (default: 0)",
    )  # fmt: skip
    group.add_argument(
        "--kv-session-timeout", type=_seconds, default=30.0, metavar="S",
        help="how long a prefill server waits for a decode server (default: 30; less where the engine's lease is)",
    )  # fmt: skip
    group.add_argument(
        "--kv-transfer-timeout", type=_seconds, default=120.0, metavar="S",
        help="how long a request of a decode server may wait for its blocks, the queue included (default: 120)",
    )  # fmt: skip
    group.add_argument(
        "--kv-events", action=argparse.BooleanOptionalAction, default=False,
        help="publish KV cache events; flags of the engine for the same go before (default: off)",
    )  # fmt: skip
    group.add_argument(
        "--kv-source", choices=SOURCES, default="grpc",
        help="KV event sources to advertise: SubscribeKvEvents here, the engine's own publishers, or both; "
        "native ones listen on every interface (default: grpc)",
    )  # fmt: skip
    group.add_argument(
        "--kv-hash-encoding", choices=tuple(HASH_ENCODERS), default="native",
        help="block hashes as the engine has them, or numbers as ASCII decimals (default: native)",
    )  # fmt: skip
    group.add_argument(
        "--metrics-port", type=_port, metavar="PORT",
        help="serve Prometheus metrics of the KV events over HTTP, on the same host (default: off)",
    )  # fmt: skip
    group.add_argument(
        "--stall-timeout", type=_seconds, default=30.0, metavar="S",
        help="end a request whose client reads nothing for so long (default: 30)",
    )  # fmt: skip
    group.add_argument(
        "--hang-timeout", type=_seconds, default=60.0, metavar="S",
        help="call the engine dead when it makes no step for so long with requests unfinished (default: 60)",
    )  # fmt: skip
    group.add_argument(
        "--drain-grace", type=_seconds, default=30.0, metavar="S",
        help="how long SIGTERM waits for running requests (default: 30)",
    )  # fmt: skip
    group.add_argument(
        "--stay-up", action="store_true", help="keep answering after the engine died, instead of exiting"
    )
    group.add_argument(
        "--max-message-mib", type=int, default=256, metavar="N", help="largest message (default: 256)"
    )
    group.add_argument(
        "--allow-media-host", type=_host_rule, action="append", default=[], metavar="HOST",
        help="fetch media by URL from this host, host:port, *.domain or * (any public host); may be repeated "
        "(default: fetch none)",
    )  # fmt: skip
    group.add_argument(
        "--max-media-mib", type=_positive, default=64, metavar="N",
        help="most media in one request, as files (default: 64)",
    )  # fmt: skip
    group.add_argument(
        "--media-timeout", type=_seconds, default=10.0, metavar="S",
        help="longest time to fetch one file (default: 10)",
    )  # fmt: skip
    group.add_argument(
        "--log-format", choices=("text", "json"), default="text", help="log lines (default: text)"
    )
    group.add_argument(
        "--openengine-log-level", choices=("debug", "info", "warning", "error"), default="info"
    )
    group.add_argument(
        "--print-capabilities", action="store_true", help="start, print discovery as JSON, and exit"
    )


def server_options(parsed: argparse.Namespace) -> ServerOptions:
    """Collect the shared options from a parsed command line."""
    return ServerOptions(
        host=parsed.host,
        port=parsed.port,
        instance_id=parsed.instance_id or f"{socket.gethostname()}-{uuid.uuid4().hex[:8]}",
        schema_release=parsed.schema_release,
        advertise_host=parsed.advertise_host or "",
        role=parsed.role,
        kv_session_port=parsed.kv_session_port,
        kv_session_timeout=parsed.kv_session_timeout,
        kv_transfer_timeout=parsed.kv_transfer_timeout,
        kv_events=parsed.kv_events,
        kv_source=parsed.kv_source,
        kv_hash_encoding=parsed.kv_hash_encoding,
        metrics_port=parsed.metrics_port,
        stall_timeout=parsed.stall_timeout,
        hang_timeout=parsed.hang_timeout,
        drain_grace=parsed.drain_grace,
        stay_up=parsed.stay_up,
        max_message_mib=parsed.max_message_mib,
        media=MediaPolicy(
            hosts=tuple(parsed.allow_media_host),
            max_bytes=parsed.max_media_mib * 2**20,
            timeout_s=parsed.media_timeout,
        ),
        log_level=parsed.openengine_log_level,
        log_format=parsed.log_format,
        print_capabilities=parsed.print_capabilities,
    )


def parse(arguments: Sequence[str]) -> ServerOptions:
    """Parse shared options alone, for tests and embedders."""
    parser = argparse.ArgumentParser(prog=os.path.basename("openengine"), allow_abbrev=False)
    add_server_options(parser)
    return server_options(parser.parse_args(arguments))


def lora_argument(text: str) -> tuple[str, str]:
    """The name and the absolute directory of an adapter given as NAME=PATH, for argparse."""
    name, _, path = text.partition("=")
    if not name or not path:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=PATH")
    return name, os.path.abspath(path)


def number_loras(given: Iterable[tuple[str, str]]) -> tuple[Lora, ...]:
    """The adapters given at start, their ids counted from 1 in this order (LORA-06).

    Raises `StartupError` for a name or a directory that is given twice (LORA-03).
    """
    loras = tuple(Lora(number, name, path) for number, (name, path) in enumerate(given, start=1))
    for what, values in (("name", [lora.name for lora in loras]), ("path", [lora.path for lora in loras])):
        twice = sorted({value for value in values if values.count(value) > 1})
        if twice:
            raise StartupError(f"two adapters have the {what} {twice[0]!r}; give each one once")
    return loras


def _port(text: str) -> int:
    port = int(text)
    if not 0 <= port <= 65535:
        raise argparse.ArgumentTypeError(f"{port} is outside 0 to 65535")
    return port


def _routable(text: str) -> str:
    if is_wildcard(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no host that others can connect to")
    return text


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number of seconds")
    return seconds


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is below 1")
    return number


def _host_rule(text: str) -> HostRule:
    try:
        return HostRule.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _release(text: str) -> str:
    try:
        return check_schema_release(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
