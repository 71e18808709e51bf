"""Which servers this client works with: it fails closed outside the range it was tested in (DISC-11)."""

from __future__ import annotations

from collections.abc import Collection

from openengine.v1 import discovery_pb2
from openengine_adapters.client.errors import Incompatible

CLIENT_REVISION = 1
OLDEST_SERVER_REVISION = 1
NEWEST_SERVER_REVISION = 1


def check(target: str, info: discovery_pb2.EngineInfo, releases: Collection[str] | None = None) -> None:
    """Raise `Incompatible`, naming both sides' values, unless the two can work together.

    `releases` narrows it to servers of these schema releases; None takes any that names one.
    """
    if info.minimum_client_revision > CLIENT_REVISION:
        theirs = f"needs a client of revision {info.minimum_client_revision} or newer"
        raise Incompatible(target, theirs, f"has revision {CLIENT_REVISION}")
    if not OLDEST_SERVER_REVISION <= info.schema_revision <= NEWEST_SERVER_REVISION:
        theirs = f"has schema revision {info.schema_revision}"
        ours = f"works with revisions {OLDEST_SERVER_REVISION} to {NEWEST_SERVER_REVISION}"
        raise Incompatible(target, theirs, ours)
    if not info.schema_release:
        raise Incompatible(target, "names no schema release", "needs the name of an immutable one")
    if releases is not None and info.schema_release not in releases:
        theirs = f"has schema release {info.schema_release}"
        raise Incompatible(target, theirs, f"accepts {', '.join(sorted(releases))}")


def not_served(target: str, message: str) -> Incompatible:
    """Return the error for a peer that does not know the service at all."""
    return Incompatible(
        target,
        f"does not serve openengine.v1.OpenEngine ({message})",
        f"speaks openengine.v1 revision {CLIENT_REVISION}",
    )
