"""The channel: how the client connects, and with which limits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio

from openengine_adapters import __version__

# Many servers count a ping more often than every five minutes on an idle stream as abuse and close the
# connection with everything on it; load balancers forget idle connections after little more.
DEFAULT_KEEPALIVE = 310.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """Certificates, as PEM files. Without `ca` the system's roots count; `cert` and `key` are for mutual TLS.

    `server_name` is the name in the server's certificate where it differs from the target's.
    """

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    server_name: str = ""

    def credentials(self) -> grpc.ChannelCredentials:
        """Read the files. Raises `OSError` when one cannot be read."""
        return grpc.ssl_channel_credentials(
            root_certificates=_read(self.ca), private_key=_read(self.key), certificate_chain=_read(self.cert)
        )


def open_channel(
    target: str, tls: Tls | None = None, keepalive: float = DEFAULT_KEEPALIVE
) -> grpc.aio.Channel:
    """Return a channel to `host:port` or `unix:path`. It connects with the first call."""
    options: list[tuple[str, int | str]] = [
        # A prompt of a million token ids and the whole vocabulary as candidates both exceed the usual 4 MiB.
        ("grpc.max_send_message_length", -1),
        ("grpc.max_receive_message_length", -1),
        # An event stream may be silent for hours; without pings a vanished server would never be noticed.
        ("grpc.keepalive_time_ms", round(keepalive * 1000)),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.http2.max_pings_without_data", 0),
        # Whether a request may run twice is the caller's decision.
        ("grpc.enable_retries", 0),
        ("grpc.service_config_disable_resolution", 1),
        # `health --wait` asks again and again: do not let the connection hide behind a growing pause.
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        # Two clients are two connections, also inside one process.
        ("grpc.use_local_subchannel_pool", 1),
        # Engines are neighbours; a proxy set for the way to the internet is not the way to them.
        ("grpc.enable_http_proxy", 0),
        ("grpc.primary_user_agent", f"openengine-client/{__version__}"),
    ]
    if tls is None:
        return grpc.aio.insecure_channel(target, options=options)
    if tls.server_name:
        options.append(("grpc.ssl_target_name_override", tls.server_name))
    return grpc.aio.secure_channel(target, tls.credentials(), options=options)


def _read(path: Path | None) -> bytes | None:
    return path.read_bytes() if path else None
