"""SubscribeRuntimeEvents: what the engine does, step by step (RTE-01 … RTE-03).

Attributes are text, numbers in decimal. What an engine cannot tell is left out. Every event has `rank`, the
data-parallel rank; beside it, on every engine with the same meaning:

- FORWARD_PASS, one for each step that ran the model: `step` (counted by rank), `duration_us` (microseconds),
  `prompt_tokens` and `prompt_requests` (computed in this step, a chunk of a prompt counts as what it is),
  `generated_tokens` and `generated_requests` (put out by this step).
- BATCH, when the numbers change: `running`, `prefill` and `decode` (requests).
- QUEUE, when the numbers change: `running` and `waiting` (requests).
- TRANSFER, one for each transfer of KV blocks: `event` (`transferred`, `failed`, or an engine's own word), `bytes`,
  `duration_us`.

Keys that one engine has alone begin with its name and a dot.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import AsyncGenerator, Iterator

import grpc

from openengine.v1 import errors_pb2, observability_pb2
from openengine_adapters.core.errors import EngineFailure, Rejected
from openengine_adapters.core.journal import Cursor, Journal, read
from openengine_adapters.engine import EmitsRuntimeEvents, Engine, RuntimeEvent

KEPT_EVENTS = 4096
KEPT_BYTES = 8 * 1024 * 1024
"""How far a subscriber may fall behind."""

Request = observability_pb2.SubscribeRuntimeEventsRequest
Response = observability_pb2.SubscribeRuntimeEventsResponse


class RuntimeEvents:
    """Fans the engine's events out; the engine is observed only while somebody subscribes."""

    def __init__(self, engine: Engine) -> None:
        self.subscribers = 0
        self.overloaded = 0
        self._engine = engine
        self._prefix = uuid.uuid4().hex[:8]
        self._newest_ns = 0
        self._journal: Journal[Response] = Journal(0, max_items=KEPT_EVENTS, max_bytes=KEPT_BYTES)

    @contextlib.contextmanager
    def subscribe(self, request: Request) -> Iterator[AsyncGenerator[Response, None]]:
        """Observe the engine for one more subscriber. Raises `Rejected` when the engine tells nothing.

        The responses end by an `EngineFailure`. No types are all types; unknown ones are ignored.
        """
        if not isinstance(self._engine, EmitsRuntimeEvents):
            raise Rejected(
                grpc.StatusCode.UNIMPLEMENTED, "this engine emits no runtime events; ask GetLoad instead"
            )
        if not self.subscribers:
            self._engine.observe(self._take)
        self.subscribers += 1
        try:
            yield self._responses(Cursor(self._journal, self._journal.next), frozenset(request.types))
        finally:
            self.subscribers -= 1
            if not self.subscribers:
                self._engine.observe(None)

    def fail(self, failure: EngineFailure) -> None:
        """End every subscription with `failure`, later ones too (ERR-04)."""
        self._journal.close(failure)

    def _take(self, event: RuntimeEvent) -> None:
        # The ranks' clocks need not agree; the stream's timestamps never go back (RTE-02).
        self._newest_ns = max(self._newest_ns, event.taken_at)
        message = observability_pb2.RuntimeEvent(
            event_id=f"{self._prefix}-{self._journal.next}",
            timestamp_unix_nanos=self._newest_ns,
            type=event.type,
            attributes=event.attributes,
        )
        self._journal.append(Response(runtime_event=message), message.ByteSize())

    async def _responses(
        self, cursor: Cursor[Response], types: frozenset[int]
    ) -> AsyncGenerator[Response, None]:
        try:
            async with contextlib.aclosing(read([cursor])) as events:
                async for response in events:
                    if not types or response.runtime_event.type in types:
                        yield response
        except EngineFailure as failure:
            self.overloaded += failure.code == errors_pb2.ERROR_CODE_OVERLOADED
            raise


def error_response(error: errors_pb2.EngineError) -> Response:
    """The last response of a subscription that failed."""
    return Response(error=error)
