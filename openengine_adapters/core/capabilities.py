"""Discovery, answered from the one description that validation reads as well (MODEL-07)."""

from __future__ import annotations

from google.protobuf.message import Message

from openengine.v1 import discovery_pb2, kv_pb2, model_pb2, tasks_pb2
from openengine_adapters.core.validation import GUIDE_MODES
from openengine_adapters.engine import EngineDescription, GenerationSupport, LogprobSupport, TaskSupport

SCHEMA_REVISION = 1
MINIMUM_CLIENT_REVISION = 1
DEFAULT_SCHEMA_RELEASE = "d0f29fec31f31db5cfd49cf3e0f67da84d10c709"
"""The public commit whose schema is field for field the one in proto/ (DISC-04)."""

_MOVING_NAMES = frozenset({"main", "master", "head", "latest", "dev", "develop", "trunk", "nightly"})


def check_schema_release(release: str) -> str:
    """Return `release` when it names something immutable. Raises ValueError for a moving name (DISC-03)."""
    name = release.strip()
    if not name or name.lower().rpartition("/")[2] in _MOVING_NAMES:
        raise ValueError(f"{release!r} is a moving name or empty; give a release, tag or commit")
    return name


def engine_info(
    description: EngineDescription, instance_id: str, schema_release: str
) -> discovery_pb2.EngineInfo:
    """The answer to GetEngineInfo (DISC-01 … DISC-10)."""
    info = discovery_pb2.EngineInfo(
        engine_name=description.engine_name,
        engine_version=description.engine_version,
        role=description.role,
        instance_id=instance_id,
        supported_models=[description.model_id],
        kv_connector=kv_connector_info(description),
        schema_revision=SCHEMA_REVISION,
        minimum_client_revision=MINIMUM_CLIENT_REVISION,
        schema_release=schema_release,
    )
    sizes = description.parallelism
    info.parallelism.SetInParent()
    _set(
        info.parallelism,
        tensor_parallel_size=sizes.tensor_parallel_size,
        pipeline_parallel_size=sizes.pipeline_parallel_size,
        data_parallel_size=sizes.data_parallel_size,
        data_parallel_rank=sizes.data_parallel_rank,
        data_parallel_start_rank=sizes.data_parallel_start_rank,
    )
    return info


def kv_connector_info(description: EngineDescription) -> kv_pb2.KvConnectorInfo:
    """The answer to GetKvConnectorInfo, on every role (KVC-01, DISC-10)."""
    connector = description.kv_connector
    info = kv_pb2.KvConnectorInfo(
        enabled=connector.enabled,
        transfer_backend=connector.transfer_backend,
        local_endpoints=[
            kv_pb2.KvEndpoint(host=host, port=port, protocol=protocol)
            for host, port, protocol in connector.local_endpoints
        ],
        supported_protocols=connector.supported_protocols,
    )
    _set(
        info,
        supports_remote_prefill=connector.supports_remote_prefill,
        supports_decode_pull=connector.supports_decode_pull,
        supports_abort_cleanup=connector.supports_abort_cleanup,
        supports_drain=connector.supports_drain,
        schema_version=connector.schema_version,
    )
    return info


def model_info(description: EngineDescription) -> model_pb2.ModelInfo:
    """The answer to GetModelInfo (MODEL-03 … MODEL-11)."""
    generation = description.generation
    info = model_pb2.ModelInfo(
        model_id=description.model_id,
        served_model_name=description.served_model_name,
        served_model_aliases=description.served_model_aliases,
        tokenizer_modes=description.tokenizer_modes,
        supports_text_input=_takes(description, tasks_pb2.TASK_INPUT_TYPE_TEXT),
        supports_token_ids_input=_takes(description, tasks_pb2.TASK_INPUT_TYPE_TOKEN_IDS),
        supports_lora=description.lora,
        supports_multimodal=bool(generation and generation.modalities)
        or any(support.modalities for support in _served_tasks(description)),
        reasoning_parser=description.reasoning_parser,
        tool_call_parser=description.tool_call_parser,
        tasks=_tasks(description),
    )
    _set(
        info,
        max_context_length=description.max_context_length,
        max_output_tokens=description.max_output_tokens,
        kv_block_size=description.kv_block_size,
        total_kv_blocks=description.total_kv_blocks,
        max_running_requests=description.max_running_requests,
        max_batched_tokens=description.max_batched_tokens,
    )
    if generation is not None:
        info.generation.CopyFrom(_generation(generation))
    return info


def _served_tasks(description: EngineDescription) -> list[TaskSupport]:
    tasks = (description.embed, description.classify, description.score)
    return [support for support in tasks if support is not None]


def _takes(description: EngineDescription, kind: tasks_pb2.TaskInputType.ValueType) -> bool:
    """Whether any RPC that the model is served by takes inputs of this kind."""
    if (generation := description.generation) is not None:
        text = kind == tasks_pb2.TASK_INPUT_TYPE_TEXT
        return generation.text_input if text else generation.token_ids_input
    return any(kind in support.input_types for support in _served_tasks(description))


def _generation(support: GenerationSupport) -> model_pb2.GenerationCapabilities:
    modes = [mode for mode in GUIDE_MODES.values() if mode in support.guided_modes]
    return model_pb2.GenerationCapabilities(
        prompt_logprobs=_logprobs(support.prompt_logprobs),
        output_logprobs=_logprobs(support.output_logprobs),
        guided_decoding=model_pb2.GuidedDecodingCapabilities(supported=bool(modes), modes=modes),
        max_num_sequences=support.max_num_sequences,
        supports_priority=support.priority,
        supports_stop_in_output=support.stop_in_output,
        supports_cache_salt=support.cache_salt,
        supports_prefix_cache_bypass=support.prefix_cache_bypass,
    )


def _logprobs(support: LogprobSupport | None) -> model_pb2.LogprobCapabilities:
    if support is None:
        return model_pb2.LogprobCapabilities(supported=False)
    modes = []
    if support.max_top_n != 0:
        modes.append(model_pb2.CANDIDATE_TOKEN_SELECTION_MODE_TOP_N)
    if support.max_token_ids:
        modes.append(model_pb2.CANDIDATE_TOKEN_SELECTION_MODE_TOKEN_IDS)
    if support.all:
        modes.append(model_pb2.CANDIDATE_TOKEN_SELECTION_MODE_ALL)
    return model_pb2.LogprobCapabilities(
        supported=True, candidate_selection_modes=modes, max_top_n=support.max_top_n or None
    )


def _tasks(description: EngineDescription) -> model_pb2.TaskCapabilities:
    return model_pb2.TaskCapabilities(
        embed=_embed(description.embed),
        classify=_classify(description.classify),
        score=_score(description.score),
    )


def _embed(support: TaskSupport | None) -> model_pb2.EmbedCapabilities:
    if support is None:
        return model_pb2.EmbedCapabilities(supported=False)
    return model_pb2.EmbedCapabilities(
        supported=True,
        input_types=support.input_types,
        granularities=support.granularities,
        encodings=support.encodings,
        dimension=support.dimension,
        max_batch_size=support.max_batch_size,
        max_output_values_per_item=support.max_output_values,
        supports_priority=support.priority,
        supports_lora=support.lora,
        supports_normalization=support.normalization,
        supports_dimension_override=support.dimension_override,
        modalities=support.modalities,
    )


def _classify(support: TaskSupport | None) -> model_pb2.ClassifyCapabilities:
    if support is None:
        return model_pb2.ClassifyCapabilities(supported=False)
    return model_pb2.ClassifyCapabilities(
        supported=True,
        input_types=support.input_types,
        granularities=support.granularities,
        semantics=support.semantics,
        max_batch_size=support.max_batch_size,
        max_output_values_per_item=support.max_output_values,
        supports_priority=support.priority,
        supports_lora=support.lora,
        modalities=support.modalities,
    )


def _score(support: TaskSupport | None) -> model_pb2.ScoreCapabilities:
    if support is None:
        return model_pb2.ScoreCapabilities(supported=False)
    return model_pb2.ScoreCapabilities(
        supported=True,
        input_types=support.input_types,
        granularities=support.granularities,
        semantics=support.semantics,
        normalizations=support.normalizations,
        supports_label_token_scoring=support.label_token_scoring,
        supports_instruction=support.instruction,
        max_groups=support.max_groups,
        max_candidates_per_group=support.max_candidates_per_group,
        max_output_values_per_candidate=support.max_output_values,
        supports_priority=support.priority,
        supports_lora=support.lora,
        higher_is_better=support.higher_is_better,
        modalities=support.modalities,
        max_label_token_ids=support.max_label_token_ids,
    )


def _set(message: Message, **values: int | bool | None) -> None:
    """Set the fields that are known; an unknown one stays absent (DISC-09)."""
    for name, value in values.items():
        if value is not None:
            setattr(message, name, value)
