"""`openengine info`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from openengine.v1 import discovery_pb2
from openengine_adapters.client.commands._common import connected
from openengine_adapters.client.layout import Cell, facts
from openengine_adapters.client.messages import enum_name, to_json

if TYPE_CHECKING:
    from openengine_adapters.client.terminal import Terminal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Nothing beyond the global options."""


async def run(args: argparse.Namespace, terminal: Terminal) -> int:
    """Print who the server is."""
    async with connected(args) as client:
        info = client.engine
    if terminal.json:
        terminal.record(to_json(info))
        return 0
    values: dict[str, Cell] = {
        "engine": f"{info.engine_name} {info.engine_version}",
        "role": enum_name(discovery_pb2.EngineRole, info.role),
        "models": ", ".join(info.supported_models),
        "instance": info.instance_id,
        "schema revision": info.schema_revision,
        "oldest client revision": info.minimum_client_revision,
        "schema release": info.schema_release,
    }
    values |= {name.replace("_", " "): value for name, value in to_json(info.parallelism).items()}
    values["kv connector"] = _connector(info)
    terminal.lines(facts(values))
    return 0


def _connector(info: discovery_pb2.EngineInfo) -> str | None:
    connector = info.kv_connector
    if not connector.HasField("enabled"):
        return None
    if not connector.enabled:
        return "none"
    return f"{connector.transfer_backend} over {', '.join(connector.supported_protocols)}"
