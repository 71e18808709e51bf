# SPDX-License-Identifier: Apache-2.0
"""What a run is told: the server, what to run, and how long to wait."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Access:
    """How to reach a server: TLS with `ca` (and a client certificate), and a bearer token."""

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    token: str = ""

    @property
    def tls(self) -> bool:
        """Whether the connection is encrypted."""
        return self.ca is not None or self.cert is not None


@dataclass(frozen=True, kw_only=True)
class Options:
    """Everything that the command line can say about a run.

    `timeout` is the usual deadline of one case in seconds; `peer` and `aggregated` are further servers for
    disaggregation; `stall_limit` is after how many seconds the server drops a client that does not read.
    """

    target: str
    access: Access = field(default_factory=Access)
    model: str = ""
    lora: tuple[Path, ...] = ()
    peer: str = ""
    aggregated: str = ""
    image_prompt: str = "<image>"
    timeout: float = 30.0
    repeat: int = 1
    jobs: int = 1
    stall_limit: float = 0.0
    include_drain: bool = False
    known_failures: dict[str, str] = field(default_factory=dict)
