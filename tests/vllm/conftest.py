"""The real vLLM on the CPU, in this process: one engine for most tests, SmolLM2 for those that need sense."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from typing import Any

import pytest_asyncio

from tests.support import cpu_env
from tests.support.wire import Wire, serving

os.environ.update(cpu_env.vllm_env())
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


def vllm_engine(model: str, *flags: str, **more: Any) -> Any:
    """An engine with the flags of the CPU set-up and `flags` behind them."""
    from vllm import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from openengine_adapters.vllm.engine import VllmEngine

    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    args = AsyncEngineArgs.from_cli_args(parser.parse_args([*cpu_env.vllm_flags(model), *flags]))
    return VllmEngine(args, **more)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def tiny() -> AsyncIterator[Wire]:
    """A tiny random Llama with every option of Generate switched on."""
    flags = (
        "--max-logprobs",
        "-1",
        "--scheduling-policy",
        "priority",
        "--served-model-name",
        "tiny",
        "small",
    )
    async with serving(vllm_engine(cpu_env.TINY_LLAMA, *flags)) as wire:
        yield wire


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def smol() -> AsyncIterator[Wire]:
    """SmolLM2-135M-Instruct with vLLM's defaults."""
    async with serving(vllm_engine(cpu_env.SMOLLM2)) as wire:
        yield wire


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def evicting() -> AsyncIterator[Wire]:
    """A tiny random Llama with few cache blocks, KV events, and details of each step."""
    from openengine_adapters.publishers import KvEventsWanted

    flags = (
        "--num-gpu-blocks-override",
        "48",
        "--max-model-len",
        "512",
        "--enable-logging-iteration-details",
    )
    engine = vllm_engine(cpu_env.TINY_LLAMA, *flags, kv_events=KvEventsWanted(events=True))
    async with serving(engine) as wire:
        yield wire
