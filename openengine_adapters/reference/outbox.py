"""What waits for the reader of one request's stream."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from openengine_adapters.engine import Step

CAPACITY = 64
"""Steps that may wait. A request whose reader is slower pauses, so its memory stays bounded (STREAM-10)."""


class Outbox:
    """A queue of steps with an end. `on_room` is called when a full outbox takes steps again."""

    def __init__(self, on_room: Callable[[], None]) -> None:
        self._on_room = on_room
        self._steps: deque[Step] = deque()
        self._changed = asyncio.Event()
        self._ended = False
        self._failure: BaseException | None = None

    @property
    def full(self) -> bool:
        """Whether the writer should pause; an end is always taken."""
        return len(self._steps) >= CAPACITY

    def put(self, step: Step) -> None:
        """Add a step."""
        self._steps.append(step)
        self._changed.set()

    def end(self, failure: BaseException | None = None) -> None:
        """Nothing follows; with a failure, the reader gets it after the last step."""
        if not self._ended:
            self._ended, self._failure = True, failure
            self._changed.set()

    async def take(self) -> Step | None:
        """Return the next step, None at the end. Raises the failure that ended the stream."""
        while not self._steps:
            if self._failure is not None:
                raise self._failure
            if self._ended:
                return None
            self._changed.clear()
            await self._changed.wait()
        was_full = self.full
        step = self._steps.popleft()
        if was_full:
            self._on_room()
        return step
