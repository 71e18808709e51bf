"""Wait for what an engine was asked to do, for its death, or for a time limit, whichever comes first."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from openengine_adapters.core.errors import EngineFailure

LOOK_S = 0.5
"""Seconds between looks whether the engine still lives: engines forget calls that were under way when they died."""

Answer = TypeVar("Answer")


async def ask(call: Awaitable[Answer], check: Callable[[], None], limit_s: float) -> Answer:
    """The answer of `call`, which is cancelled when this ends without it.

    `check` raises `EngineDied` when the engine is gone. Raises `EngineFailure`, retryable, after `limit_s` seconds.
    """
    clock = asyncio.get_running_loop().time
    end = clock() + limit_s
    answer = asyncio.ensure_future(call)
    try:
        while not (await asyncio.wait({answer}, timeout=LOOK_S))[0]:
            check()
            if clock() > end:
                raise EngineFailure(f"the engine did not answer within {limit_s:g} s", retryable=True)
        return answer.result()
    finally:
        answer.cancel()
