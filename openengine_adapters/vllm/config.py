"""Everything that knows a version of vLLM: the supported range, and the live configuration as a description."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from vllm.config import VllmConfig
from vllm.tokenizers import TokenizerLike
from vllm.v1.engine.async_llm import AsyncLLM

from openengine.v1 import discovery_pb2, inputs_pb2, model_pb2
from openengine_adapters.core.validation import INT32_MAX
from openengine_adapters.engine import (
    EngineDescription,
    GenerationSupport,
    LogprobSupport,
    Parallelism,
    StartupError,
)
from openengine_adapters.vllm.task_config import MAX_LOGPROB_TOKEN_IDS, TaskConfig

SUPPORTED = "0.32.x"
_SUPPORTED_PREFIX = (0, 32)

LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE = 0.01, 2.0
"""vLLM raises a lower positive temperature to 0.01 with no more than a log line, and refuses a higher one."""

_GUIDED_EVERYWHERE = frozenset(
    {
        model_pb2.GUIDED_DECODING_MODE_JSON_SCHEMA,
        model_pb2.GUIDED_DECODING_MODE_REGEX,
        model_pb2.GUIDED_DECODING_MODE_CHOICE,
        model_pb2.GUIDED_DECODING_MODE_JSON_OBJECT,
    }
)
_GUIDED_ALL = _GUIDED_EVERYWHERE | {
    model_pb2.GUIDED_DECODING_MODE_EBNF_GRAMMAR,
    model_pb2.GUIDED_DECODING_MODE_STRUCTURAL_TAG,
}
_GUIDED_BY_BACKEND = {
    "auto": _GUIDED_ALL,
    "xgrammar": _GUIDED_ALL,
    "guidance": _GUIDED_ALL,
    "outlines": _GUIDED_EVERYWHERE,
    "lm-format-enforcer": _GUIDED_EVERYWHERE,
}


def check_version(version: str) -> None:
    """Raise `StartupError` for a vLLM that this adapter was not tested with."""
    parts = version.split("+")[0].split(".")[:2]
    if tuple(int(part) for part in parts if part.isdigit()) != _SUPPORTED_PREFIX:
        raise StartupError(
            f"vLLM {version} is installed, this adapter supports {SUPPORTED}; install vllm==0.32.*"
        )


def describe(
    config: VllmConfig,
    tokenizer: TokenizerLike | None,
    tasks: tuple[str, ...],
    version: str,
    served: str | list[str] | None,
    task_config: TaskConfig,
    modalities: frozenset[inputs_pb2.Modality.ValueType],
) -> EngineDescription:
    """Describe the running engine from its live configuration.

    `served` are the names that vLLM was started with; its configuration keeps only the first. `tasks` are vLLM's
    own names for what the model does, `modalities` what it takes beside text.
    """
    model, parallel = config.model_config, config.parallel_config
    names = served_names(served)
    return EngineDescription(
        engine_name="vllm",
        engine_version=version,
        role=discovery_pb2.ENGINE_ROLE_AGGREGATED,
        model_id=model.model,
        served_model_name=names[0] if names else model.model,
        served_model_aliases=tuple(names[1:]),
        vocab_size=model.get_vocab_size(),
        eos_token_ids=eos_token_ids(config, tokenizer),
        parallelism=Parallelism(
            tensor_parallel_size=parallel.tensor_parallel_size,
            pipeline_parallel_size=parallel.pipeline_parallel_size,
            data_parallel_size=parallel.data_parallel_size,
            data_parallel_rank=0 if parallel.data_parallel_size == 1 else None,
            data_parallel_start_rank=0,
        ),
        max_context_length=model.max_model_len,
        kv_block_size=config.cache_config.block_size,
        total_kv_blocks=total_kv_blocks(config),
        max_running_requests=config.scheduler_config.max_num_seqs * parallel.data_parallel_size,
        max_batched_tokens=config.scheduler_config.max_num_batched_tokens,
        tokenizer_modes=(str(model.tokenizer_mode),),
        reasoning_parser=config.structured_outputs_config.reasoning_parser or "",
        generation=_generation(config, tokenizer, modalities) if "generate" in tasks else None,
        embed=task_config.embed,
        classify=task_config.classify,
        score=task_config.score,
        lora=config.lora_config is not None,
    )


def lost_process(llm: AsyncLLM) -> bool:
    """Whether vLLM is ending its processes because one is gone, or the coordinator of its ranks is gone.

    With several ranks that takes seconds before it says so, and of the coordinator it says nothing.
    """
    resources = llm.engine_core.resources
    manager, coordinator = resources.engine_manager, resources.coordinator
    if manager is not None and manager.manager_stopped.is_set():
        return True
    return coordinator is not None and not coordinator.proc.is_alive()


def busy_ranks(llm: AsyncLLM) -> set[int]:
    """The ranks that have requests which nobody has given up, as vLLM's client of several ranks sent them there."""
    client = llm.engine_core
    unfinished = llm.output_processor.request_states
    engines = {
        engine
        for request_id, engine in getattr(client, "reqs_in_flight", {}).items()
        if request_id in unfinished
    }
    # Engines are in rank order.
    return {rank for rank, engine in enumerate(client.core_engines) if engine in engines}


def served_names(served: str | list[str] | None) -> list[str]:
    """The names to serve under; vLLM takes one name or a list of them."""
    if served is None:
        return []
    return [served] if isinstance(served, str) else list(served)


def total_kv_blocks(config: VllmConfig) -> int | None:
    """KV blocks of all data-parallel ranks together, as vLLM adds them up once the engine is up."""
    return config.cache_config.num_gpu_blocks or None


def eos_token_ids(config: VllmConfig, tokenizer: TokenizerLike | None) -> frozenset[int]:
    """The tokenizer's EOS and those of the model's generation config, which vLLM treats as stop ids."""
    ids: set[int] = set()
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    configured: Any = config.model_config.try_get_generation_config().get("eos_token_id")
    if isinstance(configured, int):
        ids.add(configured)
    elif configured:
        ids.update(configured)
    return frozenset(ids)


def _generation(
    config: VllmConfig,
    tokenizer: TokenizerLike | None,
    modalities: frozenset[inputs_pb2.Modality.ValueType],
) -> GenerationSupport:
    model = config.model_config
    prefix_cache = bool(config.cache_config.enable_prefix_caching)
    backend = str(config.structured_outputs_config.backend)
    output = _logprobs(model.max_logprobs, model.get_vocab_size())
    return GenerationSupport(
        text_input=tokenizer is not None,
        # prompt_logprob_token_ids needs vLLM's second model runner; explicit prompt ids stay unadvertised.
        prompt_logprobs=None
        if _prompt_logprobs_kill(config)
        else dataclasses.replace(output, max_token_ids=0),
        output_logprobs=output,
        guided_modes=_GUIDED_BY_BACKEND.get(backend, frozenset()) if tokenizer is not None else frozenset(),
        guided_backend=backend,
        max_num_sequences=_max_num_sequences(config),
        greedy_sequences=False,
        temperature_range=(LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE),
        seed=True,
        priority=config.scheduler_config.policy == "priority",
        cache_salt=prefix_cache,
        prefix_cache_bypass=prefix_cache,
        modalities=modalities,
    )


def _prompt_logprobs_kill(config: VllmConfig) -> bool:
    """vLLM's worker on a CPU dies of prompt log-probabilities in a batch when LoRA is on (GEN-10)."""
    return config.lora_config is not None and str(config.device_config.device_type) == "cpu"


def _max_num_sequences(config: VllmConfig) -> int:
    limit = int(os.environ.get("VLLM_MAX_N_SEQUENCES", "16384"))
    at_once: int = config.scheduler_config.max_num_seqs * config.parallel_config.data_parallel_size
    return min(limit, at_once, INT32_MAX)


def _logprobs(max_logprobs: int, vocab_size: int) -> LogprobSupport:
    """`--max-logprobs` bounds top-N; -1, or the vocabulary's size, opens the whole vocabulary."""
    if max_logprobs == 0:
        return LogprobSupport(max_top_n=0)
    everything = max_logprobs == -1 or max_logprobs >= vocab_size
    return LogprobSupport(
        max_top_n=vocab_size if everything else max_logprobs,
        max_token_ids=MAX_LOGPROB_TOKEN_IDS,
        all=everything,
    )
