"""Prefill and decode with SGLang: both legs of a request run at the same time (PD-01 … PD-07).

SGLang's prefill ends only when the decode engine has pulled, and waits for it before it begins. So PrefillReady leaves
as soon as the scheduler has the request, and the request lives on here, owned by its session: until it ends by
itself, is aborted, or no decode server comes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST
from sglang.srt.server_args import ServerArgs

from openengine.v1 import discovery_pb2, kv_pb2
from openengine_adapters.core.errors import EngineFailure, Rejected, invalid
from openengine_adapters.core.handoff.decoding import Stream
from openengine_adapters.core.handoff.desk import PROTOCOL
from openengine_adapters.core.handoff.parameters import checksum, content_digest, read_reference, to_struct
from openengine_adapters.core.handoff.roles import HandOffWanted, in_role
from openengine_adapters.core.handoff.sessions import End
from openengine_adapters.core.handoff.sides import DecodeSide, PrefillSide
from openengine_adapters.core.kv.discovery import is_wildcard
from openengine_adapters.engine import (
    Delta,
    EngineDescription,
    FinishKind,
    GenerateCall,
    KvConnector,
    Lora,
    StartupError,
    Step,
)
from openengine_adapters.sglang.sequences import Sequences

log = logging.getLogger(__name__)

ATTRIBUTES = "sglang.bootstrap.v1"
BOOTSTRAP = "http"
"""The protocol of SGLang's bootstrap server, where a decode engine asks how to reach the ranks."""

BACKENDS = ("mooncake", "nixl")
ROOMS = 2**63
SCHEMA_VERSION = 1
END_S = 5.0
"""How long SGLang may take to end an aborted request before it is left to itself."""

_ROLES = {"prefill": discovery_pb2.ENGINE_ROLE_PREFILL, "decode": discovery_pb2.ENGINE_ROLE_DECODE}
_TYPES = {"bootstrap_host": str, "bootstrap_port": int, "bootstrap_room": str}


def hand_off(args: ServerArgs, wanted: HandOffWanted) -> Prefills | Decodes | None:
    """The hand-offs of a server with these arguments, which are made ready for it; None when it is aggregated.

    Raises `StartupError` for a role or a back end that cannot be served (ROLE-05).
    """
    mode = args.disaggregation_mode
    own = "aggregated" if mode == "null" else mode
    if wanted.role not in (None, own):
        raise StartupError(
            f"--role {wanted.role} contradicts --disaggregation-mode {mode}, which makes the engine {own}; "
            "leave one of them out"
        )
    if mode not in _ROLES:
        return None
    backend = args.disaggregation_transfer_backend
    if backend not in BACKENDS:
        raise StartupError(
            f"--disaggregation-transfer-backend {backend} is not served; take one of {', '.join(BACKENDS)}"
        )
    if getattr(args, "enable_pd_role_switch", False):
        raise StartupError("--enable-pd-role-switch is not served: a server's role does not change")
    if is_wildcard(wanted.host):
        raise StartupError(
            f"{wanted.host} is no host that other servers can connect to; set --advertise-host"
        )
    # SGLang tells its peers this address of each rank, and binds its bootstrap server to its own --host.
    os.environ.setdefault("SGLANG_HOST_IP", wanted.host)
    if mode == "decode":
        return Decodes(backend, wanted)
    args.host = wanted.host
    return Prefills(args, wanted)


@dataclass(slots=True)
class _Leg:
    """A prefill that runs here after its stream has ended."""

    sequences: Sequences
    owner: asyncio.Task[None] | None = None


class Prefills(PrefillSide[_Leg]):
    """The hand-offs of a prefill server."""

    def __init__(self, args: ServerArgs, wanted: HandOffWanted) -> None:
        super().__init__(wanted, wanted.host)
        self._backend = args.disaggregation_transfer_backend
        self._bootstrap = (wanted.host, int(args.disaggregation_bootstrap_port))
        self._ranks = int(args.dp_size)
        self._owners: dict[asyncio.Task[None], Lora | None] = {}

    async def describe(self, description: EngineDescription) -> EngineDescription:
        """Open the desk, and describe the engine in its role. Raises `StartupError`."""
        await self.open_desk()
        endpoints = ((*self._bootstrap, BOOTSTRAP), (*self.at, PROTOCOL))
        connector = _connector(self._backend, endpoints, prefill=True)
        return in_role(description, self.role, connector, prefill_samples=True)

    async def stop(self) -> None:
        """Close the desk and end what still runs."""
        await super().stop()
        for owner in list(self._owners):
            owner.cancel()
        await asyncio.gather(*self._owners, return_exceptions=True)

    @property
    def waiting(self) -> int:
        """Requests in the engine that wait for a decode server."""
        return len(self._owners)

    def room(self, call: GenerateCall) -> dict[str, Any]:
        """A new meeting place of both engines, on the rank that it belongs to, however SGLang spreads its load."""
        room = secrets.randbelow(ROOMS)
        if call.request.kv.HasField("data_parallel_rank"):
            room -= room % self._ranks - call.request.kv.data_parallel_rank
            room -= 0 if room < ROOMS else self._ranks
        host, port = self._bootstrap
        rank = room % self._ranks
        return {
            "bootstrap_host": host,
            "bootstrap_port": port,
            "bootstrap_room": room,
            "routed_dp_rank": rank,
            # Told it, SGLang does not compare the room with its rank, which it takes for 0 on each replica.
            "disagg_prefill_dp_rank": rank,
        }

    def serve(
        self, call: GenerateCall, prompt_ids: Sequence[int], sequences: Sequences, room: dict[str, Any]
    ) -> Step:
        """Let an admitted request live on under a session, and return the step that ends its stream."""
        session = kv_pb2.KvSessionRef(
            session_id=uuid.uuid4().hex,
            transfer_backend=self._backend,
            endpoints=[
                kv_pb2.KvEndpoint(host=host, port=port, protocol=protocol)
                for (host, port), protocol in ((self._bootstrap, BOOTSTRAP), (self.at, PROTOCOL))
            ],
            dp_rank=room["routed_dp_rank"],
            # A room is always text: most are beyond what a double can hold.
            attributes_struct=to_struct(
                {ATTRIBUTES: {name: as_type(room[name]) for name, as_type in _TYPES.items()}}
            ),
        )
        leg = _Leg(sequences)
        content = content_digest(prompt_ids, call.lora, call.media)
        self.sessions.open(session.session_id, checksum(session, content), call.id, leg)
        leg.owner = asyncio.create_task(self._own(session.session_id, sequences), name="sglang-prefill")
        self._owners[leg.owner] = call.lora
        leg.owner.add_done_callback(self._owners.pop)
        return Step(prompt_tokens=len(prompt_ids), session=session)

    async def _own(self, session_id: str, sequences: Sequences) -> None:
        """Follow a prefill to its end, whatever that is."""
        how = End.ABANDONED
        try:
            async with sequences, contextlib.aclosing(sequences.steps()) as steps:
                async for step in steps:
                    if any(_is_done(delta) for delta in step.deltas):
                        how = End.FETCHED
        except (Rejected, EngineFailure) as failure:
            log.info("a prefill ended without its decode: %s", failure)
        except Exception:
            log.warning("SGLang failed a prefill after its session was given out", exc_info=True)
        finally:
            self.sessions.end(session_id, how)

    async def without(self, lora: Lora) -> None:
        """Wait for the requests that live on with the adapter: SGLang itself would, and hold up all other changes."""
        while using := [owner for owner, its in self._owners.items() if its == lora]:
            await asyncio.wait(using)

    async def free(self, leg: _Leg, how: End) -> None:
        """Have SGLang end the request, unless it did that itself."""
        owner = leg.owner
        if owner is None or owner.done():
            return
        if how is not End.FETCHED:
            leg.sequences.abort()
        # A decode engine that has the blocks says so a little before the prefill engine knows.
        await asyncio.wait({owner}, timeout=END_S)
        owner.cancel()


def _is_done(delta: Delta) -> bool:
    """SGLang finishes a prefill when the decode engine has the blocks, unless it was aborted."""
    return delta.finish is not None and delta.finish.kind is not FinishKind.CANCELLED


@dataclass(frozen=True, slots=True)
class Handed:
    """A session reference, checked: where the engines meet, and the desk of the prefill server."""

    room: dict[str, Any]
    desk: kv_pb2.KvEndpoint


class Decodes(DecodeSide):
    """The hand-offs of a decode server."""

    def __init__(self, backend: str, wanted: HandOffWanted) -> None:
        super().__init__(wanted)
        self._backend = backend

    async def describe(self, description: EngineDescription) -> EngineDescription:
        """Describe the engine in its role."""
        return in_role(description, self.role, _connector(self._backend, (), prefill=False))

    @property
    def waiting(self) -> int:
        """Requests in the engine that wait for a prefill server."""
        return self.decoding.waiting

    def read(self, session: kv_pb2.KvSessionRef) -> Handed:
        """Check a session reference completely. Raises `Rejected` (PD-03, PD-07)."""
        params = read_reference(session, self._backend, (BOOTSTRAP, PROTOCOL), ATTRIBUTES)
        room = {**_room(params, session.endpoints[0]), "disagg_prefill_dp_rank": session.dp_rank}
        return Handed(room, session.endpoints[1])

    async def serve(
        self,
        call: GenerateCall,
        prompt_ids: Sequence[int],
        admit: Callable[[dict[str, Any]], Awaitable[Stream]],
        abort: Callable[[], Awaitable[None]],
    ) -> AsyncGenerator[Step, None]:
        """Attach to the request's session and serve it; `admit` gets the room."""
        session = call.request.kv.session
        handed = self.read(session)
        content = content_digest(prompt_ids, call.lora, call.media)
        return await self.decoding.serve(
            session, handed.desk, checksum(session, content), lambda: admit(handed.room), abort
        )


def _room(params: dict[str, Any], peer: kv_pb2.KvEndpoint) -> dict[str, Any]:
    def refuse(key: str, reason: str) -> Exception:
        return invalid("kv.session.attributes_struct", f"{ATTRIBUTES}.{key} {reason}")

    for key in sorted(_TYPES.keys() ^ params.keys()):
        raise refuse(key, "is missing" if key in _TYPES else "is unknown")
    for key, kind in _TYPES.items():
        if type(params[key]) is not kind:
            raise refuse(key, "has another type than the prefill server gave it")
    if (params["bootstrap_host"], params["bootstrap_port"]) != (peer.host, peer.port):
        raise refuse("bootstrap_host", "and bootstrap_port must be those of the session's first endpoint")
    if peer.host == FAKE_BOOTSTRAP_HOST:
        raise refuse("bootstrap_host", f"is {FAKE_BOOTSTRAP_HOST}, from which nothing is ever transferred")
    text = params["bootstrap_room"]
    if not (text.isascii() and text.isdecimal() and len(text) < 20 and int(text) < ROOMS):
        raise refuse("bootstrap_room", "must be a whole number from 0 to 2^63 - 1, as text")
    return {**params, "bootstrap_room": int(text)}


def _connector(backend: str, endpoints: tuple[tuple[str, int, str], ...], *, prefill: bool) -> KvConnector:
    return KvConnector(
        enabled=True,
        transfer_backend=backend,
        local_endpoints=endpoints,
        supported_protocols=(BOOTSTRAP, PROTOCOL),
        supports_remote_prefill=prefill,
        supports_decode_pull=True,
        supports_abort_cleanup=True,
        supports_drain=True,
        schema_version=SCHEMA_VERSION,
    )
