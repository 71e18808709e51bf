"""From SGLang's chunks to the port's steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from openengine.v1 import generate_pb2
from openengine_adapters.core.prompt_tail import PromptTail
from openengine_adapters.core.stops import StopMatch, StopSeeker
from openengine_adapters.core.validation import stop_texts, stop_token_ids, wants_several
from openengine_adapters.engine import (
    Candidate,
    Delta,
    Finish,
    FinishKind,
    GenerateCall,
    PromptScores,
    Step,
    TokenScore,
)
from openengine_adapters.sglang import errors, requests

Chunk = Mapping[str, Any]
Entry = tuple[float, int, str | None]  # a log-probability, its token, and a text that is not asked for


@dataclass(slots=True)
class _Cursor:
    """How much of one output was read: SGLang's chunks hold everything since the beginning."""

    tokens: int = 0
    text: int = 0
    seeker: StopSeeker | None = None


class OutputReader:
    """Reads the outputs of one call, each from where it was left.

    `prompt_due` says that the prompt's log-probabilities, which come with the first output's first chunk, are wanted
    and not there yet.
    """

    def __init__(
        self,
        call: GenerateCall,
        prompt_ids: Sequence[int],
        eos_token_ids: frozenset[int],
        decode: Callable[[Sequence[int]], str],
        *,
        counts_reasoning: bool = False,
    ) -> None:
        request = call.request
        self._request = request
        self._prompt_ids = prompt_ids
        self._tail = PromptTail(decode, prompt_ids)
        self._eos = eos_token_ids
        self._counts_reasoning = counts_reasoning
        self._keep_stop = call.keep_stop
        self._stop_ids = frozenset(stop_token_ids(request.stopping))
        self._stop_texts = frozenset(stop_texts(request.stopping))
        self._wanted = requests.logprobs(request)
        self.prompt_due = self._wanted.prompt
        self._cursors = [self._cursor(decode) for _ in range(wants_several(request.sampling))]

    def read(self, index: int, chunk: Chunk) -> Step:
        """Translate what output `index` gained. Raises `EngineFailure` or `Rejected` where SGLang gave it up."""
        meta = chunk["meta_info"]
        step = Step(
            deltas=self._deltas(index, chunk),
            prompt_tokens=meta.get("prompt_tokens", 0),
            # The other sequences of a call find the first one's prompt in the cache; that is no saving of the caller's.
            cached_prompt_tokens=meta.get("cached_tokens") if index == 0 else None,
        )
        if self.prompt_due and index == 0 and meta.get("input_token_logprobs"):
            self.prompt_due = False
            step.prompt = self._prompt(meta)
        return step

    def _cursor(self, decode: Callable[[Sequence[int]], str]) -> _Cursor:
        stopping = self._request.stopping
        if not requests.own_stops(stopping):
            return _Cursor()
        ids = self._stop_ids if stopping.ignore_eos else frozenset[int]()
        texts = stop_texts(stopping)
        return _Cursor(seeker=StopSeeker(texts, ids, stopping.min_tokens, decode))

    def _deltas(self, index: int, chunk: Chunk) -> list[Delta]:
        cursor, meta, reason = self._cursors[index], chunk["meta_info"], chunk["meta_info"]["finish_reason"]
        finish: Finish | None = None
        if reason is not None and reason["type"] == "abort":
            finish = errors.aborted(reason, self._request)
            if reason.get("status_code") is not None:
                # Aborted while its guide was compiled; the token that SGLang sends then is made up.
                return [Delta(index, (), "", finish=finish)]
        token_ids, text = chunk["output_ids"][cursor.tokens :], chunk["text"][cursor.text :]
        scores: list[TokenScore] | None = None
        if self._wanted.output:
            scores = self._scores(meta, cursor.tokens, len(token_ids))
            token_ids = token_ids[: len(scores)]
        cursor.tokens += len(token_ids)
        cursor.text += len(text)
        text = self._tail.complete(index, text, chunk["output_ids"])
        match = None if cursor.seeker is None else cursor.seeker.push(token_ids)
        if match is not None:
            return self._stopped(index, token_ids, text, scores, match)
        if finish is None and reason is not None:
            finish = self._finish(reason, chunk)
        if finish is not None and self._counts_reasoning:
            finish.reasoning_tokens = meta.get("reasoning_tokens")
        return [Delta(index, token_ids, text, scores, finish)]

    def _stopped(
        self,
        index: int,
        token_ids: Sequence[int],
        text: str,
        scores: list[TokenScore] | None,
        match: StopMatch,
    ) -> list[Delta]:
        """End an output at a stop that SGLang does not look for: the token that ends it comes as a delta of its own."""
        text = text[: len(text) - match.behind]
        before, last = text[: len(text) - match.last], text[len(text) - match.last :]
        token_id = token_ids[match.count - 1]
        if match.text is not None:
            finish = Finish(FinishKind.STOP_TEXT, text=match.text)
        else:
            finish = Finish(FinishKind.STOP_TOKEN, token_id=token_id)
            last = last if self._keep_stop else ""
        head, tail = slice(match.count - 1), slice(match.count - 1, match.count)
        deltas = [Delta(index, token_ids[tail], last, None if scores is None else scores[tail], finish)]
        if match.count > 1 or before:
            first = Delta(index, token_ids[head], before, None if scores is None else scores[head])
            deltas.insert(0, first)
        return deltas

    def _finish(self, reason: Mapping[str, Any], chunk: Chunk) -> Finish:
        """Tell the caller's stop from the model's EOS (STOP-04). To SGLang both are one: the caller's list decides."""
        if reason["type"] == "length":
            return Finish(FinishKind.LENGTH)
        matched = reason.get("matched")
        if isinstance(matched, str):
            if matched == errors.NOT_A_NUMBER and not (
                matched in self._stop_texts and matched in chunk["text"]
            ):
                raise errors.not_a_number()
            return Finish(FinishKind.STOP_TEXT, text=matched)
        token_id = matched if isinstance(matched, int) else chunk["output_ids"][-1]
        kind = FinishKind.STOP_TOKEN if token_id in self._stop_ids else FinishKind.EOS
        return Finish(kind, token_id=token_id)

    def _scores(self, meta: Mapping[str, Any], start: int, count: int) -> list[TokenScore]:
        chosen: Sequence[Entry] = meta.get("output_token_logprobs", ())[start : start + count]
        selection = self._request.response.output_candidates
        return [
            _score(
                entry,
                _row(meta, "output_top_logprobs", at),
                _row(meta, "output_token_ids_logprobs", at),
                selection,
            )
            for at, entry in enumerate(chosen, start)
        ]

    def _prompt(self, meta: Mapping[str, Any]) -> PromptScores:
        """The first record that SGLang sends has no score; only the prompt's own first token has none here."""
        selection = self._request.response.prompt_candidates
        start, asked_from = self._request.response.prompt_logprob_start, self._wanted.prompt_from
        scores: list[TokenScore | None] = []
        for position in range(start, len(self._prompt_ids)):
            at = position - asked_from
            if position == 0:
                scores.append(None)
                continue
            logprob = meta["input_token_logprobs"][at][0]
            scores.append(
                _score(
                    # SGLang replaces some ids in these records.
                    (logprob, self._prompt_ids[position], None),
                    _row(meta, "input_top_logprobs", at),
                    _row(meta, "input_token_ids_logprobs", at),
                    selection,
                )
            )
        return PromptScores(token_ids=self._prompt_ids[start:], scores=scores)


def _row(meta: Mapping[str, Any], name: str, position: int) -> Sequence[Entry]:
    rows: Sequence[Sequence[Entry] | None] = meta.get(name) or ()
    return (rows[position] or ()) if position < len(rows) else ()


def _score(
    chosen: Entry,
    top: Sequence[Entry],
    explicit: Sequence[Entry],
    selection: generate_pb2.CandidateTokenSelection,
) -> TokenScore:
    """One token with its rank and exactly the candidates selected for its side.

    SGLang gives no ranks: they are the places among the best. A token that is not among them has none.
    """
    logprob, token_id, _ = chosen
    best = _best(top, logprob, token_id)
    rank = next((place for place, entry in enumerate(best, 1) if entry[1] == token_id), None)
    candidates: list[Candidate] = []
    if selection.WhichOneof("selection") == "top_n":
        candidates = [Candidate(e[1], e[0], place) for place, e in enumerate(best[: selection.top_n], 1)]
    elif selection.token_ids.ids:
        values = {entry[1]: entry[0] for entry in explicit}
        candidates = [Candidate(wanted, values[wanted]) for wanted in selection.token_ids.ids]
    return TokenScore(logprob, rank, candidates)


def _best(top: Sequence[Entry], logprob: float, token_id: int) -> list[Entry]:
    """The best entries in order, the token itself before others that are as likely: a greedy one has rank 1."""
    entries = list(top)
    if entries and logprob >= entries[-1][0] and all(entry[1] != token_id for entry in entries):
        entries[-1] = (logprob, token_id, None)
    entries.sort(key=lambda entry: (-entry[0], entry[1] != token_id))
    return entries
