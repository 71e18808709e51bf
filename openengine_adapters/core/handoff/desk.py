"""The desk of a prefill server, and a decode server's way to it: one JSON line each way over TCP.

`{"session_id": ..., "checksum": ...}` is answered with `{"answer": "attached"}`, or with why not. Then the
connection is the attachment: `{"done": true}` on it says that the decode engine has the blocks, and its end without
that ends the session all the same. The desk says how a session ended, `{"ended": ...}`, before it hangs up: only
after "fetched" are the blocks what they were. A lost peer shows within seconds (TCP keep-alive).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from types import TracebackType
from typing import Any, Self

from openengine.v1 import errors_pb2, kv_pb2
from openengine_adapters.core.errors import EngineFailure, invalid
from openengine_adapters.core.handoff.sessions import Attach, End, SessionTable

PROTOCOL = "openengine"
"""The protocol of a session's endpoint that is a desk."""

ANSWER_S = 10.0
"""How long each side waits for the other's line; the prefill engine is asked between two of its steps."""

MOST_CONNECTIONS = 4096
_LINE_LIMIT = 1024
_NO_ANSWER = (TimeoutError, OSError, ValueError, TypeError, KeyError, RecursionError)
"""What waiting for a line, and reading one from who knows whom, may raise."""

_KEEP_ALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}


class SessionDesk:
    """Answers decode servers that want to attach to the sessions of a table."""

    def __init__(self, table: SessionTable[Any]) -> None:
        self._table = table
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[Any]] = set()

    async def start(self, host: str, port: int = 0) -> int:
        """Listen on a port of `host`, 0 for a free one, and return it. Raises OSError."""
        self._server = await asyncio.start_server(self._serve, host, port, limit=_LINE_LIMIT)
        return int(self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        """Close every connection. Safe to call twice."""
        if self._server is not None:
            self._server.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None  # streams run each connection in a task of its own
        if len(self._connections) >= MOST_CONNECTIONS:
            writer.close()
            return
        self._connections.add(task)
        try:
            # Whoever is gone, or never asked, is no error of ours.
            with contextlib.suppress(*_NO_ANSWER):
                _keep_alive(writer)
                await self._attachment(reader, writer)
        finally:
            writer.close()
            self._connections.discard(task)

    async def _attachment(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(ANSWER_S):
            asked = json.loads(await reader.readline())
        if not isinstance(asked, dict):
            return
        session_id, checksum = str(asked.get("session_id")), str(asked.get("checksum"))
        answer = await self._table.attach(session_id, checksum, lambda how: _send_away(writer, how))
        how = End.ABANDONED
        try:
            async with asyncio.timeout(ANSWER_S):
                writer.write(json.dumps({"answer": answer.value}).encode() + b"\n")
                await writer.drain()
            if answer is Attach.ATTACHED and await reader.readline():
                how = End.FETCHED
        finally:
            if answer is Attach.ATTACHED:
                self._table.end(session_id, how)


class Attachment:
    """A decode server's hold on a session, until the block is left."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def done(self) -> None:
        """Say that the blocks are here; the prefill server may forget the session."""
        with contextlib.suppress(OSError):
            self._writer.write(b'{"done": true}\n')
            await self._writer.drain()

    async def ended(self) -> bool:
        """Wait for the end of the session. True when the engines have moved the blocks, False when they may be gone."""
        with contextlib.suppress(*_NO_ANSWER):
            return End(json.loads(await self._reader.readline())["ended"]) is End.FETCHED
        return False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()


async def attach(session: kv_pb2.KvSessionRef, endpoint: kv_pb2.KvEndpoint, checksum: str) -> Attachment:
    """Attach to a session at its prefill server's desk.

    Raises `Rejected` when it is not the session that was issued, `EngineFailure` KV_SESSION_NOT_FOUND when it is
    not held any more and KV_TRANSFER_FAILED when there is nobody to ask (PD-03).
    """
    question = json.dumps({"session_id": session.session_id, "checksum": checksum}).encode() + b"\n"
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(ANSWER_S):
            reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port, limit=_LINE_LIMIT)
            _keep_alive(writer)
            writer.write(question)
            await writer.drain()
            answer = Attach(json.loads(await reader.readline())["answer"])
    except BaseException as error:
        if writer is not None:
            writer.close()
        if isinstance(error, _NO_ANSWER):
            raise transfer_failed(session, f"{endpoint.host}:{endpoint.port} does not answer") from error
        raise
    if answer is Attach.ATTACHED:
        return Attachment(reader, writer)
    writer.close()
    if answer is Attach.CHANGED:
        raise invalid(
            "kv.session",
            "is not what the prefill server returned for this prompt and adapter; send the request that was "
            "prefilled, with its session unchanged",
        )
    raise EngineFailure(
        "the prefill server does not hold this session any more; prefill again"
        if answer is Attach.GONE
        else "another decode server is attached to this session; prefill again",
        code=errors_pb2.ERROR_CODE_KV_SESSION_NOT_FOUND,
        details={"field": "kv.session", "value": session.session_id},
    )


def transfer_failed(session: kv_pb2.KvSessionRef, reason: str) -> EngineFailure:
    """KV_TRANSFER_FAILED for a session; another prefill may succeed."""
    return EngineFailure(
        f"the KV transfer failed: {reason}; prefill again",
        code=errors_pb2.ERROR_CODE_KV_TRANSFER_FAILED,
        retryable=True,
        details={"field": "kv.session", "value": session.session_id},
    )


def _send_away(writer: asyncio.StreamWriter, how: End) -> None:
    with contextlib.suppress(OSError):
        writer.write(json.dumps({"ended": how.value}).encode() + b"\n")
    writer.close()  # what is written still goes


def _keep_alive(writer: asyncio.StreamWriter) -> None:
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE.items():
        if hasattr(socket, name):  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
