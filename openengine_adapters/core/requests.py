"""The in-flight table: one namespace of request ids for Generate, Embed, Classify and Score.

An id belongs to one request from its claim to the end of its handler. Ended ids are remembered for a while,
so that Abort can tell "already finished" from "never heard of" (ABORT-01).
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import grpc

from openengine.v1 import errors_pb2
from openengine_adapters.core.errors import EngineDied, EngineFailure, Rejected

REMEMBERED = 16384
"""Ended ids kept; the oldest goes first."""

ABORT_GRACE_S = 1.0
"""How long an aborted handler may take to end by itself before it is cancelled."""


class AbortOutcome(enum.Enum):
    """What an abort found."""

    ABORTED = enum.auto()
    ALREADY_FINISHED = enum.auto()


class ActiveRequest:
    """One request in flight, owned by the handler task that claimed it.

    `call_id` is the id that the engine sees. A `unary` request has no stream that the engine could end;
    cancelling its handler ends it. `writing_since` is the loop time at which a write to the client began, None
    while none is pending; the watchdog reads it (STREAM-10). `interrupt` ends the request from outside with a
    failure (engine death, stalled reader).
    """

    __slots__ = (
        "_done",
        "_task",
        "aborted",
        "call_id",
        "failure",
        "request_id",
        "unary",
        "writing_since",
    )

    def __init__(self, request_id: str, task: asyncio.Task[Any] | None, *, unary: bool = False) -> None:
        self.request_id = request_id
        self.unary = unary
        self.call_id = uuid.uuid4().hex
        self.aborted = False
        self.failure: EngineFailure | None = None
        self.writing_since: float | None = None
        self._task = task
        self._done = asyncio.Event()

    def interrupt(self, failure: EngineFailure, *, force: bool = False) -> None:
        """End the request from outside; its handler reports `failure`.

        A handler in the middle of a write is left to finish that first, unless `force` says that the write
        itself is what hangs.
        """
        if self.failure is not None or self._done.is_set():
            return
        self.failure = failure
        if self._task is not None and (force or self.writing_since is None):
            self._task.cancel()

    @property
    def done(self) -> bool:
        """Whether the handler has ended."""
        return self._done.is_set()

    def finish(self) -> None:
        """Mark the request ended and wake whoever waits for it."""
        self._done.set()

    async def wait_done(self, timeout: float | None) -> bool:
        """Wait until the handler ended; False when `timeout` seconds passed first."""
        try:
            async with asyncio.timeout(timeout):
                await self._done.wait()
        except TimeoutError:
            return False
        return True


class RequestTable:
    """Every request in flight, by the caller's id. `on_death` is told what `report_death` is."""

    def __init__(self, abort_in_engine: Callable[[str], Awaitable[None]]) -> None:
        self.on_death: Callable[[EngineDied], None] = lambda _death: None
        self._abort_in_engine = abort_in_engine
        self._active: dict[str, ActiveRequest] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._active)

    def __iter__(self) -> Iterator[ActiveRequest]:
        return iter(list(self._active.values()))

    @contextlib.contextmanager
    def claim(self, request_id: str, *, unary: bool = False) -> Iterator[ActiveRequest]:
        """Hold `request_id` for the calling task. Raises `Rejected` ALREADY_EXISTS (GEN-04, TASK-07)."""
        if request_id in self._active:
            raise Rejected(
                grpc.StatusCode.ALREADY_EXISTS,
                f"{request_id!r} is in flight; wait for its end, abort it, or use another id",
                field="context.request_id" if unary else "request_id",
                value=request_id,
            )
        request = ActiveRequest(request_id, asyncio.current_task(), unary=unary)
        self._active[request_id] = request
        self._ended.pop(request_id, None)
        try:
            yield request
        finally:
            self._release(request)

    def _release(self, request: ActiveRequest) -> None:
        # An aborted id may belong to a newer request by now; only its own entry is removed.
        if self._active.get(request.request_id) is request:
            del self._active[request.request_id]
            self._ended[request.request_id] = None
            while len(self._ended) > REMEMBERED:
                self._ended.popitem(last=False)
        request.finish()

    async def abort(self, request_id: str) -> AbortOutcome:
        """End one request; on return its id is free again. Raises `Rejected` NOT_FOUND (ABORT-01)."""
        request = self._active.get(request_id)
        if request is None:
            if request_id in self._ended:
                return AbortOutcome.ALREADY_FINISHED
            raise Rejected(
                grpc.StatusCode.NOT_FOUND,
                f"{request_id!r} is neither in flight nor recently finished",
                field="request_id",
                value=request_id,
            )
        await self.abort_request(request)
        return AbortOutcome.ABORTED

    async def abort_all(self) -> int:
        """End every request in flight (ABORT-03) and return how many there were."""
        requests = list(self)
        await asyncio.gather(*(self.abort_request(request) for request in requests))
        return len(requests)

    async def abort_request(self, request: ActiveRequest) -> None:
        """End this very request, whoever holds its id by now."""
        request.aborted = True
        if request.unary:
            request.interrupt(EngineFailure("aborted", code=errors_pb2.ERROR_CODE_CANCELLED))
        else:
            await self._abort_in_engine(request.call_id)
        if not await request.wait_done(ABORT_GRACE_S):
            # The reader stalls or the engine is slow to answer: the id must be free all the same.
            request.interrupt(EngineFailure("aborted", code=errors_pb2.ERROR_CODE_CANCELLED), force=True)
            self._release(request)

    def report_death(self, request: ActiveRequest, death: EngineDied) -> None:
        """The request saw the engine die; Health must say so before the request's own end does (ERR-04)."""
        request.failure = request.failure or death  # it ends by itself
        self.on_death(death)

    def interrupt_all(self, failure: EngineFailure) -> None:
        """End every request with one failure (ERR-04)."""
        for request in self:
            request.interrupt(failure)

    async def wait_ended(self, requests: list[ActiveRequest], timeout: float | None) -> bool:
        """Wait until all of `requests` ended; False when `timeout` seconds passed first."""
        try:
            async with asyncio.timeout(timeout):
                for request in requests:
                    await request.wait_done(None)
        except TimeoutError:
            return False
        return True
