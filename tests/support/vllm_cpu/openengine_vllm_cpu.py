# SPDX-License-Identifier: Apache-2.0
"""A plugin of vLLM (entry point group `vllm.general_plugins`), which loads it in each of its processes.

Two threads of a worker poll without a pause: NIXL's, from its start on, and vLLM's own for a second after each step.
Where a GPU's host has cores to spare that is meant so; here two such workers leave nothing of the machine. A pause is
their longest sleep.
"""

from __future__ import annotations

import importlib
from typing import Any

PAUSE_US = 2000


def apply() -> None:
    """Let a worker's threads sleep while nothing arrives."""
    bindings: Any = importlib.import_module("nixl._api").nixlBind
    if getattr(bindings.nixlAgentConfig, "sleeps", False):
        return  # vLLM loads its plugins more than once

    class SleepingConfig(bindings.nixlAgentConfig):  # type: ignore[misc]  # a C++ class
        sleeps = True

        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, PAUSE_US if name == "pthrDelay" else value)

    bindings.nixlAgentConfig = SleepingConfig
    queue: Any = importlib.import_module("vllm.distributed.device_communicators.shm_broadcast")

    class SleepingCondition(queue.SpinCondition):  # type: ignore[misc]  # untyped where vLLM is not installed
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "busy_loop_s": 0})

        def wait(self, timeout_ms: int | None = None) -> None:
            # Its own sleep is not always woken up: without the second of polling it is needed at each step.
            super().wait(PAUSE_US // 1000 if timeout_ms is None else min(timeout_ms, PAUSE_US // 1000))

    queue.SpinCondition = SleepingCondition
