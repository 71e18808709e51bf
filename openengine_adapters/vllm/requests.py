"""From a validated GenerateRequest to vLLM's own request: prompt, SamplingParams, priority."""

from __future__ import annotations

import hashlib
import uuid
from typing import Any

from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

from openengine.v1 import generate_pb2
from openengine_adapters.core.validation import stop_texts, stop_token_ids, wants_several
from openengine_adapters.engine import GenerateCall

_SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
)


def sampling_params(
    call: GenerateCall, defaults: dict[str, Any], kv_transfer_params: dict[str, Any] | None = None
) -> SamplingParams:
    """Build vLLM's parameters; `defaults` is the model's own generation config (SAMP-01).

    `kv_transfer_params` tell a decode engine where the prompt's blocks are. It must read them, so that there the
    prefix cache is bypassed by a salt (`cache_salt`), not by reading nothing.
    """
    request = call.request
    sampling, stopping = request.sampling, request.stopping
    values = {name: value for name, value in defaults.items() if name in _SAMPLING_FIELDS}
    values.update(
        {field.name: value for field, value in sampling.ListFields() if field.name in _SAMPLING_FIELDS}
    )
    return SamplingParams(
        **values,
        n=wants_several(sampling),
        seed=_seed(sampling),
        stop=stop_texts(stopping),
        stop_token_ids=stop_token_ids(stopping),
        max_tokens=_max_tokens(stopping),
        min_tokens=stopping.min_tokens,
        ignore_eos=stopping.ignore_eos,
        include_stop_str_in_output=call.keep_stop,
        output_kind=RequestOutputKind.DELTA,
        structured_outputs=_structured_outputs(request),
        skip_reading_prefix_cache=True
        if request.kv.bypass_prefix_cache and not request.kv.HasField("session")
        else None,
        skip_clone=True,
        **_handed_over(kv_transfer_params),
        **_logprobs(request.response),
    )


def prefill_params(call: GenerateCall, kv_transfer_params: dict[str, Any] | None) -> SamplingParams:
    """Build vLLM's parameters for a prompt alone: one token, which nobody sees, and no end before it.

    vLLM hands over only what ended by its length; how tokens are drawn is the decode server's to know.
    """
    request = call.request
    return SamplingParams(
        temperature=0.0,
        max_tokens=1,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        skip_reading_prefix_cache=True if request.kv.bypass_prefix_cache else None,
        skip_clone=True,
        **_handed_over(kv_transfer_params),
        **_logprobs(request.response),
    )


def cache_salt(request: generate_pb2.GenerateRequest, *, own: bool = False) -> str | None:
    """The salt of the request's blocks; one of its `own` where a decode engine must not find any (KVOPT-01)."""
    if own or (request.kv.bypass_prefix_cache and request.kv.HasField("session")):
        return uuid.uuid4().hex
    return request.kv.cache_salt if request.kv.HasField("cache_salt") else None


def _handed_over(kv_transfer_params: dict[str, Any] | None) -> dict[str, Any]:
    if kv_transfer_params is None:
        return {}
    return {"extra_args": {"kv_transfer_params": kv_transfer_params}}


def priority(request: generate_pb2.GenerateRequest) -> int:
    """vLLM schedules the lower value first, the contract the larger (GEN-09)."""
    return -request.priority


def _seed(sampling: generate_pb2.SamplingParams) -> int | None:
    """The caller's seed, folded where PyTorch would drop bits (SAMP-03).

    PyTorch's generator on a CPU looks at the lower 32 bits only, and vLLM adds the sequence's index to the seed,
    which must stay within 64. So a larger seed is hashed to 63 bits, all of which depend on all of it.
    """
    if not sampling.HasField("seed"):
        return None
    if sampling.seed < 2**32:
        return sampling.seed
    digest = hashlib.blake2b(sampling.seed.to_bytes(8, "big"), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _max_tokens(stopping: generate_pb2.StoppingOptions) -> int | None:
    """None lets vLLM go to the end of the context, its default would be 16 (STOP-01)."""
    return stopping.max_tokens if stopping.HasField("max_tokens") else None


def _logprobs(response: generate_pb2.ResponseOptions) -> dict[str, Any]:
    """Flat log-probabilities keep the sampled token apart from the candidates, with its true rank."""
    values: dict[str, Any] = {}
    if response.return_output_logprobs:
        selection = response.output_candidates
        if selection.WhichOneof("selection") == "token_ids":
            values["logprob_token_ids"] = list(selection.token_ids.ids)
        else:
            values["logprobs"] = _count(selection)
    if response.return_prompt_logprobs:
        values["prompt_logprobs"] = _count(response.prompt_candidates)
    if values:
        values["flat_logprobs"] = True
    return values


def _count(selection: generate_pb2.CandidateTokenSelection) -> int:
    """vLLM's number of candidates: -1 is the whole vocabulary, 0 the chosen token alone."""
    return -1 if selection.WhichOneof("selection") == "all" else selection.top_n


def _structured_outputs(request: generate_pb2.GenerateRequest) -> StructuredOutputsParams | None:
    kind = request.guided.WhichOneof("guide")
    guided = request.guided
    if kind == "json_schema":
        return StructuredOutputsParams(json=guided.json_schema)
    if kind == "regex":
        return StructuredOutputsParams(regex=guided.regex)
    if kind == "ebnf_grammar":
        return StructuredOutputsParams(grammar=guided.ebnf_grammar)
    if kind == "structural_tag":
        return StructuredOutputsParams(structural_tag=guided.structural_tag)
    if kind == "choice":
        return StructuredOutputsParams(choice=list(guided.choice.choices))
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    return None
