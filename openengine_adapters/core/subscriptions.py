"""How a stream of events is answered, whatever it is about: accept, send, and end with one EngineError (RTE-03)."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable
from typing import Any, TypeVar

import grpc

from openengine.v1 import errors_pb2
from openengine_adapters.core.errors import EngineFailure, unexpected

Response = TypeVar("Response")


async def serve(
    responses: AsyncGenerator[Response, None],
    error: Callable[[errors_pb2.EngineError], Response],
    context: grpc.aio.ServicerContext[Any, Response],
) -> None:
    """Send `responses` until the subscriber leaves, or until their `EngineFailure` becomes the last one.

    The initial metadata goes out before the first event (KVE-07). A subscriber that does not read holds no more than
    the one message on its way, so it may take its time: what it finds when it reads again is OVERLOADED if it missed
    anything, and its connection's keepalive ends it when it is gone.
    """
    async with contextlib.aclosing(responses):
        await context.send_initial_metadata(())
        try:
            async for response in responses:
                await context.write(response)
        except EngineFailure as failure:
            await context.write(error(failure.to_proto()))
        except Exception:
            await context.write(error(unexpected("a stream").to_proto()))
