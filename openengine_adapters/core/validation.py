"""The rules of a Generate request, checked before the engine sees it.

Every refusal is an INVALID_ARGUMENT (or the code its rule names) that begins with the field's path and says the
value, the limit and the way out. What the running engine cannot serve is refused by name, from the same
description that discovery is answered from (MODEL-07).
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence

import grpc

from openengine.v1 import discovery_pb2, generate_pb2, inputs_pb2, model_pb2
from openengine_adapters.core.errors import Rejected, invalid
from openengine_adapters.core.response_rules import check_response
from openengine_adapters.core.sizes import check_sizes
from openengine_adapters.core.vocabulary import check_vocabulary
from openengine_adapters.engine import EngineDescription, GenerationSupport

_ROLE_NAMES = {
    discovery_pb2.ENGINE_ROLE_AGGREGATED: "aggregated",
    discovery_pb2.ENGINE_ROLE_PREFILL: "prefill",
    discovery_pb2.ENGINE_ROLE_DECODE: "decode",
}

GUIDE_MODES: dict[str, model_pb2.GuidedDecodingMode.ValueType] = {
    "json_schema": model_pb2.GUIDED_DECODING_MODE_JSON_SCHEMA,
    "regex": model_pb2.GUIDED_DECODING_MODE_REGEX,
    "ebnf_grammar": model_pb2.GUIDED_DECODING_MODE_EBNF_GRAMMAR,
    "structural_tag": model_pb2.GUIDED_DECODING_MODE_STRUCTURAL_TAG,
    "choice": model_pb2.GUIDED_DECODING_MODE_CHOICE,
    "json_object": model_pb2.GUIDED_DECODING_MODE_JSON_OBJECT,
}

INT32_MAX = 2**31 - 1


def check_identity(request_id: str, model: str, description: EngineDescription, prefix: str = "") -> None:
    """Request id and model, for every RPC that runs inference (GEN-01, TASK-01, MODEL-02)."""
    if not request_id:
        raise invalid(
            f"{prefix}request_id", "must not be empty; choose an id that is unique among requests in flight"
        )
    check_model(model, description, f"{prefix}model")


def check_model(model: str, description: EngineDescription, field: str = "model") -> None:
    """An empty model is INVALID_ARGUMENT, an unknown one NOT_FOUND (MODEL-01)."""
    if not model:
        raise invalid(field, f"must not be empty; this server has {description.model_id!r}")
    if model not in description.model_names:
        names = ", ".join(sorted(description.model_names))
        raise Rejected(
            grpc.StatusCode.NOT_FOUND,
            f"{model!r} is not served here; served: {names}",
            field=field,
            value=model,
        )


def check_generate(request: generate_pb2.GenerateRequest, description: EngineDescription) -> None:
    """Check one request completely. Raises `Rejected`."""
    check_identity(request.request_id, request.model, description)
    support = description.generation
    if support is None:
        raise Rejected(
            grpc.StatusCode.FAILED_PRECONDITION,
            "this model does not generate; it serves embedding, classification or scoring",
            field="model",
        )
    _check_role(request, description)
    _check_input(request, description, support)
    _check_sampling(request.sampling, support)
    _check_stopping(request.stopping, description, support)
    check_response(request.response, description, support)
    _check_kv(request.kv, description, support)
    if request.HasField("guided"):
        _check_guided(request.guided, support)
    check_sizes(request)
    check_media("media", request.media, support.modalities)
    if request.lora_name and not description.lora:
        raise invalid(
            "lora_name", "LoRA is not enabled on this server; leave it empty", value=request.lora_name
        )
    if request.HasField("priority") and not support.priority:
        raise invalid(
            "priority", "this engine does not schedule by priority as it is configured; leave it out"
        )
    if description.role == discovery_pb2.ENGINE_ROLE_PREFILL:
        _check_prefill(request, samples=support.prefill_samples)


def wants_several(sampling: generate_pb2.SamplingParams) -> int:
    """The number of sequences asked for; absent is 1 (SAMP-04)."""
    return sampling.num_sequences if sampling.HasField("num_sequences") else 1


def stop_texts(stopping: generate_pb2.StoppingOptions) -> list[str]:
    """The caller's stop strings, in order."""
    return [c.stop_text for c in stopping.conditions if c.WhichOneof("condition") == "stop_text"]


def stop_token_ids(stopping: generate_pb2.StoppingOptions) -> list[int]:
    """The caller's stop token ids, in order."""
    return [c.stop_token_id for c in stopping.conditions if c.WhichOneof("condition") == "stop_token_id"]


def _check_role(request: generate_pb2.GenerateRequest, description: EngineDescription) -> None:
    """ROLE-01, ROLE-03, ROLE-04."""
    has_session = request.kv.HasField("session")
    decode = description.role == discovery_pb2.ENGINE_ROLE_DECODE
    if decode and not has_session:
        reason = "this is a decode server and needs the session that a prefill server returned"
    elif has_session and not decode:
        reason = f"this is a server of role {_ROLE_NAMES[description.role]}, which takes no session"
    else:
        return
    raise Rejected(grpc.StatusCode.FAILED_PRECONDITION, reason, field="kv.session")


def _check_input(
    request: generate_pb2.GenerateRequest, description: EngineDescription, support: GenerationSupport
) -> None:
    """GEN-02, GEN-03."""
    kind = request.WhichOneof("input")
    if kind is None:
        raise invalid("input", "set exactly one of prompt and token_ids")
    if kind == "prompt":
        if not support.text_input:
            raise invalid("prompt", "this engine takes token ids only; tokenise first and send token_ids")
        if not request.prompt:
            raise invalid("prompt", "must not be empty")
        return
    if not support.token_ids_input:
        raise invalid("token_ids", "this engine takes text only; send prompt")
    check_token_ids("token_ids", request.token_ids.ids, description)
    check_prompt_length("token_ids", len(request.token_ids.ids), description)


def check_token_ids(field: str, ids: Sequence[int], description: EngineDescription) -> None:
    """Some ids, all of them in the vocabulary (GEN-02, GEN-03)."""
    if not ids:
        raise invalid(field, "must not be empty")
    check_vocabulary(field, max(ids), description)


def check_prompt_length(field: str, length: int, description: EngineDescription) -> None:
    """A prompt must leave room for one token (GEN-03)."""
    longest = description.max_context_length
    if longest is not None and length >= longest:
        raise invalid(
            field,
            f"the prompt has {length} tokens and the context holds {longest}, with no room for one more; "
            f"shorten it to {longest - 1} or fewer",
            limit=longest - 1,
            value=length,
        )


def _number(message: generate_pb2.SamplingParams, name: str) -> float | None:
    return getattr(message, name) if message.HasField(name) else None  # type: ignore[arg-type]  # name is a field


def _range(name: str, value: float | None, ok: bool, allowed: str) -> None:
    if value is not None and not (math.isfinite(value) and ok):
        raise invalid(f"sampling.{name}", f"{value:g} is outside {allowed}", limit=allowed, value=value)


def _check_sampling(sampling: generate_pb2.SamplingParams, support: GenerationSupport) -> None:
    """SAMP-02 … SAMP-05."""
    temperature = _number(sampling, "temperature")
    low, high = support.temperature_range
    _range("temperature", temperature, temperature is not None and temperature >= 0, "0 or more, and finite")
    if temperature and not low <= temperature <= high:
        allowed = f"0 (greedy) or {low:g} to {high:g} on this engine"
        raise invalid(
            "sampling.temperature", f"{temperature:g} is outside {allowed}", limit=allowed, value=temperature
        )
    top_p, min_p = _number(sampling, "top_p"), _number(sampling, "min_p")
    _range("top_p", top_p, top_p is not None and 0 < top_p <= 1, "(0, 1]")
    _range("min_p", min_p, min_p is not None and 0 <= min_p <= 1, "[0, 1]")
    for name in ("frequency_penalty", "presence_penalty"):
        penalty = _number(sampling, name)
        _range(name, penalty, penalty is not None and -2 <= penalty <= 2, "[-2, 2]")
    repetition = _number(sampling, "repetition_penalty")
    _range(
        "repetition_penalty", repetition, repetition is not None and repetition > 0, "more than 0, and finite"
    )
    if sampling.HasField("top_k") and sampling.top_k < -1:
        raise invalid(
            "sampling.top_k",
            f"{sampling.top_k} is below -1; 0 and -1 mean no limit",
            limit=-1,
            value=sampling.top_k,
        )
    if sampling.HasField("seed") and not support.seed:
        raise invalid("sampling.seed", "this engine ignores seeds as it is configured; leave it out")
    sequences = wants_several(sampling)
    if not 1 <= sequences <= support.max_num_sequences:
        allowed = f"1 to {support.max_num_sequences}"
        raise invalid(
            "sampling.num_sequences", f"{sequences} is outside {allowed}", limit=allowed, value=sequences
        )
    if sequences > 1 and temperature == 0 and not support.greedy_sequences:
        raise invalid(
            "sampling.num_sequences",
            f"{sequences} greedy sequences would all be the same, and this engine refuses them; "
            "ask for one, or set a temperature above 0",
            limit=1,
            value=sequences,
        )


def _check_stopping(
    stopping: generate_pb2.StoppingOptions, description: EngineDescription, support: GenerationSupport
) -> None:
    """STOP-01 … STOP-03."""
    if stopping.HasField("max_tokens"):
        if stopping.max_tokens == 0:
            raise invalid(
                "stopping.max_tokens", "must be at least 1; leave it out for no limit", limit=1, value=0
            )
        if stopping.min_tokens > stopping.max_tokens:
            raise invalid(
                "stopping.min_tokens",
                f"{stopping.min_tokens} is above stopping.max_tokens {stopping.max_tokens}",
                limit=stopping.max_tokens,
                value=stopping.min_tokens,
            )
    longest = description.max_context_length
    if longest is not None and stopping.min_tokens > longest:
        raise invalid(
            "stopping.min_tokens",
            f"{stopping.min_tokens} is above the context length {longest}",
            limit=longest,
            value=stopping.min_tokens,
        )
    for position, condition in enumerate(stopping.conditions):
        field = f"stopping.conditions[{position}]"
        kind = condition.WhichOneof("condition")
        if kind is None:
            raise invalid(field, "set stop_text or stop_token_id")
        if kind == "stop_text" and not condition.stop_text:
            raise invalid(f"{field}.stop_text", "must not be empty")
        if kind == "stop_token_id":
            check_vocabulary(f"{field}.stop_token_id", condition.stop_token_id, description)
    if stopping.include_stop_in_output and not support.stop_in_output:
        raise invalid("stopping.include_stop_in_output", "this engine cannot leave the stop in; leave it out")


def check_prompt_logprob_start(request: generate_pb2.GenerateRequest, prompt_length: int) -> None:
    """The first position asked for lies inside the prompt (RESP-02)."""
    start = request.response.prompt_logprob_start
    if start >= prompt_length:
        raise invalid(
            "response.prompt_logprob_start",
            f"{start} is beyond the prompt, which has {prompt_length} tokens",
            limit=prompt_length - 1,
            value=start,
        )


def _check_kv(kv: generate_pb2.KvOptions, description: EngineDescription, support: GenerationSupport) -> None:
    """KVOPT-01 … KVOPT-03."""
    if kv.bypass_prefix_cache and not support.prefix_cache_bypass:
        raise invalid("kv.bypass_prefix_cache", "this engine cannot bypass its prefix cache; leave it out")
    if kv.HasField("cache_salt"):
        if not support.cache_salt:
            raise invalid("kv.cache_salt", "this engine does not salt its prefix cache; leave it out")
        if not kv.cache_salt:
            raise invalid("kv.cache_salt", "must not be empty; leave it out for the shared cache")
    if kv.HasField("data_parallel_rank"):
        ranks = description.parallelism.ranks
        if kv.data_parallel_rank not in ranks:
            allowed = f"{ranks.start} to {ranks.stop - 1}"
            raise invalid(
                "kv.data_parallel_rank",
                f"{kv.data_parallel_rank} is outside {allowed}",
                limit=allowed,
                value=kv.data_parallel_rank,
            )
        if kv.HasField("session") and kv.session.dp_rank != kv.data_parallel_rank:
            raise invalid(
                "kv.data_parallel_rank",
                f"{kv.data_parallel_rank} disagrees with the session's rank {kv.session.dp_rank}",
                limit=kv.session.dp_rank,
                value=kv.data_parallel_rank,
            )


def _check_guided(guided: generate_pb2.GuidedDecoding, support: GenerationSupport) -> None:
    """GUIDE-02, GUIDE-03. Whether a guide compiles is for the engine's grammar back end to say."""
    kind = guided.WhichOneof("guide")
    if kind is None:
        raise invalid("guided", "set one guide, or leave guided out")
    if GUIDE_MODES[kind] not in support.guided_modes:
        raise invalid(f"guided.{kind}", "this engine does not offer this kind of guide")
    if guided.backend and guided.backend != support.guided_backend:
        has = f"{support.guided_backend!r}" if support.guided_backend else "no named back end"
        raise invalid(
            "guided.backend",
            f"{guided.backend!r} is not the engine's back end, which is set at start-up ({has}); leave it empty",
            limit=support.guided_backend,
            value=guided.backend,
        )
    if kind == "choice":
        if not guided.choice.choices:
            raise invalid("guided.choice", "holds no choice")
        if "" in list(guided.choice.choices):
            raise invalid("guided.choice", "holds an empty choice")
    elif kind != "json_object" and not str(getattr(guided, kind)).strip():
        raise invalid(f"guided.{kind}", "must not be empty")


def check_media(
    field: str, items: Sequence[inputs_pb2.MediaItem], modalities: Container[inputs_pb2.Modality.ValueType]
) -> None:
    """MEDIA-01, MEDIA-02; what is in the items is looked at when they are loaded."""
    for position, item in enumerate(items):
        place = f"{field}[{position}]"
        modality = modality_of(item)
        if modality not in modalities:
            name = inputs_pb2.Modality.Name(modality).removeprefix("MODALITY_").lower()
            raise invalid(f"{place}.modality", f"this model takes no {name} input", value=name)
        if item.WhichOneof("source") is None:
            raise invalid(place, "set one of url, data_uri and raw_bytes")


def modality_of(item: inputs_pb2.MediaItem) -> inputs_pb2.Modality.ValueType:
    """Unspecified means image (MEDIA-01), and so does a value that this build does not know (DISC-12)."""
    known = item.modality in inputs_pb2.Modality.values()
    return item.modality if known and item.modality else inputs_pb2.MODALITY_IMAGE


def _check_prefill(request: generate_pb2.GenerateRequest, *, samples: bool) -> None:
    """A prefill server emits no tokens, so what only shapes tokens has no meaning there, unless it draws the first."""
    if wants_several(request.sampling) > 1:
        raise invalid("sampling.num_sequences", "a prefill server computes one prompt; ask for one", limit=1)
    if samples:
        return
    if request.HasField("guided"):
        raise invalid("guided", "a prefill server emits no tokens to guide; send it to the decode server")
    if request.response.return_output_logprobs:
        raise invalid(
            "response.return_output_logprobs", "a prefill server emits no tokens; ask the decode server"
        )
