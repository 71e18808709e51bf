"""What a Generate request may ask to be returned: log-probabilities and their candidates."""

from __future__ import annotations

from openengine.v1 import generate_pb2
from openengine_adapters.core.errors import invalid
from openengine_adapters.core.vocabulary import check_vocabulary
from openengine_adapters.engine import EngineDescription, GenerationSupport, LogprobSupport


def check_response(
    response: generate_pb2.ResponseOptions, description: EngineDescription, support: GenerationSupport
) -> None:
    """RESP-02, RESP-05, RESP-07, RESP-08."""
    sides = (
        (
            "prompt",
            response.return_prompt_logprobs,
            response.HasField("prompt_candidates"),
            support.prompt_logprobs,
        ),
        (
            "output",
            response.return_output_logprobs,
            response.HasField("output_candidates"),
            support.output_logprobs,
        ),
    )
    for side, wanted, has_candidates, logprobs in sides:
        if has_candidates and not wanted:
            raise invalid(
                f"response.{side}_candidates",
                f"needs response.return_{side}_logprobs = true; set both or neither",
            )
        if not wanted:
            continue
        if logprobs is None:
            raise invalid(
                f"response.return_{side}_logprobs", f"this engine returns no {side} log-probabilities"
            )
        if has_candidates:
            selection = response.prompt_candidates if side == "prompt" else response.output_candidates
            _check_candidates(f"response.{side}_candidates", selection, logprobs, description)
    if (
        response.return_prompt_logprobs
        and response.return_output_logprobs
        and not support.separate_candidates
        and response.prompt_candidates != response.output_candidates
    ):
        raise invalid(
            "response.output_candidates",
            "this engine has one candidate selection for prompt and output; make both the same",
        )
    if response.HasField("prompt_logprob_start") and not response.return_prompt_logprobs:
        raise invalid("response.prompt_logprob_start", "needs response.return_prompt_logprobs = true")


def _check_candidates(
    field: str,
    selection: generate_pb2.CandidateTokenSelection,
    support: LogprobSupport,
    description: EngineDescription,
) -> None:
    kind = selection.WhichOneof("selection")
    if kind is None:
        raise invalid(field, "set one of top_n, token_ids and all, or leave the field out")
    if kind == "all":
        if not support.all:
            raise invalid(
                f"{field}.all", "this engine does not return the whole vocabulary as it is configured"
            )
    elif kind == "top_n":
        most = description.vocab_size if support.max_top_n is None else support.max_top_n
        if selection.top_n > most:
            raise invalid(
                f"{field}.top_n", f"{selection.top_n} is above {most}", limit=most, value=selection.top_n
            )
    else:
        _check_candidate_ids(f"{field}.token_ids", selection.token_ids.ids, support, description)


def _check_candidate_ids(
    field: str, repeated: object, support: LogprobSupport, description: EngineDescription
) -> None:
    ids = list(repeated)  # type: ignore[call-overload]  # a repeated scalar field
    if not support.max_token_ids:
        raise invalid(field, "this engine does not return explicit candidates; use top_n")
    if not ids:
        raise invalid(field, "must not be empty; leave the selection out for none")
    if len(ids) > support.max_token_ids:
        raise invalid(
            field,
            f"{len(ids)} ids are more than the {support.max_token_ids} this engine takes",
            limit=support.max_token_ids,
            value=len(ids),
        )
    if len(set(ids)) < len(ids):
        raise invalid(field, "holds an id twice; name each once")
    check_vocabulary(field, max(ids), description)
