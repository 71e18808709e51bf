"""A prompt that ends inside a character: vLLM's detokenizer begins the output's text with the whole prompt then."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile

SPLIT = "\ufffd"


class PromptTail:
    """Takes the prompt out of the first text of each sequence.

    The tokenizer's stream is primed with the prompt, and counts as its past only what ends with a whole character;
    otherwise the first text that it gives is that of prompt and output together. `decode` is the engine's own.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt_ids: Sequence[int]) -> None:
        # One token tells for almost every prompt that it ends well.
        whole = not prompt_ids or not decode(prompt_ids[-1:]).endswith(SPLIT)
        text = "" if whole else decode(prompt_ids)
        self._prompt = text if text.endswith(SPLIT) else ""
        self._begun: set[int] = set()

    def cut(self, index: int, text: str) -> str:
        """The part of a sequence's text that is not the prompt's; a character that both share is the output's."""
        if not self._prompt or not text or index in self._begun:
            return text
        self._begun.add(index)
        same = takewhile(lambda pair: pair[0] == pair[1], zip(self._prompt, text, strict=False))
        return text[sum(1 for _ in same) :]
