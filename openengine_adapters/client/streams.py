"""Server-streaming calls as async iterators whose `aclose` cancels the call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import grpc.aio

from openengine.v1 import kv_pb2, lifecycle_pb2
from openengine.v1.observability_pb2 import RuntimeEvent, SubscribeRuntimeEventsResponse
from openengine_adapters.client.errors import ClientError, ContractViolation, EngineError
from openengine_adapters.client.messages import enum_name

Response = TypeVar("Response")
Item = TypeVar("Item")

# How long a server may take to close a stream whose last event it has sent.
_CLOSING = 5.0


class ResponseStream(AsyncIterator[Item], Generic[Response, Item]):
    """One running call. Iterate over it; leave early with `aclose` or by leaving the `async with` block."""

    def __init__(
        self,
        call: grpc.aio.UnaryStreamCall[Any, Response],
        failure: Callable[[grpc.aio.AioRpcError, bool], ClientError],
    ) -> None:
        self._call = call
        self._failure = failure
        self._began = False
        self._complete = False  # the terminal event has come
        self._closed = False

    async def __anext__(self) -> Item:
        while not self._closed and (response := await self._read()) is not None:
            item = self._item(response)
            if item is not None:
                return item
        if not self._closed:
            self._check_end()
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Cancel the call unless it has ended. The server frees what it held for it."""
        self._closed = True
        self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def _item(self, response: Response) -> Item | None:
        """Return what the caller sees of a response; None passes over one of a kind not known here."""
        raise NotImplementedError

    def _check_end(self) -> None:
        """Raise `ContractViolation` when the stream may not end here."""

    async def _read(self) -> Response | None:
        try:
            async with asyncio.timeout(_CLOSING if self._complete else None):
                response = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise self._failure(error, self._began) from None
        except TimeoutError:
            self._call.cancel()
            return None
        if response is grpc.aio.EOF:
            return None
        self._began = True
        return response  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class DrainStep:
    """One report of a drain. A count that the server cannot tell is None."""

    state: str  # STARTED, IN_PROGRESS, COMPLETE
    in_flight_requests: int | None
    open_kv_sessions: int | None
    message: str


class DrainSteps(ResponseStream[lifecycle_pb2.DrainResponse, DrainStep]):
    """A drain's progress; the last step is COMPLETE."""

    def _item(self, response: lifecycle_pb2.DrainResponse) -> DrainStep | None:
        if response.HasField("error"):
            raise EngineError(response.error)
        if not response.HasField("state"):
            return None
        self._complete = response.state == lifecycle_pb2.DRAIN_STATE_COMPLETE
        return DrainStep(
            enum_name(lifecycle_pb2.DrainState, response.state),
            response.in_flight_requests if response.HasField("in_flight_requests") else None,
            response.open_kv_sessions if response.HasField("open_kv_sessions") else None,
            response.message,
        )

    def _check_end(self) -> None:
        if not self._complete:
            raise ContractViolation("the server ended the drain's stream without COMPLETE or an error")


class KvBatches(ResponseStream[kv_pb2.SubscribeKvEventsResponse, kv_pb2.KvEventBatch]):
    """Batches of KV cache events, for as long as the server lives or the caller listens."""

    def _item(self, response: kv_pb2.SubscribeKvEventsResponse) -> kv_pb2.KvEventBatch | None:
        if response.HasField("error"):
            raise EngineError(response.error)
        return response.batch if response.HasField("batch") else None


class RuntimeEvents(ResponseStream[SubscribeRuntimeEventsResponse, RuntimeEvent]):
    """Events of the engine's scheduler."""

    def _item(self, response: SubscribeRuntimeEventsResponse) -> RuntimeEvent | None:
        if response.HasField("error"):
            raise EngineError(response.error)
        return response.runtime_event if response.HasField("runtime_event") else None
