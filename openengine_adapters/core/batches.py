"""Many small pieces of work as one: bounded, in order, all or nothing (TASK-14, TASK-15)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from openengine_adapters.core.errors import EngineFailure

Item = TypeVar("Item")
Result = TypeVar("Result")


async def run_batch(
    items: Sequence[Item], work: Callable[[int, Item], Awaitable[Result]], limit: int
) -> list[Result]:
    """Run `work(index, item)` for every item, at most `limit` at once, and return the results in order.

    The first failure cancels the rest, waits for their end, and is raised.
    """
    results: dict[int, Result] = {}
    waiting = iter(enumerate(items))

    async def take() -> None:
        for index, item in waiting:
            results[index] = await work(index, item)

    failure: BaseException | None = None
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(limit, len(items))):
                group.create_task(take())
    except BaseExceptionGroup as failures:
        failure = failures.exceptions[0]
    if failure is not None:
        raise failure
    if len(results) < len(items):
        # A task group passes over a member that was cancelled by itself.
        raise EngineFailure("the engine dropped a part of the batch", retryable=True)
    return [results[index] for index in range(len(items))]
