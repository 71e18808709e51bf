"""The response stream of one Generate request: a state machine without I/O.

All responses of a request are built here, so an illegal sequence cannot be sent: no token after its output's
finish, no second finish, usage on the last response only, nothing after an EngineError (STREAM-01 … STREAM-09).
An engine that breaks its side of the port ends its own request with an EngineError.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from openengine.v1 import errors_pb2, generate_pb2
from openengine_adapters.core.errors import EngineFailure
from openengine_adapters.core.stops import StopFilter
from openengine_adapters.engine import Delta, Finish, FinishKind, PromptScores, Step, TokenScore

GenerateResponse = generate_pb2.GenerateResponse

_REASONS = {
    FinishKind.EOS: generate_pb2.FINISH_REASON_STOP,
    FinishKind.STOP_TOKEN: generate_pb2.FINISH_REASON_STOP,
    FinishKind.STOP_TEXT: generate_pb2.FINISH_REASON_STOP,
    FinishKind.LENGTH: generate_pb2.FINISH_REASON_LENGTH,
    FinishKind.CANCELLED: generate_pb2.FINISH_REASON_CANCELLED,
}


class ResponseStream:
    """Turns the engine's steps into the contract's responses.

    `outputs` is the number of sequences, 0 on a prefill engine. `filters` holds a stop filter for each output
    when stop strings must be cut out, and is empty otherwise; `drop_stop_token` says whether a matched stop
    token's record stays behind. `token_text` gives a token's own text.
    """

    def __init__(
        self,
        request_id: str,
        outputs: int,
        token_text: Callable[[int], str],
        *,
        wants_prompt: bool = False,
        drop_stop_token: bool = True,
        filters: Mapping[int, StopFilter] | None = None,
    ) -> None:
        self.ended = False
        self._request_id = request_id
        self._open = set(range(outputs))
        self._prefill = outputs == 0
        self._token_text = token_text
        self._prompt_due = wants_prompt
        self._drop_stop_token = drop_stop_token
        self._filters = filters or {}
        self._prompt_tokens = 0
        self._cached: int | None = None
        self._completion = 0
        self._reasoning: int | None = None

    def push(self, step: Step) -> list[GenerateResponse]:
        """Return the responses for one engine step; none once the stream has ended."""
        if self.ended:
            return []
        self._count_prompt(step)
        out: list[GenerateResponse] = []
        try:
            if step.prompt is not None and self._prompt_due:
                self._prompt_due = False
                out.append(self._prompt(step.prompt))
            for delta in step.deltas:
                self._delta(delta, out)
            if step.session is not None:
                if not self._prefill:
                    raise _BrokenPort("a KV session on an engine that is not a prefill engine")
                response = self._new()
                response.prefill_ready.kv_session.CopyFrom(step.session)
                self._end(response, out)
        except _BrokenPort as broken:
            out += self.fail(EngineFailure(f"the engine sent {broken}"))
        return out

    def cancel(self) -> list[GenerateResponse]:
        """End every open output as CANCELLED (ABORT-02); a prefill, which has none, ends with an EngineError."""
        if self._prefill:
            return self.fail(EngineFailure("the request was aborted", code=errors_pb2.ERROR_CODE_CANCELLED))
        finish = Finish(FinishKind.CANCELLED)
        return self.push(Step(deltas=[Delta(index, (), "", finish=finish) for index in sorted(self._open)]))

    def fail(self, failure: EngineFailure) -> list[GenerateResponse]:
        """End the whole request with one EngineError."""
        out: list[GenerateResponse] = []
        if not self.ended:
            response = self._new()
            response.error.CopyFrom(failure.to_proto())
            self._end(response, out)
        return out

    def close(self) -> list[GenerateResponse]:
        """The engine's stream is over: an EngineError if outputs are still open (STREAM-08)."""
        return self.fail(EngineFailure("the engine ended the request without finishing it", retryable=True))

    def _count_prompt(self, step: Step) -> None:
        self._prompt_tokens = max(self._prompt_tokens, step.prompt_tokens)
        if self._cached is None:
            self._cached = step.cached_prompt_tokens

    def _delta(self, delta: Delta, out: list[GenerateResponse]) -> None:
        if delta.index not in self._open:
            raise _BrokenPort(f"output {delta.index} after its end, or never asked for")
        if delta.scores is not None and len(delta.scores) != len(delta.token_ids):
            raise _BrokenPort("tokens and log-probabilities of different length")
        self._completion += len(delta.token_ids)
        stop_filter = self._filters.get(delta.index)
        finish = delta.finish
        if stop_filter is not None:
            delta = stop_filter.push(delta)
        elif finish is not None and finish.kind is FinishKind.STOP_TOKEN and self._drop_stop_token:
            delta = _without_last(delta)
        if delta.token_ids or delta.text:
            if self._prompt_due:
                raise _BrokenPort("a token before the prompt's log-probabilities")
            out.append(self._token(delta))
        if finish is not None:
            self._finish(delta.index, finish, out)

    def _finish(self, index: int, finish: Finish, out: list[GenerateResponse]) -> None:
        self._open.remove(index)
        if finish.reasoning_tokens is not None:
            self._reasoning = (self._reasoning or 0) + finish.reasoning_tokens
        response = self._new()
        event = response.finished
        event.output_index = index
        event.reason = _REASONS[finish.kind]
        event.message = finish.message
        _set_stop_match(event, finish)
        if self._open:
            out.append(response)
        else:
            self._end(response, out)

    def _end(self, response: GenerateResponse, out: list[GenerateResponse]) -> None:
        self.ended = True
        self._open.clear()
        usage = response.usage
        usage.prompt_tokens = self._prompt_tokens
        usage.completion_tokens = self._completion
        usage.total_tokens = self._prompt_tokens + self._completion
        if self._cached is not None:
            usage.cached_prompt_tokens = min(self._cached, self._prompt_tokens)
        if self._reasoning is not None:
            usage.reasoning_tokens = min(self._reasoning, self._completion)
        out.append(response)

    # Messages are filled in place: that takes a quarter of the time of nested constructors, for every token.

    def _new(self) -> GenerateResponse:
        response = GenerateResponse()
        response.request_id = self._request_id
        return response

    def _token(self, delta: Delta) -> GenerateResponse:
        response = self._new()
        token = response.token
        token.output_index = delta.index
        token.text = delta.text
        if delta.scores is None:
            for token_id in delta.token_ids:
                record = token.tokens.add()
                record.token_id = token_id
                record.token = self._token_text(token_id)
        else:
            for token_id, score in zip(delta.token_ids, delta.scores, strict=True):
                self._fill(token.tokens.add(), token_id, score)
        for record, own in zip(token.tokens, delta.token_texts or (), strict=False):
            if own is not None:
                record.token = own
        return response

    def _prompt(self, prompt: PromptScores) -> GenerateResponse:
        if len(prompt.token_ids) != len(prompt.scores):
            raise _BrokenPort("prompt tokens and log-probabilities of different length")
        response = self._new()
        response.prompt.SetInParent()
        for token_id, score in zip(prompt.token_ids, prompt.scores, strict=True):
            self._fill(response.prompt.tokens.add(), token_id, score)
        return response

    def _fill(self, record: generate_pb2.TokenInfo, token_id: int, score: TokenScore | None) -> None:
        text = self._token_text
        record.token_id = token_id
        record.token = text(token_id)
        if score is None:
            return
        record.logprob = score.logprob
        if score.rank is not None:
            record.rank = score.rank
        for candidate in score.candidates:
            entry = record.candidates.add()
            entry.token_id = candidate.token_id
            entry.logprob = candidate.logprob
            entry.token = text(candidate.token_id)
            if candidate.rank is not None:
                entry.rank = candidate.rank


class _BrokenPort(Exception):
    """The engine sent what the port forbids."""


def _set_stop_match(event: generate_pb2.GenerationFinished, finish: Finish) -> None:
    if finish.kind is FinishKind.EOS:
        event.stop_match.eos_token_id = finish.token_id
    elif finish.kind is FinishKind.STOP_TOKEN:
        event.stop_match.stop_token_id = finish.token_id
    elif finish.kind is FinishKind.STOP_TEXT:
        event.stop_match.stop_text = finish.text


def _without_last(delta: Delta) -> Delta:
    """The same delta without its stop token's record; the engine left its text out (`keep_stop` is False)."""
    scores: Sequence[TokenScore] | None = delta.scores
    return Delta(
        index=delta.index,
        token_ids=delta.token_ids[:-1],
        text=delta.text,
        scores=None if scores is None else scores[:-1],
        finish=delta.finish,
    )
