"""Endpoints for an engine's own KV event publishers, where the operator has not chosen any.

Both engines build on the same code: each data-parallel rank adds its number to a TCP port, and for other transports
refuses to, unless it takes the path for an in-process one, to which it appends the rank. It looks for that word
anywhere in the path, and binds an ipc:// path wherever it is.
"""

from __future__ import annotations

import random
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path

from openengine_adapters.engine import StartupError


@dataclass(frozen=True, slots=True)
class KvEventsWanted:
    """What our own options ask for: events at all, and publishers that others can reach too."""

    events: bool = False
    reachable: bool = False


class Endpoints:
    """A live and a replay endpoint for each rank: in a folder that only we can enter, or on free TCP ports."""

    def __init__(self, ranks: int, *, reachable: bool) -> None:
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        if reachable:
            first = _free_ports(2 * ranks)
            self.live, self.replay = f"tcp://*:{first}", f"tcp://*:{first + ranks}"
        else:
            self._folder = tempfile.TemporaryDirectory(prefix="openengine-")
            self.live, self.replay = (
                f"ipc://{Path(self._folder.name)}/inproc-{name}" for name in ("live", "replay")
            )

    def close(self) -> None:
        """Remove the folder. Safe to call twice."""
        if self._folder is not None:
            self._folder.cleanup()


def is_wildcard(endpoint: str) -> bool:
    """Whether a publisher with this endpoint listens on every interface."""
    host = endpoint.removeprefix("tcp://").rpartition(":")[0]
    return endpoint.startswith("tcp://") and host in ("*", "0.0.0.0", "::", "[::]")


def local(endpoint: str) -> str:
    """What a client on this machine connects to."""
    if not is_wildcard(endpoint):
        return endpoint
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return f"tcp://{'[::1]' if ':' in host else '127.0.0.1'}:{port}"


def _free_ports(count: int) -> int:
    """The first of `count` consecutive free ports."""
    for _ in range(100):
        first = random.randrange(20_000, 60_000)
        if all(_is_free(port) for port in range(first, first + count)):
            return first
    raise StartupError(f"found no {count} consecutive free ports for KV events")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
