"""A prompt that ends inside a character, which the output may complete: engines get its first text wrong then."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile

SPLIT = "\ufffd"


class PromptTail:
    """Makes each sequence's first text the output's, from the character that it shares with the prompt on (STREAM-03).

    `decode` is the engine's own.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt_ids: Sequence[int]) -> None:
        # One token tells for almost every prompt that it ends well.
        whole = not prompt_ids or not decode(prompt_ids[-1:]).endswith(SPLIT)
        text = "" if whole else decode(prompt_ids)
        self._decode = decode
        self._prompt_ids = prompt_ids
        self._prompt = text if text.endswith(SPLIT) else ""
        self._begun: set[int] = set()

    def cut(self, index: int, text: str) -> str:
        """Take the prompt out of a text that repeats it.

        So do tokenizer streams that are primed with the prompt, and count as their past only what ends with a whole
        character.
        """
        if not self._begins(index, text):
            return text
        return text[_shared(self._prompt, text) :]

    def complete(self, index: int, text: str, token_ids: Sequence[int]) -> str:
        """Put the shared character back before the text of an output's first tokens, where the engine left it out.

        So does a detokenizer that takes the length of the prompt's text, with the mark of half a character in it, off
        that of prompt and output.
        """
        if not self._begins(index, text):
            return text
        both = self._decode([*self._prompt_ids, *token_ids])
        return both[_shared(self._prompt, both) : len(self._prompt)] + text

    def _begins(self, index: int, text: str) -> bool:
        if not self._prompt or not text or index in self._begun:
            return False
        self._begun.add(index)
        return True


def _shared(prompt: str, text: str) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(prompt, text, strict=False)))
