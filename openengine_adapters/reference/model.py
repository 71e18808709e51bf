"""The toy language model: n-grams of a small corpus plus noise that depends on everything read so far.

Its state is a digest of the whole prefix, so it is to this engine what the KV cache is to a real one: one that holds
the state can go on without the prompt. The n-grams make the output look like language, the noise makes each prompt
go its own way.
"""

from __future__ import annotations

import functools
import hashlib
import math
import struct
from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Final

from openengine_adapters.reference import tokenizer
from openengine_adapters.reference.corpus import PARAGRAPHS

State = bytes

_ORDER: Final = 3
_WEIGHTS: Final = (0.02, 0.08, 0.3, 0.6)  # of the contexts of 0, 1, 2 and 3 tokens
_FLOOR: Final = 1e-5  # probability mass of a token that the corpus never has
_NOISE: Final = 2.0
_NEVER: Final = -40.0  # would break a character, or is a placeholder
_LORA_SCALE: Final = 3.0


class ToyModel:
    """Next-token logits over the tokenizer's vocabulary. `seed` makes another model of the same kind."""

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed

    def start(self) -> State:
        """The state before the first token."""
        return hashlib.blake2b(struct.pack("<q", self._seed), digest_size=16).digest()

    @staticmethod
    def advance(state: State, token: int, media: bytes = b"") -> State:
        """The state after one more token; `media` is the digest of what a placeholder stands for."""
        return hashlib.blake2b(state + struct.pack("<H", token) + media, digest_size=16).digest()

    def logits(self, state: State, recent: Sequence[int], bias: Sequence[float] | None = None) -> list[float]:
        """One value for each token of the vocabulary; `recent` ends with the last token read."""
        base = _ngrams(tuple(recent[-_ORDER:]))
        noise = array("I", hashlib.shake_128(state).digest(4 * tokenizer.VOCAB_SIZE))
        scale = 2 * _NOISE / 2**32
        values = [b + n * scale for b, n in zip(base, noise, strict=True)]
        return values if bias is None else [v + b for v, b in zip(values, bias, strict=True)]


@functools.cache
def _counts() -> dict[tuple[int, ...], Counter[int]]:
    """How often the corpus has each token after each context of up to three tokens."""
    counts: dict[tuple[int, ...], Counter[int]] = {}
    for paragraph in PARAGRAPHS:
        ids = [*tokenizer.encode(paragraph), tokenizer.EOS]
        for position, token in enumerate(ids):
            for order in range(min(_ORDER, position) + 1):
                context = tuple(ids[position - order : position])
                counts.setdefault(context, Counter())[token] += 1
    return counts


@functools.lru_cache(maxsize=1024)
def _ngrams(recent: tuple[int, ...]) -> list[float]:
    masses = [_FLOOR] * tokenizer.VOCAB_SIZE
    for order in range(len(recent) + 1):
        seen = _counts().get(recent[len(recent) - order :])
        if seen is not None:
            share = _WEIGHTS[order] / seen.total()
            for token, count in seen.items():
                masses[token] += share * count
    pending = _inside_character(b"".join(tokenizer.token_bytes(token) for token in recent))
    return [
        math.log(mass) if _fits(token, pending) else _NEVER + math.log(mass)
        for token, mass in enumerate(masses)
    ]


def lora_bias(weights: bytes) -> list[float]:
    """The logit bias that stands for an adapter with these weights."""
    noise = array("I", hashlib.shake_128(hashlib.sha256(weights).digest()).digest(4 * tokenizer.VOCAB_SIZE))
    return [_LORA_SCALE * (2 * value / 2**32 - 1) for value in noise]


def log_softmax(logits: Sequence[float]) -> list[float]:
    """Natural logarithms of the probabilities; they sum to 1."""
    highest = max(logits)
    total = highest + math.log(math.fsum([math.exp(value - highest) for value in logits]))
    return [value - total for value in logits]


def _inside_character(data: bytes) -> bool:
    for back, byte in enumerate(reversed(data[-3:]), start=1):
        if byte >= 0xC0:
            return back < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4)
        if byte < 0x80:
            return False
    return False


def _fits(token: int, inside_character: bool) -> bool:
    data = tokenizer.token_bytes(token)
    if not data:
        return token == tokenizer.EOS and not inside_character
    if inside_character:
        return 0x80 <= data[0] < 0xC0
    return 0xC2 <= data[0] < 0xF5 or data[0] in b"\n\t" or 0x20 <= data[0] < 0x7F
