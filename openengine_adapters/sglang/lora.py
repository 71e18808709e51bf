"""LoRA adapters in SGLang: checked before it sees them, as many as it keeps, gone when unloaded.

SGLang looks at an adapter's weights in the middle of a step, where one that does not fit ends the scheduler. It drops
the adapter least used when it holds too many, and reads it again when a request names it, as it does with one that was
unloaded. So every adapter is checked here, no more are loaded than it keeps, and it forgets what is unloaded.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
from sglang.srt.lora.utils import get_normalized_target_modules
from sglang.srt.managers.io_struct import LoadLoRAAdapterReqInput, UnloadLoRAAdapterReqInput
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.common import SUPPORTED_LORA_TARGET_MODULES

from openengine_adapters import adapter_files
from openengine_adapters.adapter_files import AdapterFiles, misfit
from openengine_adapters.core.answers import ask
from openengine_adapters.core.errors import EngineFailure, Rejected, invalid
from openengine_adapters.engine import Lora, StartupError
from openengine_adapters.options import number_loras

log = logging.getLogger(__name__)

CHANGE_S = 300.0
"""Seconds that SGLang may take for one change; large adapters come over slow file systems."""

_EVERY_MODULE = {"all", "all-linear"}

_PLAIN_SETTINGS: Mapping[str, tuple[object, ...]] = {
    "use_rslora": (None, False),
    "use_dora": (None, False),
    "use_qalora": (None, False),
    "use_bdlora": (None, False),
    "lora_bias": (None, False),
    "bias": (None, "none"),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None, []),
    "target_parameters": (None, []),
    "layer_replication": (None, []),
    "alora_invocation_tokens": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
}
"""Settings that change what an adapter computes, with the values that SGLang, which ignores them, is right for."""

_PLAIN_INITS = (None, True, False, "gaussian", "eva", "orthogonal", "mica", "lora_ga")
"""Ways to begin a training that leave the base model as it is."""

_COMPANIONS: Mapping[str, tuple[str, ...]] = {
    "q_proj": ("v_proj",),
    "k_proj": ("q_proj", "v_proj"),
    "v_proj": ("q_proj",),
    "up_proj": ("gate_proj",),
}
"""Layers that SGLang joins into one: what has the first needs the others, or it is left out or fails."""


def check_lora_args(args: ServerArgs) -> None:
    """Raise `StartupError` for ways to run in which SGLang cannot load adapters while it runs."""
    if (args.enable_lora or args.lora_paths) and args.dp_size > 1:
        raise StartupError(
            f"--enable-lora with --dp-size {args.dp_size} is not served: SGLang changes adapters on one rank only; "
            "leave one of them out, or start a server for each rank"
        )


class LoraHost:
    """The adapters of one running SGLang. `check` raises `EngineDied` when it is gone."""

    def __init__(self, manager: Any, check: Callable[[], None]) -> None:
        self._manager = manager
        self._check_alive = check
        self._capacity: int | None = manager.config_value("max_loaded_loras")
        given = manager.lora_registry.get_all_adapters().values()
        self.static: tuple[Lora, ...] = number_loras(
            (ref.lora_name, str(Path(ref.lora_path).absolute())) for ref in given
        )
        self._loaded = {lora.name for lora in self.static}

    async def check_static(self) -> None:
        """Check the adapters that SGLang itself loaded at its start. Raises `StartupError`."""
        for lora in self.static:
            try:
                await asyncio.to_thread(self._check_files, Path(lora.path))
            except Rejected as error:
                raise StartupError(f"adapter {lora.name!r} of --lora-paths: {error.reason}") from error

    async def load(self, lora: Lora) -> None:
        """Check the adapter's files and load it. Raises `Rejected`, leaving nothing behind (LORA-08)."""
        if self._capacity is not None and len(self._loaded) >= self._capacity:
            raise Rejected(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{self._capacity} adapters are loaded, as many as --max-loaded-loras allows; unload one first",
                field="adapter",
                limit=self._capacity,
            )
        self._loaded.add(lora.name)
        try:
            await asyncio.to_thread(self._check_files, Path(lora.path))
            await self._load(lora)
        except BaseException:
            self._loaded.discard(lora.name)
            raise

    async def unload(self, lora: Lora) -> None:
        """Take the adapter out of SGLang; no request uses it any more (LORA-09)."""
        result = await self._ask(
            self._manager.unload_lora_adapter(UnloadLoRAAdapterReqInput(lora_name=lora.name))
        )
        if not result.success:
            log.warning("SGLang did not unload adapter %s: %s", lora.name, result.error_message)
            raise EngineFailure("the engine did not unload the adapter; try again", retryable=True)
        # What it remembers it would load again for a request.
        self._manager.lora_ref_cache.pop(lora.name, None)
        self._loaded.discard(lora.name)

    async def _load(self, lora: Lora) -> None:
        # SGLang makes an id of its own for each load, so no cached prefix outlives an adapter (LORA-09).
        request = LoadLoRAAdapterReqInput(lora_name=lora.name, lora_path=lora.path)
        result = await self._ask(self._manager.load_lora_adapter(request))
        if result.success:
            return
        log.warning("SGLang refused adapter %s: %s", lora.name, result.error_message)
        if lora.name in self._manager.pending_lora_unloads:
            # Another of its processes has it.
            await self.unload(lora)
        reason = str(result.error_message or "").strip() or "it gives no reason"
        raise misfit(f"SGLang refuses it: {reason.splitlines()[0][:300]}")

    def _check_files(self, folder: Path) -> None:
        files = adapter_files.read(folder)
        rank = _rank(files, self._max_rank)
        _check_settings(files.config)
        if files.others or (folder / "added_tokens.json").exists():
            raise misfit("it has weights or tokens beside its low-rank matrices, which SGLang does not take")
        adapter_files.check_layers(files, lambda _layer: rank, self._shapes)
        _check_modules(files.layers, self._modules)

    @functools.cached_property
    def _shapes(self) -> adapter_files.Shapes | None:
        return adapter_files.layer_shapes(self._manager.model_config.hf_config)

    @functools.cached_property
    def _max_rank(self) -> int:
        """The highest rank, which SGLang without --max-lora-rank takes from the adapters given at the start."""
        limit = self._manager.config_value("max_lora_rank")
        return int(limit or max(_setting(config, "r") for config in self._static_configs()))

    @functools.cached_property
    def _modules(self) -> frozenset[str] | None:
        """The modules that SGLang has made room for, under its own names; None for all that it knows."""
        configured = self._manager.config_value("lora_target_modules")
        named = [configured] if configured else [c["target_modules"] for c in self._static_configs()]
        if any(isinstance(one, str) or _EVERY_MODULE & set(one) for one in named):
            return None
        return frozenset().union(*(get_normalized_target_modules(one) for one in named))

    def _static_configs(self) -> list[Mapping[str, Any]]:
        return [adapter_files.read(Path(lora.path)).config for lora in self.static]

    async def _ask(self, call: Any) -> Any:
        return await ask(call, self._check_alive, CHANGE_S)


def _setting(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or value <= 0 or value != int(value):
        raise misfit(f"its adapter_config.json has {name} {value!r}; it must be a whole number above 0")
    return int(value)


def _rank(files: AdapterFiles, limit: int) -> int:
    rank = _setting(files.config, "r")
    if rank > limit:
        raise invalid(
            "adapter.source_path",
            f"its rank {rank} is above {limit}, the highest that --max-lora-rank allows",
            limit=limit,
            value=rank,
        )
    return rank


def _check_settings(config: Mapping[str, Any]) -> None:
    alpha = config.get("lora_alpha")
    if not isinstance(alpha, (int, float)) or isinstance(alpha, bool):
        raise misfit(f"its adapter_config.json has lora_alpha {alpha!r}; it must be a number")
    for name, plain in _PLAIN_SETTINGS.items():
        if config.get(name) not in plain:
            raise misfit(f"its adapter_config.json has {name} {config[name]!r}, which SGLang does not take")
    if config.get("init_lora_weights") not in _PLAIN_INITS:
        raise misfit(
            f"init_lora_weights {config['init_lora_weights']!r} changes the base model; "
            "convert it to a plain LoRA adapter with PEFT"
        )
    targets = config.get("target_modules")
    if isinstance(targets, str) and targets not in _EVERY_MODULE:
        raise misfit("its target_modules are a pattern, which SGLang does not take; list the modules")
    if not isinstance(targets, (str, list)) or not all(isinstance(one, str) for one in targets):
        raise misfit("its adapter_config.json has no list of target_modules")


def _check_modules(layers: Iterable[str], allowed: frozenset[str] | None) -> None:
    """Refuse weights that SGLang would leave out, or fail on, because of where they belong."""
    by_parent: dict[str, set[str]] = {}
    for layer in layers:
        parent, _, module = layer.rpartition(".")
        by_parent.setdefault(parent, set()).add(module)
        known = (
            module in SUPPORTED_LORA_TARGET_MODULES
            if allowed is None
            else get_normalized_target_modules([module]) <= allowed
        )
        if not known:
            raise misfit(f"{layer} is not among --lora-target-modules{_listed(allowed)}")
    for parent, modules in by_parent.items():
        for module in sorted(modules):
            missing = [one for one in _COMPANIONS.get(module, ()) if one not in modules]
            if missing:
                raise misfit(
                    f"{parent}.{module} has no {missing[0]} beside it, without which SGLang does not take it"
                )


def _listed(allowed: Sequence[str] | frozenset[str] | None) -> str:
    return f" ({', '.join(sorted(allowed))})" if allowed else ""
