"""Real vLLM engines on small models, one for each folder of tests that needs it, and one reference for all."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from tests.support.tasks.cases import Reference, model
from tests.support.wire import Wire, serving
from tests.vllm.conftest import vllm_engine

_JOBS = (
    *("minilm", "llama", "adapted", "sentiment", "entities", "rewards"),
    *("pairs", "labels", "rerank", "rerank-instructed", "see"),
)


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reference]:
    """The independent answers."""
    found = Reference(tmp_path_factory.mktemp("reference"), _JOBS)
    yield found
    found.close()


@contextlib.asynccontextmanager
async def served(name: str, *flags: str, **more: Any) -> AsyncIterator[Wire]:
    """A model in float32, so that it agrees with the reference to many digits."""
    model(name)
    async with serving(vllm_engine(name, "--dtype", "float32", *flags, **more)) as wire:
        yield wire
