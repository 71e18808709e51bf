"""A bounded record of one stream of events that any number of subscribers read at their own pace.

The last events are kept once, whatever the number of subscribers: each of these is no more than a position. One that
falls behind the oldest event kept has lost some and ends with OVERLOADED; neither the others nor the writer notice.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Generic, TypeVar

from openengine.v1 import errors_pb2
from openengine_adapters.core.errors import EngineFailure

Item = TypeVar("Item")


class Journal(Generic[Item]):
    """One uninterrupted stretch of events at consecutive positions, of which the last ones are kept.

    At most `max_items` of them, and beyond the newest no more than `max_bytes`, as `append` is told their sizes.
    """

    def __init__(self, begin: int, *, max_items: int, max_bytes: int) -> None:
        self.next = begin
        self.failure: EngineFailure | None = None
        self._begin = begin
        self._max_items = max_items
        self._max_bytes = max_bytes
        self._bytes = 0
        self._kept: deque[tuple[Item, int]] = deque()
        self._listeners: set[asyncio.Event] = set()

    @property
    def oldest(self) -> int:
        """The position of the oldest event kept; `next` when none is."""
        return self.next - len(self._kept)

    @property
    def replayable(self) -> int:
        """The oldest position to begin at: with half of what is kept still ahead of the end, a reader can catch up."""
        return self.oldest if self.oldest == self._begin else self.next - len(self._kept) // 2

    def append(self, item: Item, size: int) -> None:
        """Add an event of `size` bytes and wake the readers."""
        self._kept.append((item, size))
        self._bytes += size
        self.next += 1
        while len(self._kept) > self._max_items or (self._bytes > self._max_bytes and len(self._kept) > 1):
            self._bytes -= self._kept.popleft()[1]
        self._wake()

    def close(self, failure: EngineFailure) -> None:
        """Nothing follows: readers get what is left, then `failure`. Only the first call counts."""
        if self.failure is None:
            self.failure = failure
            self._wake()

    def get(self, position: int) -> Item:
        """The event at a position from `oldest` on, below `next`."""
        return self._kept[position - self.oldest][0]

    @contextlib.contextmanager
    def listening(self, wake: asyncio.Event) -> Iterator[None]:
        """Set `wake` after each change."""
        self._listeners.add(wake)
        try:
            yield
        finally:
            self._listeners.discard(wake)

    def _wake(self) -> None:
        for listener in self._listeners:
            listener.set()


class Cursor(Generic[Item]):
    """A reader's position in a journal."""

    def __init__(self, journal: Journal[Item], position: int) -> None:
        self.journal = journal
        self.position = position

    def take(self) -> Item | None:
        """The next event, None when there is none yet. Raises what ended the journal, or OVERLOADED."""
        journal = self.journal
        if self.position < journal.oldest:
            raise overloaded(journal.oldest - self.position)
        if self.position == journal.next:
            if journal.failure is not None:
                raise journal.failure.with_traceback(None)  # many readers raise the same one
            return None
        item = journal.get(self.position)
        self.position += 1
        return item


async def read(cursors: Sequence[Cursor[Item]]) -> AsyncGenerator[Item, None]:
    """Yield the events of several journals as they come, in order within each. Ends only by an `EngineFailure`."""
    wake = asyncio.Event()
    with contextlib.ExitStack() as stack:
        for cursor in cursors:
            stack.enter_context(cursor.journal.listening(wake))
        while True:
            wake.clear()
            moved = False
            for cursor in cursors:
                if (item := cursor.take()) is not None:
                    moved = True
                    yield item
            if not moved:
                await wake.wait()


def overloaded(missed: int) -> EngineFailure:
    """A subscriber read too slowly (KVE-05)."""
    return EngineFailure(
        f"the subscriber reads too slowly and missed {missed} events; subscribe again",
        code=errors_pb2.ERROR_CODE_OVERLOADED,
        retryable=True,
        details={"reason": "slow_subscriber", "value": missed},
    )
