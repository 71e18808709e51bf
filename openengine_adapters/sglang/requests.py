"""From a validated GenerateRequest to SGLang's own requests, one for each sequence."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.sampling.sampling_params import MAX_STOP_COUNT, SamplingParams

from openengine.v1 import generate_pb2
from openengine_adapters.core.errors import invalid
from openengine_adapters.core.validation import stop_texts, stop_token_ids, wants_several
from openengine_adapters.engine import GenerateCall
from openengine_adapters.sglang.media import Prompt

INT64_MAX = 2**63 - 1

LOWEST_PENALTY = 1e-6
"""SGLang divides by a repetition penalty: below, scores can become infinite."""

MAX_STOP_TEXT = 1024
"""Bytes of one stop string: SGLang decodes as many tokens again at each step."""

MAX_PROMPT_CANDIDATES = 2_000_000
"""Candidates of one prompt together; a hundred bytes each, in three processes."""

_ANY_OBJECT = json.dumps({"type": "object"})

_SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
)

_REGEX_SPECIAL = re.compile(r"[\\^$.|?*+(){}\[\]/-]")


class WholeStops(SamplingParams):  # type: ignore[misc]  # untyped where SGLang is not installed
    """SGLang's parameters, with stop strings looked for in as many tokens as they can be spelled with (STOP-03).

    SGLang looks at as many as its tokenizer would take, and misses a string that the model spelled in smaller ones.
    """

    def normalize(self, tokenizer: Any) -> None:
        """Called by SGLang. A token is a byte at least."""
        super().normalize(tokenizer)
        self.stop_str_max_len = max((len(text.encode()) for text in self.stop_strs), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What the running engine says about requests; `longest` counts prompt and output."""

    longest: int
    defaults: dict[str, Any]
    deterministic: bool = False
    low_priority_first: bool = False


@dataclass(frozen=True, slots=True)
class Wanted:
    """The log-probabilities that a request asks SGLang for, which has one selection for prompt and output."""

    prompt: bool
    output: bool
    prompt_from: int  # the first position that SGLang is asked for
    top: int
    token_ids: list[int] | None


def check(request: generate_pb2.GenerateRequest, prompt_length: int, terms: Terms) -> None:
    """Refuse by name what SGLang cannot do, before it sees it (GEN-10, MODEL-07)."""
    sampling, stopping = request.sampling, request.stopping
    if sampling.HasField("repetition_penalty") and not LOWEST_PENALTY <= sampling.repetition_penalty <= 2:
        allowed = f"{LOWEST_PENALTY:g} to 2"
        raise invalid(
            "sampling.repetition_penalty",
            f"{sampling.repetition_penalty:g} is outside {allowed}, what this engine takes",
            limit=allowed,
            value=sampling.repetition_penalty,
        )
    if terms.deterministic and sampling.min_p:
        raise invalid("sampling.min_p", "this engine has no min_p in its deterministic mode; leave it out")
    highest = INT64_MAX - (wants_several(sampling) - 1)
    if sampling.seed > highest:
        raise invalid(
            "sampling.seed",
            f"{sampling.seed} is above {highest}, the highest for {wants_several(sampling)} sequences here",
            limit=highest,
            value=sampling.seed,
        )
    _check_stops(stop_texts(stopping))
    if request.media and request.response.return_prompt_logprobs:
        raise invalid(
            "response.return_prompt_logprobs",
            "with media the prompt holds places of images, which have no log-probability here; leave it out",
        )
    if stopping.ignore_eos and request.HasField("guided"):
        raise invalid(
            "stopping.ignore_eos", "an output that is guided ends where its guide does; leave it out"
        )
    wanted = logprobs(request)
    count = (prompt_length - wanted.prompt_from) * (wanted.top + len(wanted.token_ids or ()))
    if wanted.prompt and count > MAX_PROMPT_CANDIDATES:
        raise invalid(
            "response.prompt_candidates",
            f"{count} candidates for the prompt are more than {MAX_PROMPT_CANDIDATES}; ask for fewer, "
            "or for the end of the prompt by response.prompt_logprob_start",
            limit=MAX_PROMPT_CANDIDATES,
            value=count,
        )


def _check_stops(texts: Sequence[str]) -> None:
    if len(texts) > MAX_STOP_COUNT:
        raise invalid(
            "stopping.conditions",
            f"{len(texts)} stop strings are more than the {MAX_STOP_COUNT} that this engine takes",
            limit=MAX_STOP_COUNT,
            value=len(texts),
        )
    longest = max((len(text.encode()) for text in texts), default=0)
    if longest > MAX_STOP_TEXT:
        raise invalid(
            "stopping.conditions",
            f"a stop string of {longest} bytes is longer than {MAX_STOP_TEXT}",
            limit=MAX_STOP_TEXT,
            value=longest,
        )


def rids(call_id: str, sequences: int) -> list[str]:
    """SGLang's ids for a call's sequences: of one length, since SGLang aborts every id that begins alike (ABORT-04)."""
    return [f"{call_id[:24]}{index:08x}" for index in range(sequences)]


def own_stops(stopping: generate_pb2.StoppingOptions) -> bool:
    """Whether we look for the stops: SGLang's strings disregard min_tokens, and its stop ids end with ignore_eos."""
    texts, ids = stop_texts(stopping), stop_token_ids(stopping)
    return bool(texts and stopping.min_tokens) or bool(ids and stopping.ignore_eos)


def inputs(call: GenerateCall, prompt: Prompt, terms: Terms) -> list[GenerateReqInput]:
    """Build one request for each sequence; the prompt's log-probabilities are asked of the first alone."""
    request = call.request
    several = wants_several(request.sampling)
    seeds = _seeds(request.sampling, several, terms)
    wanted = logprobs(request)
    params = _sampling_params(call, terms.longest - len(prompt.ids), terms)
    return [
        GenerateReqInput(
            rid=rid,
            **prompt.fields,
            sampling_params={**params, "sampling_seed": seed},
            stream=True,
            lora_path=None if call.lora is None else call.lora.name,
            priority=_priority(request, terms),
            cache_salt=request.kv.cache_salt or None,
            routed_dp_rank=_data_parallel_rank(request),
            external_trace_header=dict(call.trace_headers) or None,
            **_logprob_fields(request, wanted, len(prompt.ids), first=index == 0),
        )
        for index, (rid, seed) in enumerate(zip(rids(call.id, several), seeds, strict=True))
    ]


def meeting(inputs: list[GenerateReqInput], room: Mapping[str, Any]) -> list[GenerateReqInput]:
    """The same requests, with where a prefill and a decode engine meet; nowhere on an aggregated one."""
    for request in inputs:
        for name, value in room.items():
            setattr(request, name, value)
    return inputs


def _sampling_params(call: GenerateCall, room: int, terms: Terms) -> dict[str, Any]:
    sampling, stopping = call.request.sampling, call.request.stopping
    values = dict(terms.defaults)
    values.update(
        {field.name: value for field, value in sampling.ListFields() if field.name in _SAMPLING_FIELDS}
    )
    if sampling.HasField("top_k"):
        values["top_k"] = sampling.top_k or -1  # SGLang refuses 0
    if terms.deterministic:
        values.pop("min_p", None)  # SGLang dies of it; a request's own was refused
    # Never absent: that would mean 128 to SGLang; and never more than fits, which SGLang refuses (STOP-01).
    longest = min(stopping.max_tokens or room, room)
    values["max_new_tokens"] = longest
    values["min_new_tokens"] = min(stopping.min_tokens, longest)
    values["ignore_eos"] = stopping.ignore_eos
    values["stop_token_ids"] = stop_token_ids(stopping) or None
    values["stop"] = None if own_stops(stopping) else stop_texts(stopping) or None
    values["no_stop_trim"] = call.keep_stop
    values.update(_guide(call.request.guided))
    return values


def _seeds(sampling: generate_pb2.SamplingParams, several: int, terms: Terms) -> list[int | None]:
    if sampling.HasField("seed"):
        return [sampling.seed + index for index in range(several)]
    if terms.deterministic:
        # SGLang would give each request the seed 42.
        return [secrets.randbelow(INT64_MAX) for _ in range(several)]
    return [None] * several


def _priority(request: generate_pb2.GenerateRequest, terms: Terms) -> int | None:
    """SGLang runs the larger value first, as the contract does, unless a flag turns that round (GEN-09)."""
    if not request.HasField("priority"):
        return None
    return -request.priority if terms.low_priority_first else request.priority


def _data_parallel_rank(request: generate_pb2.GenerateRequest) -> int | None:
    return request.kv.data_parallel_rank if request.kv.HasField("data_parallel_rank") else None


def logprobs(request: generate_pb2.GenerateRequest) -> Wanted:
    """What to ask for, so that both sides can be served from it (RESP-07).

    The best candidate is always among it: the rank of a token is known as far as the candidates go.
    """
    response = request.response
    prompt, output = response.return_prompt_logprobs, response.return_output_logprobs
    selections = [response.prompt_candidates] * prompt + [response.output_candidates] * output
    ids = dict.fromkeys(token_id for selection in selections for token_id in selection.token_ids.ids)
    return Wanted(
        prompt=prompt,
        output=output,
        # SGLang leaves out the score of the first position that it is asked for. Where it computes scores it reuses no
        # cache, and caches what it computes, which is what a bypass means (KVOPT-01).
        prompt_from=0 if request.kv.bypass_prefix_cache else max(0, response.prompt_logprob_start - 1),
        top=max((max(1, selection.top_n) for selection in selections), default=0),
        token_ids=list(ids) or None,
    )


def _logprob_fields(
    request: generate_pb2.GenerateRequest, wanted: Wanted, prompt_length: int, *, first: bool
) -> dict[str, Any]:
    prompt, bypass = wanted.prompt and first, request.kv.bypass_prefix_cache
    scored = prompt or wanted.output
    asked = scored or bypass
    start = wanted.prompt_from if prompt or bypass else prompt_length
    return {
        "return_logprob": asked,
        "logprob_start_len": start if asked else -1,
        "top_logprobs_num": wanted.top if scored else 0,
        "token_ids_logprob": wanted.token_ids if scored else None,
    }


def _guide(guided: generate_pb2.GuidedDecoding) -> dict[str, str]:
    kind = guided.WhichOneof("guide")
    if kind == "json_schema":
        return {"json_schema": guided.json_schema}
    if kind == "regex":
        return {"regex": guided.regex}
    if kind == "ebnf_grammar":
        return {"ebnf": guided.ebnf_grammar}
    if kind == "structural_tag":
        return {"structural_tag": guided.structural_tag}
    if kind == "choice":
        return {"regex": choice_regex(guided.choice.choices)}
    if kind == "json_object":
        return {"json_schema": _ANY_OBJECT}
    return {}


def choice_regex(choices: Sequence[str]) -> str:
    """A regular expression that matches exactly these strings, in the few escapes that every back end knows."""
    return "(" + "|".join(_REGEX_SPECIAL.sub(r"\\\g<0>", choice) for choice in choices) + ")"
