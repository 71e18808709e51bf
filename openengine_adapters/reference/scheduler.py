"""The step loop of one data-parallel rank: bounded slots, a bounded queue, higher priority first."""

from __future__ import annotations

import abc
import asyncio
import bisect
import logging
import time
from collections.abc import Callable, Mapping

import grpc

from openengine.v1 import observability_pb2 as obs
from openengine_adapters.core.errors import EngineFailure, Rejected
from openengine_adapters.engine import RankLoad, RuntimeEvent
from openengine_adapters.reference.cache import BlockCache, CacheEvent, Lease, Namespace
from openengine_adapters.reference.settings import BLOCK_SIZE, Settings

log = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
"""With every reader slow or every request delayed, the loop still turns once in so many seconds."""

Sink = Callable[[RuntimeEvent], None]


class Work(abc.ABC):
    """One request, or one item of a task, from its submission to its end."""

    def __init__(self, call_id: str, priority: int, namespace: Namespace) -> None:
        self.call_id = call_id
        self.priority = priority
        self.namespace = namespace
        self.lease: Lease | None = None
        self.ready = True  # False while a KV transfer has to come first
        self.not_before = 0.0
        self.started = False
        self.generated = 0  # tokens, over all outputs

    @property
    @abc.abstractmethod
    def tokens(self) -> int:
        """Tokens that it holds now, the whole prompt included."""

    @property
    @abc.abstractmethod
    def blocks(self) -> int:
        """The most cache blocks that it can come to need."""

    @property
    def paused(self) -> bool:
        """Whether its reader has to catch up first."""
        return False

    @abc.abstractmethod
    def step(self, budget: int) -> tuple[int, int]:
        """Read at most `budget` prompt tokens and generate; return how many it read and how many it generated."""

    @property
    @abc.abstractmethod
    def done(self) -> bool:
        """Whether nothing is left to do."""

    @abc.abstractmethod
    def cancel(self) -> None:
        """End it for its reader as aborted."""

    @abc.abstractmethod
    def fail(self, failure: BaseException) -> None:
        """End it for its reader with a failure."""

    def release(self) -> None:
        """Free its blocks."""
        if self.lease is not None:
            self.lease.release()


class Scheduler:
    """Runs works in steps. `flush` gets the cache's changes after each step, `counted` the tokens generated."""

    def __init__(
        self,
        settings: Settings,
        rank: int,
        *,
        flush: Callable[[list[CacheEvent]], None],
        counted: Callable[[int], None],
    ) -> None:
        self.cache = BlockCache(settings.kv_blocks, BLOCK_SIZE)
        self.steps = 0
        self.hung = False
        self.sink: Sink | None = None
        self._settings = settings
        self._rank = rank
        self._flush = flush
        self._counted = counted
        self._waiting: list[tuple[int, int, Work]] = []
        self._running: list[Work] = []
        self._arrivals = 0
        self._wake = asyncio.Event()
        self._next_step = 0.0
        self._batch = (0, 0)

    # ------------------------------------------------------------------------------------------ from outside

    def submit(self, work: Work) -> None:
        """Queue `work`. Raises `Rejected` when the queue is full or the work could never fit."""
        if work.blocks > self.cache.total:
            raise Rejected(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"the request needs up to {work.blocks} KV blocks and the engine has {self.cache.total}; "
                "ask for fewer tokens, sequences or candidates",
                limit=self.cache.total,
                value=work.blocks,
            )
        free = self._settings.max_running - len(self._running)
        if len(self._waiting) >= self._settings.max_waiting + max(free, 0):
            raise Rejected(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"the queue is full with {len(self._waiting)} requests; try again later",
                limit=self._settings.max_waiting,
                value=len(self._waiting),
            )
        self._arrivals += 1
        bisect.insort(self._waiting, (-work.priority, self._arrivals, work))
        self._emit_queue("enqueued")
        self.wake()

    def wake(self) -> None:
        """Let the loop look again: something arrived, became ready or was read."""
        self._wake.set()

    def discard(self, work: Work) -> None:
        """Forget `work` and free what it holds, at once. Unknown work is ignored."""
        if work in self._running:
            self._running.remove(work)
        else:
            queued = [entry for entry in self._waiting if entry[2] is work]
            for entry in queued:
                self._waiting.remove(entry)
            if queued:
                self._emit_queue("removed")
        work.release()
        self.wake()

    def works(self) -> list[Work]:
        """Everything queued or running."""
        return [*self._running, *(entry[2] for entry in self._waiting)]

    def load(self) -> RankLoad:
        """The load now."""
        waiting = [entry[2] for entry in self._waiting]
        return RankLoad(
            rank=self._rank,
            running_requests=len({work.call_id for work in self._running}),
            queued_requests=len({work.call_id for work in waiting}),
            used_kv_blocks=self.cache.used,
            total_kv_blocks=self.cache.total,
            running_tokens=sum(work.tokens for work in self._running),
            waiting_tokens=sum(work.tokens for work in waiting),
            prefill_batch_size=self._batch[0] if self._running else 0,
            decode_batch_size=self._batch[1] if self._running else 0,
        )

    def emit(self, kind: obs.RuntimeEventType.ValueType, attributes: Mapping[str, object]) -> None:
        """Tell the observer, if there is one."""
        if self.sink is not None:
            texts = {key: str(value) for key, value in attributes.items()}
            self.sink(RuntimeEvent(kind, time.time_ns(), {"rank": str(self._rank), **texts}))

    # --------------------------------------------------------------------------------------------- the loop

    async def run(self) -> None:
        """Step until cancelled."""
        clock = asyncio.get_running_loop().time
        self._flush_events()
        while not self.hung:
            self._wake.clear()
            self.steps += 1
            self._admit(clock())
            batch = [work for work in self._running if not work.paused and work.not_before <= clock()]
            if batch:
                self._step(batch)
            self._flush_events()
            if batch:
                await self._pace(clock())
            else:
                await self._wait(clock())

    def _flush_events(self) -> None:
        if self.cache.events:
            events, self.cache.events = self.cache.events, []
            self._flush(events)

    async def _pace(self, now: float) -> None:
        """Wait until the next step is due; without a speed, only let others run."""
        if self._settings.speed:
            self._next_step = max(self._next_step + 1 / self._settings.speed, now)
        await asyncio.sleep(max(0.0, self._next_step - now) if self._settings.speed else 0)

    async def _wait(self, now: float) -> None:
        delayed = [work.not_before - now for work in self._running if work.not_before > now]
        unfinished = self._running or self._waiting
        try:
            async with asyncio.timeout(min([HEARTBEAT_S, *delayed]) if unfinished else None):
                await self._wake.wait()
        except TimeoutError:
            pass

    def _admit(self, now: float) -> None:
        """Move works into the batch, best priority first; one that does not fit lets nobody pass."""
        for entry in list(self._waiting):
            work = entry[2]
            if len(self._running) >= self._settings.max_running:
                return
            if not work.ready:
                continue
            work.lease = self.cache.lease(work.blocks, work.namespace)
            if work.lease is None:
                return
            self._waiting.remove(entry)
            work.started = True
            work.not_before = now + self._settings.latency
            self._running.append(work)
            self._emit_queue("started")

    def _step(self, batch: list[Work]) -> None:
        began = time.perf_counter_ns()
        budget = self._settings.step_tokens
        prefills = decodes = read = generated = 0
        for work in batch:
            if work not in self._running:  # ended by a failure that another one's tokens set off
                continue
            try:
                consumed, produced = work.step(budget)
            except Exception as error:
                # A fault in one request must not take the others with it.
                log.exception("a step of request %s failed", work.call_id)
                work.fail(EngineFailure(f"a step failed: {type(error).__name__}"))
                self.discard(work)
                continue
            budget -= consumed
            read, generated = read + consumed, generated + produced
            prefills, decodes = prefills + bool(consumed), decodes + bool(produced)
            if work.done:
                self.discard(work)
            self._counted(produced)
            if self.hung:
                break
        if (prefills, decodes) != self._batch:
            self._batch = (prefills, decodes)
            counts = {"running": len(self._running), "prefill": prefills, "decode": decodes}
            self.emit(obs.RUNTIME_EVENT_TYPE_BATCH, counts)
        self.emit(
            obs.RUNTIME_EVENT_TYPE_FORWARD_PASS,
            {
                "step": self.steps,
                "duration_us": (time.perf_counter_ns() - began) // 1000,
                "prompt_tokens": read,
                "prompt_requests": prefills,
                "generated_tokens": generated,
                "generated_requests": decodes,
            },
        )

    def _emit_queue(self, change: str) -> None:
        counts = {"running": len(self._running), "waiting": len(self._waiting)}
        self.emit(obs.RUNTIME_EVENT_TYPE_QUEUE, {**counts, "reference.change": change})
