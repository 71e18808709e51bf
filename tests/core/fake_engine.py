"""A scripted engine for tests of the core: it does what the test tells it, step by step."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence

from openengine_adapters.core.errors import EngineDied
from openengine_adapters.engine import (
    Delta,
    EngineDescription,
    Finish,
    FinishKind,
    GenerateCall,
    GenerationSupport,
    LoadSnapshot,
    LogprobSupport,
    RankLoad,
    Step,
)

LOGPROBS = LogprobSupport(max_top_n=5, max_token_ids=4, all=True)


def description(**changes: object) -> EngineDescription:
    """An engine that serves every option of Generate but media."""
    values: dict[str, object] = {
        "engine_name": "fake",
        "engine_version": "1.0",
        "model_id": "fake-model",
        "served_model_name": "fake",
        "served_model_aliases": ("alias",),
        "vocab_size": 100,
        "eos_token_ids": frozenset({99}),
        "max_context_length": 64,
        "generation": GenerationSupport(
            prompt_logprobs=LOGPROBS,
            output_logprobs=LOGPROBS,
            guided_modes=frozenset({1, 2, 3, 4, 5, 6}),  # type: ignore[arg-type]  # every mode of the enum
            guided_backend="fake",
            max_num_sequences=4,
            priority=True,
            cache_salt=True,
            prefix_cache_bypass=True,
        ),
    }
    return EngineDescription(**{**values, **changes})  # type: ignore[arg-type]  # checked by the dataclass


def length_finish(index: int = 0) -> Step:
    """The last step of an output that ran into its limit."""
    return Step([Delta(index, [], "", finish=Finish(FinishKind.LENGTH))], prompt_tokens=3)


def token(token_id: int, index: int = 0) -> Step:
    """A step with one token, whose text is its id's letter."""
    return Step([Delta(index, [token_id], chr(token_id))], prompt_tokens=3)


class FakeEngine:
    """Runs `script` for each request; a request without one waits until it is aborted or closed."""

    def __init__(self, **changes: object) -> None:
        self.about = description(**changes)
        self.script: Callable[[GenerateCall], Sequence[Step | Exception]] | None = None
        self.refuse: Exception | None = None
        self.running: dict[str, asyncio.Event] = {}
        self.closed: list[str] = []
        self.started: set[str] = set()
        self.calls: list[GenerateCall] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.dead = False
        self.deaf = False  # an engine that does not answer aborts

    async def start(self) -> EngineDescription:
        return self.about

    async def stop(self) -> None:
        self.dead = True

    def check(self) -> None:
        if self.dead:
            raise EngineDied

    def steps(self) -> int:
        return 0

    def unfinished(self) -> int:
        return len(self.running)

    async def generate(self, call: GenerateCall) -> AsyncGenerator[Step, None]:
        self.calls.append(call)
        await self.gate.wait()
        if self.refuse is not None:
            raise self.refuse
        self.running[call.id] = asyncio.Event()
        return self._stream(call)

    async def _stream(self, call: GenerateCall) -> AsyncGenerator[Step, None]:
        self.started.add(call.id)
        try:
            if self.script is None:
                await self.running[call.id].wait()
                outputs = range(call.request.sampling.num_sequences or 1)
                yield Step(
                    [Delta(i, [], "", finish=Finish(FinishKind.CANCELLED)) for i in outputs], prompt_tokens=3
                )
                return
            for step in self.script(call):
                if isinstance(step, Exception):
                    raise step
                assert isinstance(step, Step)
                yield step
        finally:
            self.running.pop(call.id, None)
            self.closed.append(call.id)

    async def abort(self, call_id: str) -> None:
        if call_id in self.running and not self.deaf:
            self.running[call_id].set()
            if call_id not in self.started:
                del self.running[call_id]

    async def load(self) -> LoadSnapshot:
        running = len(self.running)
        return LoadSnapshot([RankLoad(rank=0, running_requests=running, queued_requests=0)], time.time_ns())

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(token_id) for token_id in token_ids)

    def token_text(self, token_id: int) -> str:
        return chr(token_id)
