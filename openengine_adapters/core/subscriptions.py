"""How a subscription is answered, whatever it is about: accept, stream, and end with one EngineError (RTE-03)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from typing import Any, TypeVar

import grpc

from openengine.v1 import errors_pb2
from openengine_adapters.core.errors import EngineFailure

Response = TypeVar("Response")


async def serve(
    responses: AsyncGenerator[Response, None],
    error: Callable[[errors_pb2.EngineError], Response],
    context: grpc.aio.ServicerContext[Any, Response],
    stall_s: float,
) -> None:
    """Send `responses` until the subscriber leaves, or until their `EngineFailure` becomes the last one.

    The initial metadata goes out before the first event (KVE-07). A subscriber that lets one write wait for `stall_s`
    seconds can be told nothing more, so its call ends as a transport failure.
    """
    async with contextlib.aclosing(responses):
        await context.send_initial_metadata(())
        try:
            try:
                async for response in responses:
                    async with asyncio.timeout(stall_s):
                        await context.write(response)
            except EngineFailure as failure:
                async with asyncio.timeout(stall_s):
                    await context.write(error(failure.to_proto()))
        except TimeoutError:
            await context.abort(grpc.StatusCode.ABORTED, f"the subscriber read nothing for {stall_s:g} s")
