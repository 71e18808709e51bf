"""Prefill sessions, and how a decode engine fetches one.

The prefill engine keeps the prompt's blocks and the model's state under a session id. A decode engine asks for them
over a small TCP protocol, one JSON object a line each way; with the answer the session ends. One that nobody asks for
ends by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import uuid
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from openengine.v1 import errors_pb2, kv_pb2
from openengine_adapters.core.errors import EngineFailure, invalid
from openengine_adapters.core.handoff.parameters import read_reference
from openengine_adapters.reference.cache import Lease
from openengine_adapters.reference.model import State

BACKEND = "reference"
PROTOCOL = "tcp"
ATTRIBUTES = "reference.session.v1"
TIMEOUT_S = 5.0
"""How long one transfer may take."""

_TYPES = {"prompt_digest": str, "prompt_tokens": int, "ticket": str, "final": bool}

_REMEMBERED = 4096
_LINE_LIMIT = 4096


@dataclass(frozen=True, slots=True)
class Handle:
    """What a session reference says, checked. `ticket` proves that it came from the prefill engine."""

    session_id: str
    host: str
    port: int
    ticket: str
    prompt_digest: str


@dataclass(slots=True)
class _Session:
    lease: Lease
    state: State
    rank: int
    ticket: str
    expiry: asyncio.TimerHandle


class SessionStore:
    """The sessions that a prefill engine holds. `on_transfer` hears of them: event, rank, id, bytes."""

    def __init__(self, ttl: float, on_transfer: Callable[[str, int, str, int], None]) -> None:
        self._ttl = ttl
        self._on_transfer = on_transfer
        self._open: dict[str, _Session] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[Any]] = set()
        self.address = ("", 0)

    def __len__(self) -> int:
        return len(self._open)

    async def start(self, host: str) -> None:
        """Listen on a free port of `host`."""
        self._server = await asyncio.start_server(self._serve, host, 0, limit=_LINE_LIMIT)
        self.address = (host, self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        """End every session and every transfer."""
        if self._server is not None:
            self._server.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        self.end_all()

    def end_all(self) -> None:
        """End every session."""
        for session_id in list(self._open):
            self._end(session_id, "dropped")

    def open(
        self, lease: Lease, state: State, prompt_digest: str, tokens: int, rank: int
    ) -> kv_pb2.KvSessionRef:
        """Hold a prompt's blocks and state until they are fetched, released or too old."""
        session_id = uuid.uuid4().hex
        ticket = str(secrets.randbits(63))
        loop = asyncio.get_running_loop()
        expiry = loop.call_later(self._ttl, self._end, session_id, "expired")
        self._open[session_id] = _Session(lease, state, rank, ticket, expiry)
        self._on_transfer("opened", rank, session_id, 0)
        host, port = self.address
        session = kv_pb2.KvSessionRef(
            session_id=session_id,
            transfer_backend=BACKEND,
            endpoints=[kv_pb2.KvEndpoint(host=host, port=port, protocol=PROTOCOL)],
            dp_rank=rank,
        )
        session.attributes_struct.update(
            {
                ATTRIBUTES: {
                    "prompt_digest": prompt_digest,
                    "prompt_tokens": tokens,
                    "ticket": ticket,
                    "final": True,
                }
            }
        )
        return session

    def release(self, session_id: str) -> bool | None:
        """End a session: True when it was open, False when it had ended, None when it is unknown."""
        if session_id in self._open:
            self._end(session_id, "released")
            return True
        return False if session_id in self._ended else None

    def _end(self, session_id: str, event: str) -> None:
        session = self._open.pop(session_id)
        session.expiry.cancel()
        session.lease.release()
        self._ended[session_id] = None
        while len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)
        self._on_transfer(event, session.rank, session_id, len(session.state) if event == "fetched" else 0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None  # streams run each connection in a task of its own
        self._connections.add(task)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                writer.write(json.dumps(self._answer(await reader.readline())).encode() + b"\n")
                await writer.drain()
        except (TimeoutError, OSError, ValueError):
            pass  # whoever asked is gone, or never asked
        finally:
            writer.close()
            self._connections.discard(task)

    def _answer(self, line: bytes) -> dict[str, str]:
        try:
            request = json.loads(line)
            session_id, ticket = str(request["session_id"]), request["ticket"]
        except (ValueError, TypeError, KeyError):
            return {"error": "malformed"}
        session = self._open.get(session_id)
        if session is None or session.ticket != ticket:
            return {"error": "not found"}
        self._end(session_id, "fetched")
        return {"state": session.state.hex()}


def read_session(session: kv_pb2.KvSessionRef) -> Handle:
    """Check a session reference completely. Raises `Rejected` (PD-03, PD-07)."""
    params = read_reference(session, BACKEND, [PROTOCOL], ATTRIBUTES)
    name = "kv.session.attributes_struct"
    if {key: type(value) for key, value in params.items()} != _TYPES:
        raise invalid(name, f"{ATTRIBUTES} must be unchanged, in its names and its types")
    if not params["ticket"].isdecimal():
        raise invalid(name, f"{ATTRIBUTES}.ticket must be a whole number, as text")
    endpoint = session.endpoints[0]
    return Handle(session.session_id, endpoint.host, endpoint.port, params["ticket"], params["prompt_digest"])


async def fetch(handle: Handle) -> State:
    """Fetch a session's state from its prefill engine. Raises `EngineFailure`."""
    question = json.dumps({"session_id": handle.session_id, "ticket": handle.ticket}).encode() + b"\n"
    try:
        async with asyncio.timeout(TIMEOUT_S):
            reader, writer = await asyncio.open_connection(handle.host, handle.port, limit=_LINE_LIMIT)
            try:
                writer.write(question)
                await writer.drain()
                answer = json.loads(await reader.readline())
            finally:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
            if "state" not in answer:
                raise EngineFailure(
                    "the prefill server does not hold this session any more",
                    code=errors_pb2.ERROR_CODE_KV_SESSION_NOT_FOUND,
                    details={"field": "kv.session", "value": handle.session_id},
                )
            return bytes.fromhex(answer["state"])
    except (TimeoutError, OSError, ValueError, TypeError) as error:
        raise EngineFailure(
            f"the KV transfer from {handle.host}:{handle.port} failed: {type(error).__name__}",
            code=errors_pb2.ERROR_CODE_KV_TRANSFER_FAILED,
            retryable=True,
            details={"field": "kv.session", "value": handle.session_id},
        ) from error
