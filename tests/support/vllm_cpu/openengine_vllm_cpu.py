# SPDX-License-Identifier: Apache-2.0
"""A plugin of vLLM (entry point group `vllm.general_plugins`), which loads it in each of its processes.

NIXL's Python layer has its progress thread poll without a pause, which takes a whole core for each worker, idle or
not, from its start on. Where a GPU's host has cores to spare that is meant so; here two such workers leave nothing of
the machine. The thread wakes up for whatever arrives in any case: the pause is only its longest sleep.
"""

from __future__ import annotations

import importlib
from typing import Any

PAUSE_US = 5000


def apply() -> None:
    """Let NIXL's progress thread sleep while nothing arrives."""
    bindings: Any = importlib.import_module("nixl._api").nixlBind
    if getattr(bindings.nixlAgentConfig, "sleeps", False):
        return  # vLLM loads its plugins more than once

    class SleepingConfig(bindings.nixlAgentConfig):  # type: ignore[misc]  # a C++ class
        sleeps = True

        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, PAUSE_US if name == "pthrDelay" else value)

    bindings.nixlAgentConfig = SleepingConfig
