"""Short words for asking a reference engine, used by every test here."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import pathlib
import struct
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from openengine.v1 import generate_pb2
from openengine_adapters.engine import (
    Delta,
    Finish,
    FinishKind,
    GenerateCall,
    Lora,
    Media,
    PromptScores,
    Step,
    TokenScore,
)
from openengine_adapters.reference.engine import ReferenceEngine
from openengine_adapters.reference.settings import Settings

SOON_S = 10.0
PROMPT = "Hello world, it is a morning by the river"

_numbers = itertools.count(1)


@dataclass
class Output:
    """All of one output, put together from its deltas."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    scores: list[TokenScore] = field(default_factory=list)
    finish: Finish | None = None

    def add(self, delta: Delta) -> None:
        assert self.finish is None, "something after the finish"
        self.ids += delta.token_ids
        self.text += delta.text
        self.scores += delta.scores or []
        self.finish = delta.finish

    @property
    def kind(self) -> FinishKind:
        assert self.finish is not None
        return self.finish.kind


@dataclass
class Answer:
    """A whole stream, put together."""

    outputs: dict[int, Output] = field(default_factory=dict)
    prompt: PromptScores | None = None
    prompt_tokens: int = 0
    cached: int | None = None
    session: Any = None
    steps: int = 0

    def add(self, step: Step) -> None:
        self.steps += 1
        for delta in step.deltas:
            self.outputs.setdefault(delta.index, Output()).add(delta)
        self.prompt = step.prompt or self.prompt
        self.prompt_tokens = max(self.prompt_tokens, step.prompt_tokens)
        self.cached = step.cached_prompt_tokens
        self.session = step.session or self.session

    @property
    def one(self) -> Output:
        assert list(self.outputs) == [0]
        return self.outputs[0]


def call(
    prompt: str | list[int] = PROMPT,
    *,
    keep_stop: bool = False,
    lora: Lora | None = None,
    media: tuple[Media, ...] = (),
    max_tokens: int | None = 16,
    temperature: float | None = 0.0,
    **fields: Any,
) -> GenerateCall:
    """A call as the core makes it; greedy unless told otherwise, `fields` are fields of the request."""
    number = next(_numbers)
    request = generate_pb2.GenerateRequest(request_id=f"r{number}", model="reference-toy", **fields)
    if isinstance(prompt, str):
        request.prompt = prompt
    else:
        request.token_ids.ids.extend(prompt)
    if max_tokens is not None:
        request.stopping.max_tokens = max_tokens
    if temperature is not None and not request.sampling.HasField("temperature"):
        request.sampling.temperature = temperature
    return GenerateCall(id=f"{number:032x}", request=request, keep_stop=keep_stop, lora=lora, media=media)


async def ask(engine: ReferenceEngine, *arguments: Any, **fields: Any) -> Answer:
    """Make a call and read it to its end."""
    return await read(engine, call(*arguments, **fields))


async def read(engine: ReferenceEngine, made: GenerateCall) -> Answer:
    """Read a call to its end."""
    answer = Answer()
    async with asyncio.timeout(SOON_S), contextlib.aclosing(await engine.generate(made)) as stream:
        async for step in stream:
            answer.add(step)
    return answer


@contextlib.asynccontextmanager
async def running(**settings: Any) -> AsyncIterator[ReferenceEngine]:
    """A started engine; whatever a test leaves behind, nothing may stay in use."""
    engine = ReferenceEngine(Settings(**{"kv_events": False, **settings}))
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


async def until(condition: Callable[[], bool]) -> None:
    """Wait until `condition` holds."""
    async with asyncio.timeout(SOON_S):
        while not condition():
            await asyncio.sleep(0.002)


def write_adapter(folder: pathlib.Path, weights: bytes = b"w" * 64) -> pathlib.Path:
    """Write a small valid LoRA adapter."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4}))
    header = json.dumps(
        {"w": {"dtype": "U8", "shape": [len(weights)], "data_offsets": [0, len(weights)]}}
    ).encode()
    (folder / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + weights)
    return folder
