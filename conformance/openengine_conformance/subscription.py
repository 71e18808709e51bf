# SPDX-License-Identifier: Apache-2.0
"""A server stream other than Generate: a drain, KV events, runtime events."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, Generic, TypeVar

import grpc
from google.protobuf.message import Message

from openengine_conformance.checks import Failure, Refused, expect, expect_clean_status
from openengine_conformance.exchange import Exchange

Res = TypeVar("Res", bound=Message)


class Subscription(Generic[Res]):
    """One open server stream; every response has the oneof `event`, of which `error` is terminal.

    A task of its own reads the call, because giving up a read in grpc.aio gives up the whole call.
    """

    def __init__(self, call: grpc.aio.UnaryStreamCall[Any, Res], exchange: Exchange) -> None:
        self.responses: list[Res] = []
        self.status: grpc.StatusCode | None = None
        self._call = call
        self._exchange = exchange
        self._failed = False
        # Unbounded, as `responses`: a case runs for seconds.
        self._arrived: asyncio.Queue[Res | None] = asyncio.Queue()
        self._reader = asyncio.create_task(self._read_all())

    async def accepted(self, within: float = 5.0, rule: str = "") -> None:
        """Wait for the initial metadata. Raises `Refused` when the server refused the stream."""
        try:
            async with asyncio.timeout(within):
                await asyncio.shield(asyncio.ensure_future(self._call.initial_metadata()))
        except TimeoutError:
            raise Failure(f"no initial metadata within {within:g} s of the subscription", rule) from None
        self._exchange.saw_headers()
        if self._call.done() and await self._call.code() is not grpc.StatusCode.OK:
            await self._reader
            await self._end()

    async def next(self, within: float | None = None) -> Res | None:
        """Return the next response, None at the stream's end. Raises TimeoutError after `within` seconds."""
        if self.status is not None:
            return None
        async with asyncio.timeout(within):
            response = await self._arrived.get()
        if response is None:
            await self._end()
            return None
        expect(not self._failed, "a response follows the terminal EngineError", "ERR-01")
        self.responses.append(response)
        event = response.WhichOneof("event")
        expect(event, "a response sets no event", "ERR-01")
        self._failed = event == "error"
        return response

    async def collect(self, quiet: float, at_least: int = 0, most: float = 15.0) -> list[Res]:
        """Return what comes until nothing came for `quiet` seconds; waits up to `most` for `at_least`."""
        found: list[Res] = []
        loop = asyncio.get_running_loop()
        end = loop.time() + most
        while loop.time() < end:
            patience = quiet if len(found) >= at_least else end - loop.time()
            try:
                response = await self.next(within=patience)
            except TimeoutError:
                break
            if response is None:
                break
            found.append(response)
        return found

    async def close(self) -> None:
        """Cancel the stream if it still runs."""
        if not self._call.done():
            self._call.cancel()
            self._exchange.ended("cancelled by the suite")
        await self._reader

    async def _read_all(self) -> None:
        # A status is told by `_end`, once the responses before it have been taken.
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
            async for response in self._call:
                self._exchange.saw(response)
                self._arrived.put_nowait(response)
        self._arrived.put_nowait(None)

    async def _end(self) -> None:
        self.status = await self._call.code()
        details = await self._call.details() or ""
        self._exchange.ended(f"{self.status.name}: {details}" if details else self.status.name)
        if self.status is grpc.StatusCode.OK:
            return
        if self.responses:
            raise Failure(f"after acceptance the stream ended with {self.status.name}: {details}", "ERR-01")
        expect_clean_status(self.status, details)
        raise Refused(self.status, details)
