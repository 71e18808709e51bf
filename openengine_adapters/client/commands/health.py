"""`openengine health`."""

from __future__ import annotations

import argparse
import asyncio
import math
import time
from typing import TYPE_CHECKING

import grpc

from openengine.v1 import discovery_pb2, lifecycle_pb2
from openengine_adapters.client import ClientError, Incompatible, OpenEngineClient, RpcRejected, Unreachable
from openengine_adapters.client.arguments import positive
from openengine_adapters.client.commands._common import unverified
from openengine_adapters.client.messages import enum_name, enum_value, to_json

if TYPE_CHECKING:
    from openengine_adapters.client.terminal import Terminal

_PAUSE = 0.25  # between two questions of --wait


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to ask, and for how long."""
    parser.epilog = "Exits 0 only when the state is READY."
    parser.add_argument("--probe", action="store_true", help="have the engine run a minimal inference")
    parser.add_argument("--model", default="", help="the model of the probe (default: the served one)")
    parser.add_argument(
        "--role", choices=("aggregated", "prefill", "decode"), help="the role that is expected"
    )
    parser.add_argument(
        "--wait", metavar="SECONDS", type=positive, help="ask again until READY, for at most so long"
    )


async def run(args: argparse.Namespace, terminal: Terminal) -> int:
    """Print the state and its checks."""
    async with unverified(args) as client:
        response = await _wait(client, args, terminal) if args.wait else await _ask(client, args)
    ready = response.state == lifecycle_pb2.HEALTH_STATE_READY
    if terminal.json:
        terminal.record(to_json(response))
        return 0 if ready else 1
    terminal.line(_state(response.state), "bold green" if ready else "bold red")
    width = max((len(check.name) for check in response.checks), default=0)
    for check in response.checks:
        message = f"  {check.message}" if check.message else ""
        terminal.line(f"  {check.name:<{width}}  {_state(check.state)}{message}")
    return 0 if ready else 1


async def _ask(
    client: OpenEngineClient, args: argparse.Namespace, at_most: float = math.inf
) -> lifecycle_pb2.HealthResponse:
    # A server that is still starting answers Health but not discovery: it is checked once it is ready.
    role = enum_value(discovery_pb2.EngineRole, args.role or "unspecified")
    timeout = min(client.timeout if args.probe or args.timeout else args.connect_timeout, at_most)
    try:
        response = await client.health(probe=args.probe, model=args.model, role=role, timeout=timeout)
    except RpcRejected as error:
        if error.code is grpc.StatusCode.UNIMPLEMENTED:
            await client.verify(timeout=timeout)  # perhaps it is no OpenEngine server at all
        raise
    if response.state == lifecycle_pb2.HEALTH_STATE_READY:
        await client.verify(timeout=timeout)
    return response


async def _wait(
    client: OpenEngineClient, args: argparse.Namespace, terminal: Terminal
) -> lifecycle_pb2.HealthResponse:
    deadline = time.monotonic() + args.wait
    said = ""
    while True:
        left = deadline - time.monotonic()
        try:
            response = await _ask(client, args, max(left, _PAUSE))
            failure, seen = None, _state(response.state)
            if seen == "READY":
                return response
        except ClientError as error:
            if not _passes(error):
                raise
            failure, seen = error, "unreachable" if isinstance(error, Unreachable) else str(error)
        if left <= _PAUSE:
            if failure:
                raise failure
            return response
        if seen != said and not terminal.json:
            terminal.note(f"waiting for {args.target}: {seen}")
            said = seen
        await asyncio.sleep(min(_PAUSE, left))


def _passes(error: ClientError) -> bool:
    """Whether a failure can be gone the next time."""
    if isinstance(error, RpcRejected):
        return error.code is grpc.StatusCode.UNAVAILABLE
    return not isinstance(error, Incompatible)


def _state(state: int) -> str:
    return enum_name(lifecycle_pb2.HealthState, state)
