"""Mutants of what a Generate request asks for: options dropped, bent or accepted that should not be."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import grpc

from openengine.v1 import inputs_pb2
from openengine_adapters.core.errors import Rejected
from openengine_adapters.core.requests import ActiveRequest
from openengine_adapters.core.servicer import OpenEngineServicer
from openengine_adapters.reference import tokenizer
from openengine_adapters.reference.generation import Generation
from openengine_adapters.reference.guided import compile_guide
from openengine_adapters.reference.mutants.seams import (
    Tamper,
    replace,
    request_of,
    servicer_of,
    status_of,
    tampers,
    work_of,
)
from openengine_adapters.reference.sampling import Sampler

_G = "Generate"

# -------------------------------------------------------------------------------------------------- identity


@request_of(_G, "nameless_request", "GEN-01", "A request without an id is given one.")
def _(request: Any) -> None:
    request.request_id = request.request_id or "anonymous"


@status_of(_G, "unknown_model_forbidden", "GEN-01", "An unknown model is PERMISSION_DENIED.")
def _(code: grpc.StatusCode) -> grpc.StatusCode:
    return grpc.StatusCode.PERMISSION_DENIED if code is grpc.StatusCode.NOT_FOUND else code


@request_of(_G, "empty_prompt_served", "GEN-02", "A request without a prompt is served from a space.")
def _(request: Any) -> None:
    if not request.prompt and not request.token_ids.ids:
        request.prompt = " "


@request_of(_G, "ids_wrap_around", "GEN-03", "Token ids outside the vocabulary are folded into it.")
def _(request: Any) -> None:
    folded = [token % tokenizer.VOCAB_SIZE for token in request.token_ids.ids]
    if folded:
        request.token_ids.ids[:] = folded


@request_of(_G, "prompt_cut_to_fit", "GEN-03", "A prompt that is too long loses its beginning.")
def _(request: Any) -> None:
    if len(request.token_ids.ids) > 1024:
        del request.token_ids.ids[:-1024]
    request.prompt = request.prompt[-1024:] if request.HasField("prompt") else request.prompt
    if not request.prompt:
        request.ClearField("prompt")


@servicer_of("id_served_twice", "GEN-04", "An id that is in flight is taken a second time.")
def _(servicer: OpenEngineServicer) -> None:
    claim = servicer.requests.claim

    def renaming(request_id: str, **more: Any) -> Any:
        active = {request.request_id for request in servicer.requests}
        return claim(request_id + "'" if request_id in active else request_id, **more)

    replace(servicer.requests, "claim", renaming)


@servicer_of("id_spent", "GEN-04", "An id cannot be used again after its request ended.")
def _(servicer: OpenEngineServicer) -> None:
    claim, spent = servicer.requests.claim, set()

    @contextlib.contextmanager
    def once(request_id: str, **more: Any) -> Iterator[ActiveRequest]:
        if request_id in spent:
            raise Rejected(grpc.StatusCode.ALREADY_EXISTS, "was used before", field="request_id")
        with claim(request_id, **more) as active:
            spent.add(request_id)
            yield active

    replace(servicer.requests, "claim", once)


@request_of(_G, "ids_read_backwards", "GEN-06", "Token ids are read from the end.")
def _(request: Any) -> None:
    if request.token_ids.ids:
        request.token_ids.ids[:] = request.token_ids.ids[::-1]


@tampers(
    _G, "late_headers", "GEN-08", "The initial metadata waits for the first token.", settings={"latency": 0.4}
)
class _LateHeaders(Tamper):
    sends_headers = False


@request_of(_G, "priority_swapped", "GEN-09", "A smaller priority goes first.")
def _(request: Any) -> None:
    if request.HasField("priority"):
        request.priority = max(-request.priority, -(2**31)) if request.priority > -(2**31) else 2**31 - 1


# -------------------------------------------------------------------------------------------------- sampling


@request_of(_G, "zero_temperature_is_default", "SAMP-01", "A temperature of 0 is taken for an absent one.")
def _(request: Any) -> None:
    if request.sampling.temperature == 0:
        request.sampling.ClearField("temperature")


@request_of(_G, "top_p_clamped", "SAMP-02", "A top_p above 1 is clamped.")
def _(request: Any) -> None:
    if request.sampling.top_p > 1:
        request.sampling.top_p = 1.0


@request_of(_G, "penalty_clamped", "SAMP-02", "A presence penalty out of range is clamped.")
def _(request: Any) -> None:
    if abs(request.sampling.presence_penalty) > 2:
        request.sampling.presence_penalty = 2.0


@request_of(_G, "zero_top_k_is_one", "SAMP-02", "A top_k of 0 keeps one token instead of all.")
def _(request: Any) -> None:
    if request.sampling.HasField("top_k") and request.sampling.top_k == 0:
        request.sampling.top_k = 1


@request_of(_G, "seed_ignored", "SAMP-03", "A seed is dropped.")
def _(request: Any) -> None:
    request.sampling.ClearField("seed")


@request_of(_G, "seed_refused_above_32_bits", "SAMP-03", "A seed is cut to 32 bits.")
def _(request: Any) -> None:
    if request.sampling.HasField("seed"):
        request.sampling.seed &= 0xFFFFFFFF


@request_of(_G, "no_sequences_is_one", "SAMP-04", "num_sequences of 0 is served as 1.")
def _(request: Any) -> None:
    if request.sampling.HasField("num_sequences") and not request.sampling.num_sequences:
        request.sampling.num_sequences = 1


@work_of("twins", "SAMP-04", "All sequences of a request draw the same random numbers.")
def _(work: Generation) -> None:
    replace(work, "sampler", lambda _index: Sampler(work._request.sampling, 0, work.prompt.ids))


@request_of(_G, "greedy_sequences_dropped", "SAMP-05", "Of several greedy sequences one is served.")
def _(request: Any) -> None:
    sampling = request.sampling
    if sampling.HasField("temperature") and sampling.temperature == 0 and sampling.num_sequences > 1:
        sampling.num_sequences = 1


# -------------------------------------------------------------------------------------------------- stopping


@request_of(_G, "sixteen_tokens_by_default", "STOP-01", "Without max_tokens 16 tokens are generated.")
def _(request: Any) -> None:
    if not request.stopping.HasField("max_tokens"):
        request.stopping.max_tokens = 16


@request_of(_G, "zero_tokens_is_no_limit", "STOP-01", "max_tokens of 0 is taken for an absent one.")
def _(request: Any) -> None:
    if not request.stopping.max_tokens:
        request.stopping.ClearField("max_tokens")


@request_of(_G, "one_token_more", "STOP-01", "One token more than max_tokens is generated.")
def _(request: Any) -> None:
    if request.stopping.max_tokens:
        request.stopping.max_tokens += 1


@request_of(_G, "least_tokens_ignored", "STOP-02", "min_tokens is dropped.")
def _(request: Any) -> None:
    request.stopping.ClearField("min_tokens")


@tampers(_G, "let_pass_and_lost", "STOP-02", "Of tokens that min_tokens lets pass a stop, most are not sent.")
class _LetPassAndLost(Tamper):
    def __init__(self) -> None:
        self._lost = 0

    def request(self, request: Any) -> None:
        self._lost = request.stopping.min_tokens - 2 if request.stopping.conditions else 0

    def response(self, response: Any) -> Iterable[Any]:
        if self._lost > 0 and response.WhichOneof("event") == "token":
            self._lost -= 1
            return ()
        return (response,)


@request_of(_G, "least_above_most", "STOP-02", "min_tokens above max_tokens is lowered.")
def _(request: Any) -> None:
    if request.stopping.HasField("max_tokens") and request.stopping.min_tokens > request.stopping.max_tokens:
        request.stopping.min_tokens = request.stopping.max_tokens


@work_of("stops_within_tokens", "STOP-03", "A stop string that straddles tokens is missed.")
def _(work: Generation) -> None:
    find = work._stops.find
    replace(work._stops, "find", lambda text, known: find("\0" * known + text[known:], known))


@request_of(_G, "empty_stop_served", "STOP-03", "Empty stop conditions are dropped.")
def _(request: Any) -> None:
    kept = [c for c in request.stopping.conditions if c.stop_text or c.HasField("stop_token_id")]
    del request.stopping.conditions[:]
    request.stopping.conditions.extend(kept)


@request_of(_G, "stop_left_in", "STOP-05", "A matched stop stays in the output.")
def _(request: Any) -> None:
    if request.stopping.conditions:
        request.stopping.include_stop_in_output = True


@request_of(_G, "stop_cut_out", "STOP-05", "A matched stop is cut out though it was to stay.")
def _(request: Any) -> None:
    request.stopping.ClearField("include_stop_in_output")


@request_of(_G, "eos_not_ignored", "STOP-06", "ignore_eos is dropped.")
def _(request: Any) -> None:
    request.stopping.ClearField("ignore_eos")


# ---------------------------------------------------------------------------------------------- returned data


@request_of(_G, "prompt_start_ignored", "RESP-02", "Prompt records always begin at the first token.")
def _(request: Any) -> None:
    request.response.ClearField("prompt_logprob_start")


@request_of(_G, "one_candidate_more", "RESP-04", "top_n of N gives N+1 candidates.")
def _(request: Any) -> None:
    if request.response.output_candidates.top_n:
        request.response.output_candidates.top_n = min(20, request.response.output_candidates.top_n + 1)


@request_of(_G, "candidates_twice", "RESP-05", "A candidate named twice is served once.")
def _(request: Any) -> None:
    ids = request.response.output_candidates.token_ids.ids
    if ids:
        ids[:] = list(dict.fromkeys(ids))


@request_of(_G, "one_selection_for_both", "RESP-07", "The output's candidates are also the prompt's.")
def _(request: Any) -> None:
    response = request.response
    if response.return_prompt_logprobs and response.HasField("output_candidates"):
        response.prompt_candidates.CopyFrom(response.output_candidates)


@request_of(_G, "candidates_without_logprobs", "RESP-08", "Candidates without log-probabilities are dropped.")
def _(request: Any) -> None:
    if not request.response.return_output_logprobs:
        request.response.ClearField("output_candidates")
    if not request.response.return_prompt_logprobs:
        request.response.ClearField("prompt_candidates")


# --------------------------------------------------------------------------------- KV options, guides, media


@request_of(_G, "bypass_ignored", "KVOPT-01", "The prefix cache is read although it is to be bypassed.")
def _(request: Any) -> None:
    request.kv.ClearField("bypass_prefix_cache")


@request_of(_G, "bypass_caches_nothing", "KVOPT-01", "A bypassing request leaves nothing in the cache.")
def _(request: Any) -> None:
    if request.kv.bypass_prefix_cache:
        request.kv.cache_salt = f"{request.kv.cache_salt}/{request.request_id}"


@request_of(_G, "salt_ignored", "KVOPT-02", "Requests with different salts share cached prefixes.")
def _(request: Any) -> None:
    request.kv.ClearField("cache_salt")


@request_of(_G, "salt_for_one_request", "KVOPT-02", "Requests with the same salt share nothing.")
def _(request: Any) -> None:
    if request.kv.HasField("cache_salt"):
        request.kv.cache_salt += request.request_id


@request_of(_G, "any_rank", "KVOPT-03", "A data-parallel rank that does not exist is dropped.")
def _(request: Any) -> None:
    request.kv.ClearField("data_parallel_rank")


def _ignore_guide(kind: str) -> None:
    @request_of(_G, f"{kind}_ignored", "GUIDE-01", f"A guide of the kind {kind} is dropped.")
    def _(request: Any) -> None:
        if request.guided.HasField(kind):
            request.ClearField("guided")


for _kind in ("json_schema", "regex", "ebnf_grammar", "structural_tag", "choice", "json_object"):
    _ignore_guide(_kind)


@request_of(_G, "broken_guide_dropped", "GUIDE-02", "A malformed guide is dropped.")
def _(request: Any) -> None:
    if request.HasField("guided") and request.guided.WhichOneof("guide"):
        try:
            compile_guide(request.guided)
        except Rejected:
            request.ClearField("guided")


@request_of(_G, "no_choice_is_any", "GUIDE-02", "A choice between nothing is dropped.")
def _(request: Any) -> None:
    if request.guided.HasField("choice") and not request.guided.choice.choices:
        request.ClearField("guided")


@request_of(_G, "any_backend", "GUIDE-03", "The name of the guide's back end is not looked at.")
def _(request: Any) -> None:
    request.guided.backend = ""
    if not request.guided.WhichOneof("guide"):
        request.ClearField("guided")


@request_of(_G, "media_sorted", "MEDIA-01", "Media are taken in an order of the server's own.")
def _(request: Any) -> None:
    ordered = sorted(item.SerializeToString() for item in request.media)
    del request.media[:]
    request.media.extend(inputs_pb2.MediaItem.FromString(item) for item in ordered)


@request_of(_G, "media_without_source", "MEDIA-01", "Media without a source are dropped.")
def _(request: Any) -> None:
    _keep_media(request, lambda item: item.WhichOneof("source") is not None)


@request_of(_G, "garbage_is_no_image", "MEDIA-02", "Media that are too short to be decoded are dropped.")
def _(request: Any) -> None:
    _keep_media(request, lambda item: not item.raw_bytes or item.raw_bytes[:4] == b"\x89PNG")


@request_of(_G, "urls_dropped", "MEDIA-03", "A URL that may not be fetched is dropped.")
def _(request: Any) -> None:
    _keep_media(request, lambda item: not item.url)


def _keep_media(request: Any, keep: Any) -> None:
    kept = [item for item in request.media if keep(item)]
    del request.media[:]
    request.media.extend(kept)
