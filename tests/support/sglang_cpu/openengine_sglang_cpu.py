# SPDX-License-Identifier: Apache-2.0
"""A plugin of SGLang (entry point group `sglang.srt.plugins`), which loads it in each of its processes.

It brings what seeded sampling, LoRA and prefill/decode lack on a CPU; plain generation needs none of it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

# They ask for pinned memory or a CUDA event without looking whether there is an accelerator.
_ASSUME_AN_ACCELERATOR = (
    "sglang.srt.disaggregation.prefill",
    "sglang.srt.lora.backend.torch_backend",
    "sglang.srt.lora.layers",
)
_TAKE_PIN_MEMORY = ("empty", "full", "ones", "tensor", "zeros")


class _Event:
    """A CUDA event where all work is done by the time it is recorded."""

    def __init__(self, *_args: object, **_kwargs: object) -> None:
        pass

    def record(self, *_args: object) -> None:
        pass

    def wait(self, *_args: object) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, _end: object) -> float:
        return 0.0


class _Overlay(ModuleType):
    """A module with some names of its own and all the others of the module below it."""

    def __init__(self, below: ModuleType, names: dict[str, object]) -> None:
        super().__init__(below.__name__)
        self._below = below
        self.__dict__.update(names)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._below, name)


def _without_pin_memory(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, pin_memory: object = None, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call


def _spare_the_accelerator() -> None:
    """Give those modules, and only those, a `torch` that needs no accelerator."""
    cuda = _Overlay(torch.cuda, {"Event": _Event, "current_stream": lambda *_args, **_kwargs: None})
    functions = {name: _without_pin_memory(getattr(torch, name)) for name in _TAKE_PIN_MEMORY}
    overlay = _Overlay(torch, {"cuda": cuda, **functions})
    for name in _ASSUME_AN_ACCELERATOR:
        importlib.import_module(name).torch = overlay  # type: ignore[attr-defined]
    torch.Tensor.pin_memory = lambda self, *_args, **_kwargs: self  # type: ignore[method-assign]


def _allow_seeds() -> None:
    """SGLang honours seeds in its deterministic mode only, which it allows for GPU attention back ends only.

    On a CPU the mode's matrix kernels are for a GPU too; torch's own are used in their place.
    """
    from sglang.srt.arg_groups import choices
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    choices.add_deterministic_attention_backend_choices(["torch_native"])
    choices.add_radix_supported_deterministic_attention_backend_choices(["torch_native"])
    HookRegistry.register(
        "sglang.srt.batch_invariant_ops.enable_batch_invariant_mode",
        lambda *_args, **_kwargs: None,
        HookType.REPLACE,
    )


def apply() -> None:
    """Called by SGLang."""
    if not torch.accelerator.is_available():
        _spare_the_accelerator()
    _allow_seeds()
