# SPDX-License-Identifier: Apache-2.0
"""A plugin of vLLM (entry point group `vllm.general_plugins`), which loads it in each of its processes.

NIXL's thread polls without a pause from its start on, in each worker; two such workers leave nothing of two cores. A
pause is its longest sleep.
"""

from __future__ import annotations

import importlib
from typing import Any

PAUSE_US = 2000


def apply() -> None:
    """Let NIXL's thread sleep while nothing arrives."""
    bindings: Any = importlib.import_module("nixl._api").nixlBind
    if getattr(bindings.nixlAgentConfig, "sleeps", False):
        return  # vLLM loads its plugins more than once

    class SleepingConfig(bindings.nixlAgentConfig):  # type: ignore[misc]  # a C++ class
        sleeps = True

        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, PAUSE_US if name == "pthrDelay" else value)

    bindings.nixlAgentConfig = SleepingConfig
