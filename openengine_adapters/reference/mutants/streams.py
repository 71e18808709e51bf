"""Mutants of the response stream: its grammar, its usage, and the records that it carries."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Iterable
from typing import Any

import grpc

from openengine.v1 import generate_pb2
from openengine_adapters.core.servicer import OpenEngineServicer
from openengine_adapters.engine import Step
from openengine_adapters.reference import tokenizer
from openengine_adapters.reference.generation import Generation
from openengine_adapters.reference.mutants.seams import (
    Refuse,
    Tamper,
    replace,
    response_of,
    servicer_of,
    tampers,
)
from openengine_adapters.reference.scheduler import Scheduler
from openengine_adapters.reference.settings import Faults

_G = "Generate"
_FAILING = {"faults": Faults(fail_after=5)}


def _copy(response: Any) -> Any:
    return type(response).FromString(response.SerializeToString())


# --------------------------------------------------------------------------------------------------- grammar


@response_of(_G, "another_request_id", "STREAM-01", "Responses carry another request id.")
def _(response: Any) -> None:
    response.request_id += "-x"


@tampers(_G, "empty_event", "STREAM-01", "A response without an event comes first.")
class _EmptyEvent(Tamper):
    begun = False

    def response(self, response: Any) -> Iterable[Any]:
        if self.begun:
            return (response,)
        self.begun = True
        return generate_pb2.GenerateResponse(request_id=response.request_id), response


@response_of(_G, "index_zero_absent", "STREAM-02", "The output index is left out when it is 0.")
def _(response: Any) -> None:
    for name in ("token", "finished"):
        if response.HasField(name) and not getattr(response, name).output_index:
            getattr(response, name).ClearField("output_index")


@response_of(_G, "indexes_from_one", "STREAM-02", "Outputs are numbered from 1.")
def _(response: Any) -> None:
    for name in ("token", "finished"):
        if response.HasField(name):
            getattr(response, name).output_index += 1


@tampers(_G, "cumulative_text", "STREAM-03", "Each response repeats the text so far.")
class _CumulativeText(Tamper):
    def __init__(self) -> None:
        self.texts: dict[int, str] = {}

    def response(self, response: Any) -> Iterable[Any]:
        if response.HasField("token"):
            index = response.token.output_index
            self.texts[index] = self.texts.get(index, "") + response.token.text
            response.token.text = self.texts[index]
        return (response,)


@response_of(_G, "records_twice", "STREAM-03", "Each token record is sent twice.")
def _(response: Any) -> None:
    if response.HasField("token"):
        response.token.tokens.extend([_copy(record) for record in response.token.tokens])


@tampers(_G, "token_after_finish", "STREAM-04", "A token follows its output's finish.")
class _TokenAfterFinish(Tamper):
    last: Any = None

    def response(self, response: Any) -> Iterable[Any]:
        if response.HasField("token"):
            self.last = _copy(response)
        if response.HasField("finished") and self.last is not None:
            return response, self.last
        return (response,)


@response_of(_G, "two_finishes", "STREAM-04", "Each output is finished twice.")
def _(response: Any) -> Any:
    return (response, response) if response.HasField("finished") else None


@tampers(_G, "more_after_an_error", "STREAM-05", "A token follows the EngineError.", settings=_FAILING)
class _MoreAfterAnError(Tamper):
    last: Any = None

    def response(self, response: Any) -> Iterable[Any]:
        if response.HasField("error") and self.last is not None:
            return response, self.last
        self.last = _copy(response)
        return (response,)


@response_of(_G, "failure_as_status", "ERR-01", "A failing stream ends with a status.", settings=_FAILING)
def _(response: Any) -> None:
    if response.HasField("error"):
        raise Refuse(grpc.StatusCode.INTERNAL, response.error.message)


@response_of(_G, "retry_the_hopeless", "ERR-02", "A failure for good has a retry delay.", settings=_FAILING)
def _(response: Any) -> None:
    if response.HasField("error"):
        response.error.retryable = False
        response.error.retry_after_ms = 100


@response_of(_G, "loose_details", "ERR-03", "An error's details have keys of their own.", settings=_FAILING)
def _(response: Any) -> None:
    if response.HasField("error"):
        response.error.details.update({"why": "on purpose"})


@response_of(_G, "failure_is_a_finish", "STREAM-09", "A failure is reported as a finish.", settings=_FAILING)
def _(response: Any) -> None:
    if response.HasField("error"):
        response.finished.output_index = 0
        response.finished.reason = generate_pb2.FINISH_REASON_UNSPECIFIED


# ----------------------------------------------------------------------------------------------------- usage


@response_of(_G, "usage_everywhere", "STREAM-06", "Usage comes with every response.")
def _(response: Any) -> None:
    response.usage.prompt_tokens += 0
    response.usage.SetInParent()


@response_of(_G, "no_usage", "STREAM-06", "Usage never comes.")
def _(response: Any) -> None:
    response.ClearField("usage")


@response_of(_G, "total_without_prompt", "STREAM-07", "total_tokens leaves the prompt out.")
def _(response: Any) -> None:
    if response.HasField("usage"):
        response.usage.total_tokens = response.usage.completion_tokens


@response_of(_G, "more_cached_than_sent", "STREAM-07", "More prompt tokens are cached than there are.")
def _(response: Any) -> None:
    if response.HasField("usage"):
        response.usage.cached_prompt_tokens = response.usage.prompt_tokens + 1


@tampers(_G, "usage_of_one_output", "STREAM-07", "Usage counts one output of several.")
class _UsageOfOneOutput(Tamper):
    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()

    def response(self, response: Any) -> Iterable[Any]:
        if response.HasField("token"):
            self.counts[response.token.output_index] += len(response.token.tokens)
        if response.HasField("usage") and len(self.counts) > 1:
            usage = response.usage
            usage.completion_tokens = self.counts[0]
            usage.total_tokens = usage.prompt_tokens + self.counts[0]
        return (response,)


@response_of(_G, "no_end", "STREAM-08", "A stream ends without its last event.")
def _(response: Any) -> Any:
    return () if response.HasField("usage") else None


@response_of(_G, "abort_looks_like_length", "STREAM-09", "An aborted output ends with LENGTH.")
def _(response: Any) -> None:
    if response.finished.reason == generate_pb2.FINISH_REASON_CANCELLED:
        response.finished.reason = generate_pb2.FINISH_REASON_LENGTH


@servicer_of("slot_kept", "STREAM-11", "A request runs on in the engine when its client has left.")
def _(servicer: OpenEngineServicer) -> None:
    async def stream(scheduler: Scheduler, work: Generation) -> AsyncGenerator[Step, None]:
        scheduler.submit(work)
        yield Step()
        while (step := await work.outbox.take()) is not None:
            yield step

    async def abort(call_id: str) -> None:
        """What the handler calls when it ends early; the Abort RPC has its own way."""

    replace(servicer.engine, "_stream", stream)
    replace(servicer.engine, "abort", abort)


# --------------------------------------------------------------------------------------------- stops and text


@response_of(_G, "stop_without_match", "STOP-04", "STOP does not say what matched.")
def _(response: Any) -> None:
    if response.HasField("finished"):
        response.finished.ClearField("stop_match")


@response_of(_G, "length_with_match", "STOP-04", "LENGTH names a stop.")
def _(response: Any) -> None:
    if response.finished.reason == generate_pb2.FINISH_REASON_LENGTH:
        response.finished.stop_match.eos_token_id = tokenizer.EOS


@response_of(_G, "eos_is_the_callers", "STOP-04", "EOS is reported as a stop token of the caller.")
def _(response: Any) -> None:
    if response.finished.stop_match.HasField("eos_token_id"):
        response.finished.stop_match.stop_token_id = response.finished.stop_match.eos_token_id


@response_of(_G, "eos_has_text", "STOP-07", "EOS adds its name to the text.")
def _(response: Any) -> None:
    if any(record.token_id == tokenizer.EOS for record in response.token.tokens):
        response.token.text += "<|endoftext|>"


@response_of(_G, "text_stripped", "STOP-07", "Spaces at the ends of a piece of text get lost.")
def _(response: Any) -> None:
    if response.HasField("token"):
        response.token.text = response.token.text.strip(" ")


@tampers(_G, "text_before_records", "STOP-07", "Text is sent ahead of the records that it belongs to.")
class _TextBeforeRecords(Tamper):
    def response(self, response: Any) -> Iterable[Any]:
        if not response.HasField("token") or not response.token.text:
            return (response,)
        ahead = generate_pb2.GenerateResponse(request_id=response.request_id)
        ahead.token.output_index = response.token.output_index
        ahead.token.text = response.token.text
        response.token.text = ""
        return ahead, response


# --------------------------------------------------------------------------------------------------- records


@response_of(_G, "prompt_twice", "RESP-01", "The prompt's records are sent twice.")
def _(response: Any) -> Any:
    return (response, response) if response.HasField("prompt") else None


@response_of(_G, "first_token_scored", "RESP-01", "The prompt's first token has a log-probability.")
def _(response: Any) -> None:
    if response.prompt.tokens:
        response.prompt.tokens[0].logprob = 0.0


@response_of(_G, "record_without_logprob", "RESP-03", "The record of a space has no log-probability.")
def _(response: Any) -> None:
    for record in response.token.tokens:
        if record.token.startswith(" "):
            record.ClearField("logprob")


@response_of(_G, "worst_candidate_first", "RESP-04", "Candidates come from the worst to the best.")
def _(response: Any) -> None:
    for record in response.token.tokens:
        candidates = [_copy(candidate) for candidate in record.candidates]
        if [c.rank for c in candidates] == list(range(1, len(candidates) + 1)):
            del record.candidates[:]
            record.candidates.extend(candidates[::-1])


@response_of(_G, "named_candidates_sorted", "RESP-05", "Named candidates come by their likelihood.")
def _(response: Any) -> None:
    for record in response.token.tokens:
        candidates = sorted((_copy(c) for c in record.candidates), key=lambda c: -c.logprob)
        del record.candidates[:]
        record.candidates.extend(candidates)


@response_of(_G, "half_the_vocabulary", "RESP-06", "`all` gives a hundred candidates.")
def _(response: Any) -> None:
    for record in response.token.tokens:
        del record.candidates[100:]


@response_of(_G, "rank_from_zero", "RESP-09", "The most likely token has rank 0.")
def _(response: Any) -> None:
    for record in response.token.tokens:
        if record.HasField("rank"):
            record.rank -= 1
