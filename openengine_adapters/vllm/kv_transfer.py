"""Which of vLLM's KV connectors hand requests over, in which role, and with what parameters (ROLE-05, PD-07)."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm.config import KVTransferConfig

from openengine.v1 import discovery_pb2, kv_pb2
from openengine_adapters.core.errors import invalid
from openengine_adapters.core.handoff.desk import PROTOCOL
from openengine_adapters.core.handoff.parameters import read_reference, to_struct
from openengine_adapters.core.kv.discovery import is_wildcard
from openengine_adapters.engine import StartupError

PREFILL, DECODE = discovery_pb2.ENGINE_ROLE_PREFILL, discovery_pb2.ENGINE_ROLE_DECODE
AGGREGATED = discovery_pb2.ENGINE_ROLE_AGGREGATED

ATTRIBUTES = "vllm.kv_transfer_params.v1"
NIXL = "nixl"
"""The protocol of NIXL's side channel, where the engines shake hands."""

HOST, PORT = "VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT"
PORTS, TRIES = (20000, 32000), 100
"""Where a free port is looked for: below those that systems give out by themselves."""

DEFAULT_LEASE_S = 30.0

_ROLES = {"kv_producer": PREFILL, "kv_consumer": DECODE}
_NAMES = {"aggregated": AGGREGATED, "prefill": PREFILL, "decode": DECODE}

_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "do_remote_prefill": bool,
    "do_remote_decode": bool,
    "remote_block_ids": list,
    "remote_engine_id": str,
    "remote_request_id": str,
    "remote_host": str,
    "remote_port": int,
    "tp_size": int,
    "dcp_size": int,
    "pp_size": int,
    "remote_num_tokens": int,
    "remote_prefill_cached_tokens": int,
    "remote_blocks_expiry_time": (int, float, type(None)),
    "transfer_mode": str,
}
"""What vLLM 0.32 hands over with NIXL. Any other shape kills or hangs its decode engine."""

_OPTIONAL = frozenset({"remote_blocks_expiry_time", "remote_prefill_cached_tokens"})
_SIZES = ("tp_size", "dcp_size", "pp_size", "remote_num_tokens")


@dataclass(frozen=True, slots=True)
class Connector:
    """A connector that hands requests over. `backend` is what sessions call it.

    `mode` is NIXL's own name for who moves the blocks; empty where they lie in a storage that both sides know.
    """

    backend: str
    mode: str = ""


CONNECTORS = {
    "NixlConnector": Connector("NixlConnector", "pull"),
    "NixlPullConnector": Connector("NixlConnector", "pull"),
    "NixlPushConnector": Connector("NixlPushConnector", "push"),
    "ExampleConnector": Connector("ExampleConnector"),
}


def role_of(config: KVTransferConfig | None, wanted: str | None) -> discovery_pb2.EngineRole.ValueType:
    """The server's role: vLLM's own, or `--role` where that leaves it open (ROLE-05). Raises `StartupError`."""
    if config is None or config.kv_connector is None:
        if wanted in ("prefill", "decode"):
            raise StartupError(
                f"--role {wanted} needs a KV connector; give vLLM one with --kv-transfer-config, for example "
                f'\'{{"kv_connector": "NixlConnector", "kv_role": "kv_both"}}\''
            )
        return AGGREGATED
    own = _ROLES.get(config.kv_role or "")
    role = own if wanted is None else _NAMES[wanted]
    if own is not None and role != own:
        raise StartupError(
            f"--role {wanted} contradicts kv_role {config.kv_role!r} of --kv-transfer-config; leave one of them out"
        )
    if role in (None, AGGREGATED):
        return AGGREGATED
    if config.kv_connector not in CONNECTORS:
        raise StartupError(
            f"the KV connector {config.kv_connector!r} is not one that this adapter hands requests over with; "
            f"it knows {', '.join(sorted(CONNECTORS))}"
        )
    if config.get_from_extra_config("bidirectional_kv_xfer", False):
        raise StartupError("bidirectional_kv_xfer keeps blocks on the decode server, which no session frees")
    return role


def connector_of(config: KVTransferConfig) -> Connector:
    """The connector of a server that is not aggregated."""
    return CONNECTORS[config.kv_connector or ""]


def lease_of(config: KVTransferConfig) -> float:
    """Seconds that a prefill engine keeps blocks for a decode engine that does not show up."""
    return float(config.get_from_extra_config("kv_lease_duration", DEFAULT_LEASE_S))


def prepare_side_channel(connector: Connector, host: str, ranks: int) -> str:
    """Tell vLLM where NIXL's side channel listens, unless the operator did; return the host.

    vLLM sends the address that it binds to its peers, and hangs when the port is taken. Raises `StartupError`.
    """
    if not connector.mode:
        return host
    host = os.environ.setdefault(HOST, host)
    if is_wildcard(host):
        raise StartupError(f"{HOST}={host} is sent to other servers, which cannot connect to it; name a host")
    given = os.environ.get(PORT)
    if given is None:
        # vLLM's own default is one port for every server of a machine.
        os.environ[PORT] = str(_free_ports(host, ranks))
        return host
    first = int(given) if given.isdecimal() else 0
    if not 1 <= first <= 65536 - ranks:
        raise StartupError(f"{PORT}={given} leaves no port for each of {ranks} data-parallel ranks")
    taken = [port for port in range(first, first + ranks) if not _is_free(host, port)]
    if taken:
        raise StartupError(f"port {taken[0]} of {host} is taken, or not ours; set {PORT} to a free one")
    return host


def side_channel(rank: int) -> tuple[str, int]:
    """Where a rank's side channel of this server is."""
    return os.environ[HOST], int(os.environ[PORT]) + rank


def _is_free(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def _free_ports(host: str, ranks: int) -> int:
    """The first of some free ports in a row. Raises `StartupError` where there are none."""
    for _ in range(TRIES):
        first = secrets.randbelow(PORTS[1] - PORTS[0] - ranks) + PORTS[0]
        if all(_is_free(host, port) for port in range(first, first + ranks)):
            return first
    raise StartupError(f"{host} has no {ranks} free ports, or is not ours; set {PORT}, or --advertise-host")


# ---------------------------------------------------------------------------------------------------- sessions


def to_session(
    connector: Connector, session_id: str, params: Mapping[str, Any], desk: tuple[str, int], rank: int
) -> kv_pb2.KvSessionRef:
    """The reference to a finished prefill: vLLM's parameters as they are, and where to ask for it."""
    endpoints = [kv_pb2.KvEndpoint(host=desk[0], port=desk[1], protocol=PROTOCOL)]
    if connector.mode:
        host, port = str(params["remote_host"]), int(params["remote_port"])
        endpoints.insert(0, kv_pb2.KvEndpoint(host=host, port=port, protocol=NIXL))
    return kv_pb2.KvSessionRef(
        session_id=session_id,
        transfer_backend=connector.backend,
        endpoints=endpoints,
        dp_rank=rank,
        attributes_struct=to_struct({ATTRIBUTES: params}),
    )


@dataclass(frozen=True, slots=True)
class Handed:
    """A session reference, checked: vLLM's parameters, and the desk of the prefill server."""

    params: dict[str, Any]
    desk: kv_pb2.KvEndpoint


def from_session(connector: Connector, session: kv_pb2.KvSessionRef) -> Handed:
    """Check a session reference completely. Raises `Rejected` (PD-03, PD-07)."""
    protocols = [NIXL, PROTOCOL] if connector.mode else [PROTOCOL]
    params = read_reference(session, connector.backend, protocols, ATTRIBUTES)
    if connector.mode:
        _check_params(params, connector, session.endpoints[0])
    elif params:
        raise invalid("kv.session.attributes_struct", f"{ATTRIBUTES} is empty with {connector.backend}")
    return Handed(params, session.endpoints[-1])


def _check_params(params: dict[str, Any], connector: Connector, peer: kv_pb2.KvEndpoint) -> None:
    def refuse(key: str, reason: str) -> Exception:
        return invalid("kv.session.attributes_struct", f"{ATTRIBUTES}.{key} {reason}")

    for key in sorted(_TYPES.keys() - params.keys() - _OPTIONAL):
        raise refuse(key, "is missing")
    for key in sorted(params.keys() - _TYPES.keys()):
        raise refuse(key, "is unknown")
    for key, value in params.items():
        # A bool is an int to Python, and none to vLLM.
        if not isinstance(value, _TYPES[key]) or (isinstance(value, bool) and _TYPES[key] is not bool):
            raise refuse(key, "has another type than vLLM gave it")
    if not params["do_remote_prefill"] or params["do_remote_decode"]:
        raise refuse("do_remote_prefill", "must be true, and do_remote_decode false")
    if params["transfer_mode"] != connector.mode:
        raise refuse("transfer_mode", f"must be {connector.mode!r} with this engine's connector")
    if (params["remote_host"], params["remote_port"]) != (peer.host, peer.port):
        raise refuse("remote_host", "and remote_port must be those of the session's first endpoint")
    for key in ("remote_engine_id", "remote_request_id"):
        if not params[key]:
            raise refuse(key, "must not be empty")
    for key in _SIZES:
        if not 1 <= params[key] < 2**31:
            raise refuse(key, "must be a number from 1 to 2147483647")
    groups = params["remote_block_ids"]
    if not groups or not all(isinstance(group, list) and group for group in groups):
        raise refuse("remote_block_ids", "must be a list of lists of block ids, none of them empty")
    for block in (block for group in groups for block in group):
        if type(block) is not int or not 0 <= block < 2**31:
            raise refuse("remote_block_ids", "must hold block ids, which are numbers from 0 to 2147483647")
