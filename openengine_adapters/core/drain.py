"""Drain: wait for the work in flight, with true counts (DRAIN-01 … DRAIN-04).

A drain whose engine dies ends with EngineError as every other stream does (ERR-04): what it waited for is lost, and
COMPLETE would say that it was served.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable

from openengine.v1 import errors_pb2, lifecycle_pb2
from openengine_adapters.core.errors import EngineFailure
from openengine_adapters.core.lifecycle import Lifecycle
from openengine_adapters.core.requests import ActiveRequest, RequestTable

PROGRESS_S = 0.25
"""Seconds between IN_PROGRESS events."""


class Drains:
    """Runs any number of drains at once. Cancelling one leaves the server draining."""

    def __init__(
        self,
        lifecycle: Lifecycle,
        requests: RequestTable,
        open_sessions: Callable[[], int],
        end_sessions: Callable[[], Awaitable[None]],
    ) -> None:
        self._lifecycle = lifecycle
        self._requests = requests
        self._open_sessions = open_sessions
        self._end_sessions = end_sessions

    async def run(
        self, request: lifecycle_pb2.DrainRequest
    ) -> AsyncGenerator[lifecycle_pb2.DrainResponse, None]:
        """Yield STARTED, IN_PROGRESS while work remains, then COMPLETE or one EngineError."""
        loop = asyncio.get_running_loop()
        end = loop.time() + request.deadline_ms / 1000 if request.HasField("deadline_ms") else None
        if request.stop_accepting_new_requests:
            self._lifecycle.drain()
        # Without the stop only what was in flight at the start is waited for (DRAIN-02).
        pending = list(self._requests)
        yield self._event(lifecycle_pb2.DRAIN_STATE_STARTED, pending)
        while self._works(request, pending):
            left = None if end is None else end - loop.time()
            if left is not None and left <= 0:
                if not request.abort_after_deadline:
                    yield self._overdue(request.deadline_ms, pending)
                    return
                await asyncio.gather(*(self._requests.abort_request(r) for r in self._remaining(pending)))
                if request.stop_accepting_new_requests:
                    await self._end_sessions()
                break
            await self._wait(pending, PROGRESS_S if left is None else min(PROGRESS_S, left))
            if self._works(request, pending):
                yield self._event(lifecycle_pb2.DRAIN_STATE_IN_PROGRESS, pending)
        if (died := self._lifecycle.died) is not None:
            yield self._failed(died, pending)
        else:
            yield self._event(lifecycle_pb2.DRAIN_STATE_COMPLETE, pending)

    def _works(self, request: lifecycle_pb2.DrainRequest, pending: list[ActiveRequest]) -> bool:
        """Whether there is something left to wait for."""
        if self._lifecycle.died is not None:
            return False
        sessions = self._open_sessions() if request.stop_accepting_new_requests else 0
        return bool(sessions or self._remaining(pending))

    async def _wait(self, pending: list[ActiveRequest], seconds: float) -> None:
        """Wait for the requests, or a while for sessions, whose end nobody tells."""
        if remaining := self._remaining(pending):
            await self._requests.wait_ended(remaining, seconds)
        else:
            await asyncio.sleep(seconds)

    def _remaining(self, pending: list[ActiveRequest]) -> list[ActiveRequest]:
        return [request for request in pending if not request.done]

    def _event(
        self, state: lifecycle_pb2.DrainState.ValueType, pending: list[ActiveRequest]
    ) -> lifecycle_pb2.DrainResponse:
        return lifecycle_pb2.DrainResponse(
            state=state,
            in_flight_requests=len(self._remaining(pending)),
            open_kv_sessions=self._open_sessions(),
        )

    def _overdue(self, deadline_ms: int, pending: list[ActiveRequest]) -> lifecycle_pb2.DrainResponse:
        left = len(self._remaining(pending))
        failure = EngineFailure(
            f"{left} requests were still running and {self._open_sessions()} sessions open after {deadline_ms} ms; "
            "drain again with a longer deadline_ms, or with abort_after_deadline",
            code=errors_pb2.ERROR_CODE_DRAINING,
            details={"field": "deadline_ms", "limit": deadline_ms, "value": left},
        )
        return self._failed(failure, pending)

    def _failed(self, failure: EngineFailure, pending: list[ActiveRequest]) -> lifecycle_pb2.DrainResponse:
        return lifecycle_pb2.DrainResponse(
            error=failure.to_proto(),
            in_flight_requests=len(self._remaining(pending)),
            open_kv_sessions=self._open_sessions(),
        )
