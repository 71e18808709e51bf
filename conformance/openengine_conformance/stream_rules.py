# SPDX-License-Identifier: Apache-2.0
"""The grammar of a Generate response stream, checked response by response on every stream that a case reads."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from openengine.v1 import discovery_pb2, errors_pb2, generate_pb2

Finish = generate_pb2.FinishReason
REASONS = {Finish.FINISH_REASON_STOP, Finish.FINISH_REASON_LENGTH, Finish.FINISH_REASON_CANCELLED}
STABLE_DETAIL_KEYS = {"field", "reason", "limit", "value"}


@dataclass(frozen=True)
class Violation:
    """One broken rule: what came, in a sentence."""

    rule: str
    problem: str


class StreamRules:
    """Collects the rules that one stream breaks. Feed every response to `see`, then call `end` once."""

    def __init__(self, request: generate_pb2.GenerateRequest, role: int) -> None:
        self.violations: list[Violation] = []
        self._request = request
        self._prefill = role == discovery_pb2.ENGINE_ROLE_PREFILL
        sampling = request.sampling
        self._outputs = sampling.num_sequences if sampling.HasField("num_sequences") else 1
        self._count = 0
        self._terminal = ""  # the event that ended the stream
        self._usage_at: int | None = None
        self._usage = generate_pb2.Usage()
        self._prompt_records: int | None = None
        self._records: dict[int, int] = {}
        self._texts: dict[int, list[str]] = {}
        self._finished: dict[int, generate_pb2.GenerationFinished] = {}

    def see(self, response: generate_pb2.GenerateResponse) -> None:
        """Check one response against those before it."""
        self._count += 1
        if response.request_id != self._request.request_id:
            got, sent = response.request_id, self._request.request_id
            self._broken("STREAM-01", f"carries request_id {got!r}, but the request's is {sent!r}")
        event = response.WhichOneof("event")
        if event is None:
            self._broken("STREAM-01", "sets no event")
        if self._terminal:
            rule = "STREAM-05" if self._terminal == "error" else "STREAM-04"
            self._broken(rule, f"({event}) follows the terminal {self._terminal}")
        if self._usage_at is not None:
            self._broken("STREAM-06", f"({event}) follows response {self._usage_at}, which carried usage")
        match event:
            case "prompt":
                self._see_prompt(response.prompt)
            case "token":
                self._see_token(response.token)
            case "finished":
                self._see_finish(response.finished)
            case "prefill_ready":
                self._see_ready(response.prefill_ready)
            case "error":
                self._see_error(response.error)
        self._see_usage(response, event or "no event")

    def end(self, ok: bool, status: str, *, caused_by_client: bool = False) -> None:
        """Check the stream's end; `status` is how gRPC reported it."""
        if ok and not self._terminal:
            missing = sorted(set(range(self._outputs)) - set(self._finished))
            what = "PrefillReady" if self._prefill else f"GenerationFinished for index {missing}"
            self._note("STREAM-08", f"the stream ended OK after {self._count} responses without {what}")
        if not ok and self._count and not caused_by_client:
            self._note("ERR-01", f"after {self._count} responses the stream ended with status {status}")
        for index, texts in self._texts.items():
            if _is_cumulative(texts):
                self._note("STREAM-03", f"text of output {index} is cumulative: {texts[:3]!r}")
        if self._usage_at is not None:
            self._check_sums()

    def _see_prompt(self, prompt: generate_pb2.PromptOutput) -> None:
        options = self._request.response
        if not options.return_prompt_logprobs:
            self._broken("RESP-01", "is a PromptOutput, which was not asked for")
        if self._prompt_records is not None:
            self._broken("RESP-01", "is a second PromptOutput")
        if self._records or self._finished:
            self._broken("RESP-01", "is a PromptOutput after output tokens")
        self._prompt_records = len(prompt.tokens)
        for position, record in enumerate(prompt.tokens, options.prompt_logprob_start):
            if position == 0:
                if record.HasField("logprob") or record.HasField("rank") or record.candidates:
                    self._broken("RESP-01", "scores the first prompt token, which has nothing before it")
                continue
            self._check_record(record, options, prompt=True)

    def _see_token(self, token: generate_pb2.TokenOutput) -> None:
        if self._prefill:
            self._broken("ROLE-02", "is a TokenOutput of a prefill engine")
        index = self._check_index(token, "TokenOutput")
        if index in self._finished:
            self._broken("STREAM-04", f"is a token of output {index}, which had finished")
        self._records[index] = self._records.get(index, 0) + len(token.tokens)
        if token.text:
            self._texts.setdefault(index, []).append(token.text)
            if not self._records[index]:
                self._broken(
                    "STOP-07", f"carries text {token.text!r} before any token record of output {index}"
                )
        stopping = self._request.stopping
        if stopping.HasField("max_tokens") and self._records[index] > stopping.max_tokens:
            self._broken("STOP-01", f"is token {self._records[index]} of output {index}, above max_tokens")
        for record in token.tokens:
            self._check_record(record, self._request.response, prompt=False)

    def _see_finish(self, finished: generate_pb2.GenerationFinished) -> None:
        if self._prefill:
            self._broken("ROLE-02", "is a GenerationFinished of a prefill engine")
        index = self._check_index(finished, "GenerationFinished")
        if index in self._finished:
            self._broken("STREAM-04", f"finishes output {index} a second time")
        self._finished[index] = finished
        if len(self._finished) >= self._outputs:
            self._terminal = "GenerationFinished"
        match = finished.stop_match.WhichOneof("match")
        conditions = self._request.stopping.conditions
        stop_ids = {c.stop_token_id for c in conditions if c.HasField("stop_token_id")}
        stop_texts = {c.stop_text for c in conditions if c.HasField("stop_text")}
        if finished.reason not in REASONS:
            self._broken("STREAM-09", f"finishes output {index} with reason {finished.reason}")
        elif finished.reason == Finish.FINISH_REASON_STOP:
            if match is None:
                self._broken("STOP-04", "finishes with STOP and does not say what matched")
            elif match == "stop_token_id" and finished.stop_match.stop_token_id not in stop_ids:
                self._broken("STOP-04", "reports a stop_token_id that the caller did not set")
            elif match == "stop_text" and finished.stop_match.stop_text not in stop_texts:
                self._broken("STOP-04", "reports a stop_text that the caller did not set")
            elif match == "eos_token_id" and finished.stop_match.eos_token_id in stop_ids:
                self._broken("STOP-04", "reports as EOS a token that the caller set as a stop")
        elif match is not None:
            self._broken("STOP-04", f"carries stop_match {match}, but its reason is not STOP")

    def _see_ready(self, ready: generate_pb2.PrefillReady) -> None:
        self._terminal = "PrefillReady"
        if not self._prefill:
            self._broken("ROLE-01", "is a PrefillReady of an engine whose role is not PREFILL")
        if not ready.HasField("kv_session"):
            self._broken("PD-01", "is a PrefillReady without kv_session")

    def _see_error(self, error: errors_pb2.EngineError) -> None:
        self._terminal = "error"
        for violation in error_violations(error):
            self._broken(violation.rule, violation.problem)

    def _see_usage(self, response: generate_pb2.GenerateResponse, event: str) -> None:
        last = bool(self._terminal)
        if response.HasField("usage"):
            self._usage_at = self._count
            self._usage = response.usage
            if not last:
                self._broken("STREAM-06", f"({event}) carries usage, but is not the last response")
        elif last and self._usage_at is None:
            self._broken("STREAM-06", f"({event}) ends the stream without usage")

    def _check_index(
        self, event: generate_pb2.TokenOutput | generate_pb2.GenerationFinished, name: str
    ) -> int:
        if not event.HasField("output_index"):
            self._broken("STREAM-02", f"is a {name} without output_index")
        elif event.output_index >= self._outputs:
            self._broken("STREAM-02", f"is a {name} for output {event.output_index} of {self._outputs}")
        return event.output_index

    def _check_record(
        self, record: generate_pb2.TokenInfo, options: generate_pb2.ResponseOptions, *, prompt: bool
    ) -> None:
        wanted = options.return_prompt_logprobs if prompt else options.return_output_logprobs
        selection = options.prompt_candidates if prompt else options.output_candidates
        if wanted and not record.HasField("logprob"):
            self._broken("RESP-03", f"has a record (token {record.token_id}) without logprob")
        if record.HasField("logprob") and not (math.isfinite(record.logprob) and record.logprob <= 1e-4):
            self._broken("RESP-03", f"has a logprob of {record.logprob} for token {record.token_id}")
        for violation in candidate_violations(record, selection):
            self._broken(violation.rule, violation.problem)

    def _check_sums(self) -> None:
        usage, request = self._usage, self._request
        if usage.total_tokens != usage.prompt_tokens + usage.completion_tokens:
            self._note("STREAM-07", f"usage does not add up: {_flat(usage)}")
        if usage.cached_prompt_tokens > usage.prompt_tokens:
            self._note("STREAM-07", f"more cached than prompt tokens: {_flat(usage)}")
        if usage.reasoning_tokens > usage.completion_tokens:
            self._note("STREAM-07", f"more reasoning than completion tokens: {_flat(usage)}")
        if request.HasField("token_ids") and not request.media and self._worked():
            sent = len(request.token_ids.ids)
            if usage.prompt_tokens != sent:
                self._note("STREAM-07", f"prompt_tokens is {usage.prompt_tokens}, but {sent} ids were sent")
        start = request.response.prompt_logprob_start
        if self._prompt_records is not None and usage.prompt_tokens != self._prompt_records + start:
            self._note(
                "RESP-01", f"{self._prompt_records} prompt records for {usage.prompt_tokens} prompt tokens"
            )
        records = sum(self._records.values())
        if records > usage.completion_tokens:
            self._note(
                "STREAM-07", f"completion_tokens is {usage.completion_tokens}, but {records} records came"
            )
        elif records < usage.completion_tokens and self._all_shown():
            self._note(
                "STREAM-07",
                f"completion_tokens is {usage.completion_tokens}, but only {records} records came",
            )

    def _worked(self) -> bool:
        # A request that was aborted in the queue, or failed, may end before its prompt was counted.
        return bool(self._records) or self._terminal == "PrefillReady"

    def _all_shown(self) -> bool:
        # A hidden stop is counted though its record is not sent, and an abort may lose the last records.
        return self._terminal == "GenerationFinished" and all(
            f.reason == Finish.FINISH_REASON_LENGTH or f.stop_match.HasField("eos_token_id")
            for f in self._finished.values()
        )

    def _broken(self, rule: str, problem: str) -> None:
        self._note(rule, f"response {self._count} {problem}")

    def _note(self, rule: str, problem: str) -> None:
        self.violations.append(Violation(rule, problem))


def candidate_violations(
    record: generate_pb2.TokenInfo, selection: generate_pb2.CandidateTokenSelection
) -> Iterator[Violation]:
    """Check one record's candidates against the selection that was asked for."""
    ids = [c.token_id for c in record.candidates]
    scores = [c.logprob for c in record.candidates]
    token = f"the record of token {record.token_id}"
    match selection.WhichOneof("selection"):
        case "top_n":
            if len(ids) != selection.top_n:
                yield Violation("RESP-04", f"{token} has {len(ids)} candidates for top_n {selection.top_n}")
            if any(after > before for before, after in pairwise(scores)):
                yield Violation("RESP-04", f"{token} has candidates that are not best first: {scores}")
            ranks = [c.rank for c in record.candidates if c.HasField("rank")]
            if ranks and ranks != list(range(1, len(ids) + 1)):
                yield Violation("RESP-04", f"{token} has candidates of rank {ranks}")
        case "token_ids":
            asked = list(selection.token_ids.ids)
            if ids != asked:
                yield Violation("RESP-05", f"{token} has candidates {ids}, but {asked} were asked for")
        case "all":
            if not ids:
                yield Violation("RESP-06", f"{token} has no candidates, though all were asked for")
        case None:
            if ids:
                yield Violation("RESP-04", f"{token} has {len(ids)} candidates, though none were asked for")
    if len(set(ids)) != len(ids):
        yield Violation("RESP-04", f"{token} names a candidate twice: {ids[:20]}")
    for candidate in record.candidates:
        if not candidate.logprob <= 1e-4:
            yield Violation("RESP-03", f"{token} has a candidate with logprob {candidate.logprob}")
            break
        same = candidate.token_id == record.token_id and record.HasField("logprob")
        if same and abs(candidate.logprob - record.logprob) > 1e-3:
            yield Violation(
                "RESP-03", f"{token} has logprob {record.logprob}, its candidate {candidate.logprob}"
            )


def error_violations(error: errors_pb2.EngineError) -> Iterator[Violation]:
    """Check a terminal EngineError by itself."""
    if error.code == errors_pb2.ERROR_CODE_UNSPECIFIED:
        yield Violation("ERR-01", "is an EngineError without a code")
    if not error.message:
        yield Violation("ERR-01", "is an EngineError without a message")
    if error.HasField("retry_after_ms") and not error.retryable:
        yield Violation("ERR-02", "sets retry_after_ms on an error that is not retryable")
    for key in error.details.fields:
        if key not in STABLE_DETAIL_KEYS and "." not in key:
            yield Violation("ERR-03", f"has the detail key {key!r}, neither stable nor namespaced")


def _is_cumulative(texts: list[str]) -> bool:
    grown = all(b.startswith(a) and len(b) > len(a) for a, b in pairwise(texts))
    return len(texts) >= 3 and grown


def _flat(usage: generate_pb2.Usage) -> str:
    return " ".join(str(usage).split())
