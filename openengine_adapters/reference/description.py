"""What the reference engine says about itself: everything that the contract knows."""

from __future__ import annotations

from openengine.v1 import discovery_pb2, inputs_pb2, model_pb2, tasks_pb2
from openengine_adapters import __version__
from openengine_adapters.engine import (
    EngineDescription,
    GenerationSupport,
    KvConnector,
    LogprobSupport,
    Parallelism,
    TaskSupport,
)
from openengine_adapters.reference import tasks, tokenizer
from openengine_adapters.reference.guided import BACKEND
from openengine_adapters.reference.sessions import BACKEND as KV_BACKEND
from openengine_adapters.reference.sessions import PROTOCOL
from openengine_adapters.reference.settings import BLOCK_SIZE, Settings

MODALITIES = (inputs_pb2.MODALITY_IMAGE, inputs_pb2.MODALITY_VIDEO, inputs_pb2.MODALITY_AUDIO)

_LOGPROBS = LogprobSupport(max_top_n=20, max_token_ids=64, all=True)
_INPUTS = (
    tasks_pb2.TASK_INPUT_TYPE_TEXT,
    tasks_pb2.TASK_INPUT_TYPE_TOKEN_IDS,
    tasks_pb2.TASK_INPUT_TYPE_MULTIMODAL,
)
_GRANULARITIES = (tasks_pb2.TASK_OUTPUT_GRANULARITY_SEQUENCE, tasks_pb2.TASK_OUTPUT_GRANULARITY_TOKEN)
_MAX_BATCH = 32
_MAX_LABELS = 16


def describe(settings: Settings, session_address: tuple[str, int] | None) -> EngineDescription:
    """Describe an engine; `session_address` is where a prefill engine hands its sessions out."""
    return EngineDescription(
        engine_name="reference",
        engine_version=__version__,
        model_id=settings.model_id,
        served_model_name=settings.served_model_name,
        served_model_aliases=settings.aliases,
        vocab_size=tokenizer.VOCAB_SIZE,
        eos_token_ids=frozenset({tokenizer.EOS}),
        role=settings.role,
        parallelism=Parallelism(
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            data_parallel_size=settings.data_parallel_size,
            data_parallel_rank=0,
            data_parallel_start_rank=0,
        ),
        kv_connector=_connector(settings, session_address),
        max_context_length=settings.max_context,
        kv_block_size=BLOCK_SIZE,
        total_kv_blocks=settings.kv_blocks * settings.data_parallel_size,
        max_running_requests=settings.max_running * settings.data_parallel_size,
        max_batched_tokens=settings.step_tokens,
        tokenizer_modes=("byte",),
        generation=_generation(settings),
        embed=_embed(settings),
        classify=_classify(settings),
        score=_score(settings),
        lora=settings.lora,
    )


def _connector(settings: Settings, address: tuple[str, int] | None) -> KvConnector:
    if settings.role == discovery_pb2.ENGINE_ROLE_AGGREGATED:
        return KvConnector()
    return KvConnector(
        enabled=True,
        transfer_backend=KV_BACKEND,
        local_endpoints=() if address is None else ((*address, PROTOCOL),),
        supported_protocols=(PROTOCOL,),
        supports_remote_prefill=settings.role == discovery_pb2.ENGINE_ROLE_PREFILL,
        supports_decode_pull=True,
        supports_abort_cleanup=True,
        supports_drain=True,
        schema_version=1,
    )


def _generation(settings: Settings) -> GenerationSupport:
    return GenerationSupport(
        prompt_logprobs=_LOGPROBS,
        output_logprobs=_LOGPROBS,
        guided_modes=frozenset(model_pb2.GuidedDecodingMode.values()) - {0},
        guided_backend=BACKEND,
        max_num_sequences=settings.max_sequences,
        priority=True,
        cache_salt=True,
        prefix_cache_bypass=True,
        modalities=frozenset(MODALITIES),
    )


def _embed(settings: Settings) -> TaskSupport:
    return TaskSupport(
        input_types=_INPUTS,
        granularities=_GRANULARITIES,
        encodings=(tasks_pb2.EMBEDDING_ENCODING_DENSE, tasks_pb2.EMBEDDING_ENCODING_SPARSE),
        modalities=MODALITIES,
        dimension=tasks.DIMENSION,
        max_batch_size=_MAX_BATCH,
        max_output_values=settings.max_context * tasks.DIMENSION,
        priority=True,
        lora=settings.lora,
        normalization=True,
        dimension_override=True,
    )


def _classify(settings: Settings) -> TaskSupport:
    return TaskSupport(
        input_types=_INPUTS,
        granularities=_GRANULARITIES,
        semantics=(
            tasks_pb2.TASK_VALUE_SEMANTICS_PROBABILITIES,
            tasks_pb2.TASK_VALUE_SEMANTICS_LOGITS,
            tasks_pb2.TASK_VALUE_SEMANTICS_LOG_PROBABILITIES,
        ),
        modalities=MODALITIES,
        max_batch_size=_MAX_BATCH,
        max_output_values=settings.max_context * len(tasks.LABELS),
        priority=True,
        lora=settings.lora,
    )


def _score(settings: Settings) -> TaskSupport:
    return TaskSupport(
        input_types=_INPUTS,
        granularities=_GRANULARITIES,
        semantics=(*tasks.PAIR_SEMANTICS, *tasks.LABEL_SEMANTICS),
        normalizations=(tasks_pb2.SCORE_NORMALIZATION_NONE, tasks_pb2.SCORE_NORMALIZATION_SOFTMAX),
        modalities=MODALITIES,
        max_groups=_MAX_BATCH,
        max_candidates_per_group=_MAX_BATCH,
        max_label_token_ids=_MAX_LABELS,
        max_output_values=settings.max_context,
        priority=True,
        lora=settings.lora,
        label_token_scoring=True,
        instruction=True,
        higher_is_better=True,
    )
