"""Everything that knows a version of SGLang: the supported range, its flags, and the live engine as a description."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs, prepare_server_args
from sglang.version import __version__ as VERSION

from openengine.v1 import discovery_pb2, inputs_pb2, model_pb2
from openengine_adapters.core.validation import INT32_MAX
from openengine_adapters.engine import (
    EngineDescription,
    GenerationSupport,
    LogprobSupport,
    Parallelism,
    StartupError,
)
from openengine_adapters.sglang.task_config import TaskConfig, reads_both_ways

OLDEST, TOO_NEW = (0, 5, 23), (0, 6)
SUPPORTED = "0.5.23 and later 0.5.x"

LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE = 1e-6, 1e20
"""SGLang takes a lower positive temperature for 0; a much higher one makes likely what a guide forbids."""

MAX_CANDIDATES = 128
"""The most candidates at one position. SGLang itself has no limit, and keeps all of them until the request ends."""

DEFAULT_STEP_TOKENS, WHOLE_STEP_TOKENS = 16384, 4096
"""SGLang's `--max-prefill-tokens`, and ours without chunked prefill: it keeps 1.5 MiB free for each of them."""

_GUIDED_EVERYWHERE = frozenset(
    {
        model_pb2.GUIDED_DECODING_MODE_JSON_SCHEMA,
        model_pb2.GUIDED_DECODING_MODE_REGEX,
        model_pb2.GUIDED_DECODING_MODE_EBNF_GRAMMAR,
        model_pb2.GUIDED_DECODING_MODE_CHOICE,
        model_pb2.GUIDED_DECODING_MODE_JSON_OBJECT,
    }
)
_GUIDED_BY_BACKEND = {
    "xgrammar": _GUIDED_EVERYWHERE | {model_pb2.GUIDED_DECODING_MODE_STRUCTURAL_TAG},
    # It knows the older form of structural tags only.
    "llguidance": _GUIDED_EVERYWHERE,
}


def parse_flags(flags: Sequence[str]) -> ServerArgs:
    """Parse SGLang's flags by its own parser, which ends the process with status 2 for a mistake."""
    load_plugins()  # they may add to what the flags take
    return prepare_server_args(list(flags))


def check(args: ServerArgs, version: str = VERSION) -> None:
    """Raise `StartupError` for an SGLang, or a way to run it, that this adapter does not serve."""
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:3])
    if not OLDEST <= numbers < TOO_NEW:
        raise StartupError(
            f"SGLang {version} is installed, this adapter supports {SUPPORTED}; install sglang==0.5.23"
        )
    for name, plain in (("tokenizer_worker_num", 1), ("node_rank", 0), ("skip_tokenizer_init", False)):
        value = getattr(args, name)
        if value != plain:
            flag = "--" + name.replace("_", "-")
            raise StartupError(f"{flag} {value} is not served; leave it out ({plain})")


def prepare(args: ServerArgs) -> None:
    """Set what this adapter relies on: cumulative chunks, and the load published after every step (LOAD-04)."""
    if args.sampling_backend == "pytorch":
        # Where a guide leaves no token every probability is NaN; PyTorch raises then, and the scheduler dies (GEN-10).
        os.environ.setdefault("SGLANG_SANITIZE_NAN_LOGITS", "1")
    args.incremental_streaming_output = False
    args.load_snapshot_publish_interval = 1


def keep_inputs_whole(args: ServerArgs) -> None:
    """Switch off the prefix cache and chunked prefill where they give wrong vectors: in models that read both ways.

    A part of such an input that is cached, or computed by itself, has not seen the rest. SGLang does this by itself
    for some of these models only.
    """
    if reads_both_ways(ModelConfig.from_server_args(args).hf_config.architectures or ()):
        args.disable_radix_cache = True
        args.chunked_prefill_size = -1
        if args.max_prefill_tokens == DEFAULT_STEP_TOKENS:
            args.max_prefill_tokens = WHOLE_STEP_TOKENS


def describe(
    manager: Any,
    scheduler: dict[str, Any],
    state: dict[str, Any],
    tasks: TaskConfig,
    modalities: frozenset[inputs_pb2.Modality.ValueType],
) -> EngineDescription:
    """Describe the running engine.

    `manager` is SGLang's tokenizer manager, `scheduler` what its scheduler said when it was ready, and `state` the
    internal state of one data-parallel rank. `modalities` is what the model takes beside text.
    """
    config, ranks = manager.config_value, manager.elastic_worker_count
    blocks = scheduler["max_total_num_tokens"] // config("page_size")
    at_once = state["effective_max_running_requests_per_dp"] * ranks
    chunk = config("chunked_prefill_size")
    return EngineDescription(
        engine_name="sglang",
        engine_version=VERSION,
        role=discovery_pb2.ENGINE_ROLE_AGGREGATED,
        model_id=manager.model_path,
        served_model_name=manager.served_model_name or manager.model_path,
        vocab_size=manager.model_config.vocab_size,
        eos_token_ids=eos_token_ids(manager),
        parallelism=Parallelism(
            tensor_parallel_size=config("tp_size"),
            pipeline_parallel_size=config("pp_size"),
            data_parallel_size=ranks,
            data_parallel_rank=0 if ranks == 1 else None,
            data_parallel_start_rank=0,
        ),
        # Without an output the last place would stay empty.
        max_context_length=longest_sequence(manager, scheduler) - (not manager.is_generation),
        kv_block_size=config("page_size"),
        total_kv_blocks=blocks * ranks,
        max_running_requests=at_once,
        max_batched_tokens=chunk if chunk and chunk > 0 else config("max_prefill_tokens"),
        tokenizer_modes=(config("tokenizer_mode"),),
        reasoning_parser=config("reasoning_parser") or "",
        tool_call_parser=config("tool_call_parser") or "",
        generation=_generation(manager, at_once, modalities) if manager.is_generation else None,
        embed=tasks.embed,
        classify=tasks.classify,
        score=tasks.score,
        lora=bool(config("enable_lora")),
    )


def longest_sequence(manager: Any, scheduler: dict[str, Any]) -> int:
    """Prompt and output together, so that a prompt one shorter still gets a token.

    SGLang keeps a few tokens of each context for itself, and refuses a longer prompt only after it took the request.
    """
    pool = scheduler["max_total_num_tokens"] - 2 * manager.config_value("page_size")
    return int(min(manager.max_req_input_len, pool, manager.context_len - manager.num_reserved_tokens))


def eos_token_ids(manager: Any) -> frozenset[int]:
    """Every id that ends an output by itself: the model's, the tokenizer's, and those of its chat template."""
    tokenizer = manager.tokenizer
    ids = {*(manager.model_config.hf_eos_token_id or ()), *(tokenizer.additional_stop_token_ids or ())}
    if tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    return frozenset(ids)


def sampling_defaults(manager: Any) -> dict[str, Any]:
    """The model's generation config, where SGLang's own server would use it (SAMP-01).

    What the operator prefers goes before it; SGLang adds that by itself.
    """
    defaults: dict[str, Any] = manager.model_config.get_default_sampling_params()
    preferred = manager.preferred_sampling_params or {}
    return {name: value for name, value in defaults.items() if name not in preferred}


def _generation(
    manager: Any, at_once: int, modalities: frozenset[inputs_pb2.Modality.ValueType]
) -> GenerationSupport:
    config = manager.config_value
    backend = config("grammar_backend") or ""
    candidates = LogprobSupport(
        max_top_n=min(MAX_CANDIDATES, manager.model_config.vocab_size), max_token_ids=MAX_CANDIDATES
    )
    cached = not config("disable_radix_cache")
    return GenerationSupport(
        prompt_logprobs=candidates,
        output_logprobs=candidates,
        guided_modes=_GUIDED_BY_BACKEND.get(backend, frozenset()),
        guided_backend=backend,
        max_num_sequences=min(at_once, INT32_MAX),
        temperature_range=(LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE),
        seed=bool(config("enable_deterministic_inference")),
        priority=bool(config("enable_priority_scheduling")),
        cache_salt=cached,
        prefix_cache_bypass=cached,
        modalities=modalities,
    )
