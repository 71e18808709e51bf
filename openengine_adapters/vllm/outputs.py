"""From vLLM's RequestOutput to the port's steps."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import cast

from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput, RequestOutput

from openengine.v1 import generate_pb2
from openengine_adapters.core.errors import EngineFailure
from openengine_adapters.core.prompt_tail import PromptTail
from openengine_adapters.core.validation import stop_token_ids
from openengine_adapters.engine import Candidate, Delta, Finish, FinishKind, PromptScores, Step, TokenScore


class OutputReader:
    """Reads one request's outputs. vLLM runs with DELTA outputs, so nothing is cumulative."""

    def __init__(
        self,
        request: generate_pb2.GenerateRequest,
        eos_token_ids: frozenset[int],
        decode: Callable[[Sequence[int]], str] | None,
    ) -> None:
        """`decode` is that of vLLM's detokenizer; None is a server without one."""
        response = request.response
        self._decode = decode
        self._tail: PromptTail | None = None
        self._stop_ids = frozenset(stop_token_ids(request.stopping))
        self._eos = eos_token_ids
        explicit = response.output_candidates.WhichOneof("selection") == "token_ids"
        self._asked = list(response.output_candidates.token_ids.ids) if explicit else None
        self._best = _best(response.output_candidates)
        self._prompt_best = _best(response.prompt_candidates)
        self._wants_output = response.return_output_logprobs
        self._wants_prompt = response.return_prompt_logprobs
        self._prompt_start = response.prompt_logprob_start

    def read(self, output: RequestOutput) -> Step:
        """Translate one output. Raises `EngineFailure` where vLLM finished a sequence with an error."""
        prompt_ids = output.prompt_token_ids or ()
        if self._tail is None and self._decode is not None:
            self._tail = PromptTail(self._decode, prompt_ids)
        step = Step(
            deltas=[self._delta(completion) for completion in output.outputs],
            prompt_tokens=len(prompt_ids),
            cached_prompt_tokens=output.num_cached_tokens,
        )
        if self._wants_prompt and output.prompt_logprobs:
            self._wants_prompt = False
            step.prompt = self._prompt(prompt_ids, cast(FlatLogprobs, output.prompt_logprobs))
        return step

    def _delta(self, completion: CompletionOutput) -> Delta:
        ids = completion.token_ids
        scores: Sequence[TokenScore] | None = None
        if self._wants_output:
            flat = cast(FlatLogprobs, completion.logprobs)
            scores = [_score(flat, position, self._asked, self._best) for position in range(len(ids))]
        finish = None if completion.finish_reason is None else self._finish(completion)
        text = completion.text if self._tail is None else self._tail.cut(completion.index, completion.text)
        return Delta(completion.index, ids, text, scores, finish)

    def _finish(self, completion: CompletionOutput) -> Finish:
        reason, stop = completion.finish_reason, completion.stop_reason
        if reason == "stop":
            return self._stop(completion)
        if reason == "length":
            return Finish(FinishKind.LENGTH)
        if reason == "abort":
            return Finish(FinishKind.CANCELLED)
        if reason == "repetition":
            return Finish(FinishKind.LENGTH, message="the engine ended a repetition")
        raise EngineFailure(
            "the engine could not finish the request",
            retryable=True,
            details={"vllm.finish_reason": str(reason), "vllm.stop_reason": str(stop or "")},
        )

    def _stop(self, completion: CompletionOutput) -> Finish:
        """Tell the caller's stop from the model's EOS (STOP-04).

        vLLM reports its primary EOS without a reason, and merges the generation config's EOS ids into the stop
        ids, so that the caller's own list decides.
        """
        stop = completion.stop_reason
        if isinstance(stop, str):
            return Finish(FinishKind.STOP_TEXT, text=stop)
        if stop is not None:
            token_id = stop
        elif completion.token_ids:
            token_id = completion.token_ids[-1]
        else:
            token_id = min(self._eos, default=0)
        kind = FinishKind.STOP_TOKEN if token_id in self._stop_ids else FinishKind.EOS
        return Finish(kind, token_id=token_id)

    def _prompt(self, prompt_ids: Sequence[int], flat: FlatLogprobs) -> PromptScores:
        positions = range(self._prompt_start, len(prompt_ids))
        return PromptScores(
            token_ids=prompt_ids[self._prompt_start :],
            scores=[
                _score(flat, position, None, self._prompt_best) if position else None
                for position in positions
            ],
        )


def _best(candidates: generate_pb2.CandidateTokenSelection) -> int:
    """How many of the best tokens are asked for."""
    return sys.maxsize if candidates.WhichOneof("selection") == "all" else candidates.top_n


def _score(flat: FlatLogprobs, position: int, asked: Sequence[int] | None, best: int) -> TokenScore:
    """One position: the token itself, then the candidates in order, those `asked` for or so many of the `best`.

    Outputs that vLLM put together, because they were read slowly, have the token only once: then it is put back among
    its candidates, where it has the rank of a candidate. vLLM numbers explicit candidates 1, 2, 3 as if they were the
    best ones; that is not a rank, so it is dropped.
    """
    first, end = flat.start_indices[position], flat.end_indices[position]
    ids, logprobs, ranks = flat.token_ids, flat.logprobs, flat.ranks
    token_id, logprob, rank = ids[first], logprobs[first], ranks[first]
    candidates = [
        Candidate(ids[at], logprobs[at], ranks[at] if asked is None else None) for at in range(first + 1, end)
    ]
    found = next((candidate for candidate in candidates if candidate.token_id == token_id), None)
    if found is not None:
        # Among equals vLLM gives the token the last rank, and the candidate its own.
        rank = rank if found.rank is None else found.rank
    elif asked is not None:
        if token_id in asked:
            candidates.insert(asked.index(token_id), Candidate(token_id, logprob, None))
            rank = None
    elif rank is not None and rank <= best:
        candidates.insert(rank - 1, Candidate(token_id, logprob, rank))
    return TokenScore(logprob, rank, candidates)
