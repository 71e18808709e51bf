"""Drawing a token from logits, and the records that tell how likely it was."""

from __future__ import annotations

import hashlib
import math
import secrets
import struct
from collections import Counter
from collections.abc import Callable, Collection, Sequence

from openengine.v1 import generate_pb2
from openengine_adapters.engine import Candidate, TokenScore
from openengine_adapters.reference.model import log_softmax

_BANNED = float("-inf")


class Sampler:
    """How one output draws its tokens.

    A seed gives each output of a request its own reproducible series of random numbers; without one they differ from
    call to call. Counts of the output's tokens are kept here for the penalties.
    """

    def __init__(self, params: generate_pb2.SamplingParams, index: int, prompt_ids: Sequence[int]) -> None:
        self._temperature = params.temperature if params.HasField("temperature") else 1.0
        self._top_p = params.top_p if params.HasField("top_p") else 1.0
        self._top_k = params.top_k if params.top_k > 0 else 0
        self._min_p = params.min_p
        self._frequency = params.frequency_penalty
        self._presence = params.presence_penalty
        self._repetition = params.repetition_penalty if params.HasField("repetition_penalty") else 1.0
        self._prompt_ids = frozenset(prompt_ids) if self._repetition != 1.0 else frozenset()
        self._counts: Counter[int] = Counter()
        seed = params.seed if params.HasField("seed") else secrets.randbits(64)
        self._series = struct.pack("<QI", seed, index)
        self._drawn = 0

    def draw(
        self,
        logits: Sequence[float],
        *,
        banned: Collection[int] = (),
        allowed: Callable[[int], bool] | None = None,
    ) -> int:
        """Return the next token. `allowed` must let at least one token through."""
        values = self._penalized(logits)
        for token in banned:
            values[token] = _BANNED
        if allowed is not None:
            values = [value if allowed(token) else _BANNED for token, value in enumerate(values)]
        token = self._pick(values)
        self._counts[token] += 1
        self._drawn += 1
        return token

    def _penalized(self, logits: Sequence[float]) -> list[float]:
        values = list(logits)
        if self._repetition != 1.0:
            for token in self._prompt_ids | self._counts.keys():
                values[token] *= self._repetition if values[token] < 0 else 1 / self._repetition
        if self._frequency or self._presence:
            for token, count in self._counts.items():
                values[token] -= self._presence + self._frequency * count
        return values

    def _pick(self, values: list[float]) -> int:
        best = max(range(len(values)), key=values.__getitem__)
        if self._temperature == 0:
            return best
        # Relative to the best one, so that no temperature overflows.
        top = values[best]
        weights = [math.exp((value - top) / self._temperature) for value in values]
        if not self._top_k and self._top_p >= 1 and not self._min_p:
            return self._choose(range(len(weights)), weights)
        order = sorted(range(len(weights)), key=weights.__getitem__, reverse=True)
        if self._top_k:
            del order[self._top_k :]
        order = order[: _nucleus([weights[token] for token in order], self._top_p)]
        # The best token has the weight 1, so weights are probabilities relative to it.
        order = [token for token in order if weights[token] >= self._min_p]
        return self._choose(order, [weights[token] for token in order])

    def _choose(self, tokens: Sequence[int], weights: Sequence[float]) -> int:
        digest = hashlib.blake2b(self._series + struct.pack("<I", self._drawn), digest_size=8).digest()
        point = int.from_bytes(digest) / 2**64 * math.fsum(weights)
        last = tokens[0]
        for token, weight in zip(tokens, weights, strict=True):
            if weight > 0:
                last = token
                point -= weight
                if point < 0:
                    break
        return last


def _nucleus(weights: Sequence[float], top_p: float) -> int:
    """How many of the descending `weights` it takes to reach the share `top_p`."""
    if top_p >= 1:
        return len(weights)
    missing = top_p * math.fsum(weights)
    for count, weight in enumerate(weights, start=1):
        missing -= weight
        if missing <= 0:
            return count
    return len(weights)


class Scorer:
    """Makes the record of a token: its log-probability under the model itself, before any sampling option."""

    def __init__(self, selection: generate_pb2.CandidateTokenSelection | None) -> None:
        kind = selection.WhichOneof("selection") if selection is not None else None
        self._all = kind == "all"
        self._top_n = selection.top_n if selection is not None and kind == "top_n" else 0
        self._ids = tuple(selection.token_ids.ids) if selection is not None and kind == "token_ids" else ()

    def score(self, logits: Sequence[float], token: int) -> TokenScore:
        """Return the record of `token`; equal log-probabilities rank by token id."""
        logprobs = log_softmax(logits)
        order = sorted(range(len(logprobs)), key=lambda each: -logprobs[each])
        ranks = [0] * len(order)
        for rank, each in enumerate(order, start=1):
            ranks[each] = rank
        chosen = self._ids or (order if self._all else order[: self._top_n])
        return TokenScore(
            logprob=logprobs[token],
            rank=ranks[token],
            candidates=[Candidate(each, logprobs[each], ranks[each]) for each in chosen],
        )
