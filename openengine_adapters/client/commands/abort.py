"""`openengine abort`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from openengine.v1 import kv_pb2, lifecycle_pb2
from openengine_adapters.client.commands._common import connected
from openengine_adapters.client.messages import enum_name, to_json

if TYPE_CHECKING:
    from openengine_adapters.client.terminal import Terminal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Exactly one target."""
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("request_id", metavar="ID", nargs="?", help="the id of the request")
    target.add_argument("--all", action="store_true", help="every request, whoever started it")
    target.add_argument("--kv-session", metavar="ID", help="the id of a KV session")


async def run(args: argparse.Namespace, terminal: Terminal) -> int:
    """Stop the target; one that has finished already is a success too."""
    async with connected(args) as client:
        if args.all:
            response = await client.abort_all()
        elif args.kv_session:
            response = await client.abort_session(kv_pb2.KvSessionRef(session_id=args.kv_session))
        else:
            response = await client.abort(args.request_id)
    if terminal.json:
        terminal.record(to_json(response))
    else:
        status = enum_name(lifecycle_pb2.AbortStatus, response.status).lower().replace("_", " ")
        terminal.line(f"{status}: {response.message}" if response.message else status)
    return 0
