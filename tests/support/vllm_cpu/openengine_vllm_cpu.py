# SPDX-License-Identifier: Apache-2.0
"""A plugin of vLLM (entry point group `vllm.general_plugins`), which loads it in each of its processes.

A worker polls for the next step without a pause, for a second after the last one. Where a GPU's host has cores to spare
that is meant so; here it leaves the test without a core, so that it sees a second's tokens at once, too late to act on
them.
"""

from __future__ import annotations

import importlib
from typing import Any

PAUSE_MS = 2


def apply() -> None:
    """Let a worker sleep while nothing arrives."""
    queue: Any = importlib.import_module("vllm.distributed.device_communicators.shm_broadcast")
    if getattr(queue.SpinCondition, "sleeps", False):
        return  # vLLM loads its plugins more than once

    class SleepingCondition(queue.SpinCondition):  # type: ignore[misc]  # untyped where vLLM is not installed
        sleeps = True

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "busy_loop_s": 0})

        def wait(self, timeout_ms: int | None = None) -> None:
            # Its own sleep is not always woken up: without the second of polling it is needed at each step.
            super().wait(PAUSE_MS if timeout_ms is None else min(timeout_ms, PAUSE_MS))

    queue.SpinCondition = SleepingCondition
