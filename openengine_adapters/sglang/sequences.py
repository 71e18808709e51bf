"""The sequences of one call: requests of their own to SGLang, one stream to the core.

SGLang would serve several sequences from one request too, but under ids that it makes up, so that they could not be
aborted, and with one seed for all.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from types import TracebackType
from typing import Any

from openengine_adapters.engine import Step
from openengine_adapters.sglang.outputs import OutputReader

POLL_S = 0.005


class Sequences:
    """All sequences of a call, which begin in order and end together: when the context is left, none goes on."""

    def __init__(self, manager: Any, inputs: Sequence[Any], reader: OutputReader) -> None:
        self._all = [_One(manager, index, request, reader) for index, request in enumerate(inputs)]
        self._reader = reader

    async def __aenter__(self) -> Sequences:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for one in self._all:
            await one.close()

    async def admit(self, *, first_output: bool) -> None:
        """Return when the scheduler has every sequence, with `first_output` when the first one has begun."""
        first, *others = self._all
        await first.admit()
        if first_output:
            await first.begin()
        for one in others:
            await one.admit()

    def abort(self) -> None:
        """Let every sequence end with SGLang's finish reason `abort`."""
        for one in self._all:
            one.abort()

    async def steps(self) -> AsyncGenerator[Step, None]:
        """Yield what the sequences gain, as it comes."""
        if len(self._all) == 1:
            (only,) = self._all
            while (step := await only.next()) is not None:
                yield step
            return
        # A sequence that finds the queue full waits; SGLang then joins its chunks.
        queue: asyncio.Queue[Step | Exception | None] = asyncio.Queue(len(self._all))
        first_began = asyncio.Event()
        if not self._reader.prompt_due:
            first_began.set()
        tasks = [asyncio.create_task(_pump(one, queue, first_began)) for one in self._all]
        left = len(tasks)
        try:
            while left:
                item = await queue.get()
                if item is None:
                    left -= 1
                elif isinstance(item, Exception):
                    raise item
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(one: _One, queue: asyncio.Queue[Step | Exception | None], first_began: asyncio.Event) -> None:
    """Bring one sequence's steps; the prompt's log-probabilities, which the first one has, go before all others."""
    try:
        if one.index > 0:
            await first_began.wait()
        while (step := await one.next()) is not None:
            await queue.put(step)
            first_began.set()
    except Exception as error:
        await queue.put(error)
    else:
        await queue.put(None)


class _One:
    """One sequence: SGLang's generator, its first output, and whether it is done."""

    def __init__(self, manager: Any, index: int, request: Any, reader: OutputReader) -> None:
        self.index = index
        self._manager = manager
        self._rid: str = request.rid
        self._reader = reader
        self._chunks = manager.generate_request(request, None)
        self._first: asyncio.Task[Any] | None = None
        self._begun: Step | None = None
        self._done = False

    async def admit(self) -> None:
        """SGLang's generator sends its request at its first step, and then waits in it for the first output."""
        first = self._first = asyncio.create_task(anext(self._chunks), name=f"sglang-{self._rid}")
        await asyncio.sleep(0)
        while not (first.done() or self._dispatched()):
            # SGLang takes no requests just now, because its weights change.
            await asyncio.wait({first}, timeout=POLL_S)
        if first.done():
            first.result()

    async def begin(self) -> None:
        """Wait for the first output. Raises what SGLang says in it."""
        self._begun = await self.next()

    async def next(self) -> Step | None:
        """The next step, None after the last."""
        step, self._begun = self._begun, None
        if step is not None or self._done:
            return step
        first, self._first = self._first, None
        try:
            chunk = await (anext(self._chunks) if first is None else first)
        except StopAsyncIteration:
            self._done = True
            return None
        step = self._reader.read(self.index, chunk)
        self._done = any(delta.finish is not None for delta in step.deltas)
        return step

    def abort(self) -> None:
        # What is not sent yet would overtake its own abort, and SGLang sends that once only.
        if self._dispatched():
            self._manager.abort_request(self._rid)

    async def close(self) -> None:
        """End it in SGLang too, unless it has ended."""
        first, self._first = self._first, None
        if first is not None:
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
        await self._chunks.aclose()

    def _dispatched(self) -> bool:
        state = self._manager.rid_to_state.get(self._rid)
        return state is not None and bool(state.dispatched)
