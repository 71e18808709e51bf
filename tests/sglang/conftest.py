"""The real SGLang on the CPU, in this process: one engine for most tests, SmolLM2 for those that need sense."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator

import pytest_asyncio

from tests.support import cpu_env
from tests.support.wire import Wire, serving

os.environ.update(cpu_env.sglang_env())
sys.path.insert(0, str(cpu_env.SGLANG_STAND_INS))  # the environment is for the children; this process has begun


def sglang_engine(model: str, *flags: str) -> object:
    """An engine with the flags of the CPU set-up and `flags` behind them."""
    from openengine_adapters.sglang.config import parse_flags
    from openengine_adapters.sglang.engine import SglangEngine

    return SglangEngine(
        parse_flags([*cpu_env.sglang_flags(model), "--sleep-on-idle", "--log-level", "error", *flags])
    )


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def tiny() -> AsyncIterator[Wire]:
    """A tiny random Llama that schedules by priority, under a name of its own."""
    flags = ("--enable-priority-scheduling", "--served-model-name", "tiny")
    async with serving(sglang_engine(cpu_env.TINY_LLAMA, *flags)) as wire:  # type: ignore[arg-type]  # SGLang is untyped here
        yield wire
