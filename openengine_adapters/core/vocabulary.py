"""Token ids: which exist, and what text each has."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from openengine_adapters.core.errors import invalid
from openengine_adapters.engine import EngineDescription


class TokenTexts:
    """The text of single tokens, by id.

    Some tokenizers drop a leading space when a token stands alone, so each is decoded behind an anchor token
    whose text is then cut off. `decode` keeps special tokens.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], anchor: int) -> None:
        self._decode = decode
        self._anchor = anchor
        self._anchor_text = decode([anchor])
        self._texts: dict[int, str] = {}

    def __call__(self, token_id: int) -> str:
        """Return the text of `token_id`; bytes of a split character show as U+FFFD."""
        text = self._texts.get(token_id)
        if text is None:
            joined = self._decode([self._anchor, token_id])
            anchored = joined.startswith(self._anchor_text)
            text = joined[len(self._anchor_text) :] if anchored else self._decode([token_id])
            self._texts[token_id] = text
        return text


def check_vocabulary(field: str, token_id: int, description: EngineDescription) -> None:
    """An id that the model knows (GEN-03, RESP-05)."""
    if token_id >= description.vocab_size:
        raise invalid(
            field,
            f"id {token_id} is outside the vocabulary; ids go from 0 to {description.vocab_size - 1}",
            limit=description.vocab_size - 1,
            value=token_id,
        )
