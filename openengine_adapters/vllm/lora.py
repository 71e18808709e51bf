"""LoRA adapters in vLLM: loaded before anybody asks for them, never out of memory again, gone when unloaded.

vLLM would load an adapter with the first request that names it, and drop the one least used to read it again later.
Both happen in the middle of a step, where a missing or spoilt file ends the engine. So every adapter is checked and
added here, and no more are than vLLM keeps at once.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import Counter
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import grpc
from vllm import AsyncEngineArgs
from vllm.config import VllmConfig
from vllm.config.lora import LoRAConfig
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from openengine_adapters import adapter_files
from openengine_adapters.core.answers import ask
from openengine_adapters.core.errors import EngineDied, EngineFailure, Rejected, invalid
from openengine_adapters.core.validation import INT32_MAX
from openengine_adapters.engine import Lora, StartupError

log = logging.getLogger(__name__)

CHANGE_S = 300.0
"""Seconds that vLLM may take for one change; large adapters come over slow file systems."""

Result = TypeVar("Result")


def configure_lora(args: AsyncEngineArgs) -> None:
    """On a CPU, keep one slot more than there are adapters.

    vLLM's operations there take what has no adapter for the last slot's, and so add that one's weights to a plain
    request beside it (vllm-project/vllm#48421). Slots are given from the first, and an unused one holds zeros.
    """
    if args.enable_lora and current_platform.is_cpu():
        args.max_loras = args.max_cpu_loras = (args.max_cpu_loras or args.max_loras) + 1


def check_lora_config(config: VllmConfig) -> None:
    """Raise `StartupError` for what vLLM's own servers do with adapters and AsyncLLM does not."""
    if config.lora_config is not None and config.lora_config.default_mm_loras:
        raise StartupError(
            "--default-mm-loras is not served: give the adapter with --lora-modules and let requests name it"
        )


class LoraHost:
    """The adapters of one running vLLM, by the caller's names."""

    def __init__(self, llm: AsyncLLM, config: LoRAConfig) -> None:
        self._llm = llm
        self._config = config
        assert config.max_cpu_loras is not None  # vLLM fills it in
        self._capacity = config.max_cpu_loras - current_platform.is_cpu()
        self._requests: dict[str, LoRARequest] = {}
        self._loads: Counter[tuple[str, str]] = Counter()

    def request(self, lora: Lora) -> LoRARequest:
        """What vLLM takes with a request for this loaded adapter."""
        return self._requests[lora.name]

    async def load(self, lora: Lora) -> None:
        """Check the adapter's files and add it. Raises `Rejected`, leaving nothing behind (LORA-08)."""
        if len(self._requests) >= self._capacity:
            raise Rejected(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{self._capacity} adapters are loaded, as many as --max-cpu-loras allows; unload one first",
                field="adapter",
                limit=self._capacity,
            )
        request = self._requests[lora.name] = self._new_request(lora)
        added = False
        try:
            await asyncio.to_thread(self._check, lora.path)
            added = await self._add(request)
        finally:
            if not added:
                del self._requests[lora.name]

    async def unload(self, lora: Lora) -> None:
        """Take the adapter out of vLLM; no request uses it any more (LORA-09)."""
        await self._ask(self._llm.remove_lora(self._requests[lora.name].lora_int_id))
        if self._config.enable_tower_connector_lora:
            # Encoded media are kept under the adapter's name alone.
            await self._ask(self._llm.reset_encoder_cache())
        del self._requests[lora.name]

    async def _add(self, request: LoRARequest) -> bool:
        # In place: should a rank still have something under this id, it is not what answers.
        in_place = LoRARequest(request.lora_name, request.lora_int_id, request.lora_path, load_inplace=True)
        try:
            if await self._ask(self._llm.add_lora(in_place)):
                return True
            raise invalid("adapter.source_path", "vLLM did not take the adapter")
        except EngineDied:
            raise
        except Exception as error:
            # Another rank, or the worker's table, may have it in part.
            await self._ask(self._llm.remove_lora(request.lora_int_id))
            if isinstance(error, (Rejected, EngineFailure)):
                raise
            log.warning("vLLM refused adapter %s", request.lora_name, exc_info=error)
            raise invalid("adapter.source_path", f"vLLM refuses it: {_reason(error)}") from error

    def _check(self, path: str) -> None:
        files = adapter_files.read(Path(path))
        try:
            settings = PEFTHelper.from_dict(dict(files.config))
            settings.validate_legal(self._config)
        except Exception as error:
            raise adapter_files.unusable_config(error) from error
        # What is no low-rank weight, such as a saved head, vLLM takes or refuses by itself.
        adapter_files.check_layers(
            files, lambda layer: int(settings.get_rank_and_scaling(layer)[0]), self._shapes
        )

    @functools.cached_property
    def _shapes(self) -> adapter_files.Shapes | None:
        return adapter_files.layer_shapes(self._llm.model_config.hf_config)

    def _new_request(self, lora: Lora) -> LoRARequest:
        """The caller's id where vLLM can hold it, and a path that is new for vLLM each time.

        The second model runner keeps ids in 32 bits. The prefix cache tells adapters apart by name and path, so that
        one with new weights in the old place would be answered from the old one's blocks; a number at the path's
        end, written so that no file system minds, keeps them apart.
        """
        taken = {request.lora_int_id for request in self._requests.values()}
        number = lora.id
        if number > INT32_MAX or number in taken:
            number = next(own for own in range(INT32_MAX, 0, -1) if own not in taken)
        key = lora.name, lora.path
        before = self._loads[key]
        self._loads[key] += 1
        mark = "".join("/." if bit == "1" else "//" for bit in f"{before:b}") if before else ""
        return LoRARequest(lora.name, number, lora.path + mark)

    async def _ask(self, call: Coroutine[Any, Any, Result]) -> Result:
        try:
            return await ask(call, self._check_alive, CHANGE_S)
        except EngineDeadError as error:
            raise EngineDied from error

    def _check_alive(self) -> None:
        if self._llm.errored:
            raise EngineDied


def _reason(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300]
