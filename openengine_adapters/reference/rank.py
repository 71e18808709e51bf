"""One data-parallel rank: its scheduler, its prefix cache and its publisher of KV events."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from openengine_adapters.engine import KvEventPublisher
from openengine_adapters.reference.background import Background
from openengine_adapters.reference.cache import CacheEvent
from openengine_adapters.reference.kv_events import Publisher
from openengine_adapters.reference.scheduler import Scheduler
from openengine_adapters.reference.settings import BLOCK_SIZE, Settings


class Rank:
    """A scheduler that runs; `counted` hears of every step's tokens."""

    def __init__(self, number: int, settings: Settings, counted: Callable[[int], None]) -> None:
        self.number = number
        self.scheduler = Scheduler(settings, number, flush=self._flush, counted=counted)
        self._publisher: Publisher | None = None
        if settings.kv_events:
            self._publisher = Publisher(number, settings.host, BLOCK_SIZE, settings.kv_buffer_steps)

    def start(self, background: Background) -> None:
        """Run the step loop, and answer replay requests."""
        background.run(self.scheduler.run(), name=f"reference-steps-{self.number}")
        if self._publisher is not None:
            background.run(self._publisher.serve_replay(), name=f"reference-replay-{self.number}")

    def close(self) -> None:
        """Close the sockets. Safe to call twice."""
        if self._publisher is not None:
            self._publisher.close()

    def publishers(self) -> list[KvEventPublisher]:
        """The rank's publisher, if KV events are switched on."""
        return [] if self._publisher is None else [self._publisher.describe()]

    def _flush(self, events: Sequence[CacheEvent]) -> None:
        if self._publisher is not None:
            self._publisher.publish(events)
