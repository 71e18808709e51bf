"""The real SGLang on the CPU, in this process: one engine for most tests, and one with the other choices."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator

import pytest_asyncio

from tests.support import cpu_env
from tests.support.wire import Wire, serving

os.environ.update(cpu_env.sglang_env())
os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "0|0"  # asked for where there are two data-parallel ranks
# The environment is for the children; this process has begun.
sys.path.insert(0, str(cpu_env.SGLANG_STAND_INS))


def sglang_engine(model: str, *flags: str) -> object:
    """An engine with the flags of the CPU set-up and `flags` behind them."""
    from openengine_adapters.sglang.config import parse_flags
    from openengine_adapters.sglang.engine import SglangEngine

    return SglangEngine(parse_flags([*cpu_env.sglang_flags(model), "--log-level", "error", *flags]))


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def tiny() -> AsyncIterator[Wire]:
    """A tiny random Llama that schedules by priority, under a name of its own, with slots that few requests fill."""
    flags = [
        *("--served-model-name", "tiny"),
        *("--max-running-requests", "8"),
        "--enable-priority-scheduling",
    ]
    async with serving(sglang_engine(cpu_env.TINY_LLAMA, *flags)) as wire:  # type: ignore[arg-type]  # untyped here
        yield wire


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def other() -> AsyncIterator[Wire]:
    """The same model with what `tiny` leaves out: seeds, two ranks, a short queue, low priorities first, llguidance.

    For no longer than a module: SGLang's controller of ranks takes a whole core while it waits.
    """
    flags = [
        "--enable-deterministic-inference",
        *("--dp-size", "2"),
        *("--max-running-requests", "4"),  # on each rank
        *("--max-queued-requests", "2"),
        "--enable-priority-scheduling",
        "--schedule-low-priority-values-first",
        *("--grammar-backend", "llguidance"),
    ]
    async with serving(sglang_engine(cpu_env.TINY_LLAMA, *flags)) as wire:  # type: ignore[arg-type]  # untyped here
        yield wire
