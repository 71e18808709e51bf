"""A byte-level tokenizer with a few longer tokens.

Ids 0 … 255 are the bytes, then come the special tokens, then frequent pieces of English and JSON. The pieces make
stop strings straddle tokens and put several characters into one token; one of them ends inside a character.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

EOS: Final = 256
IMAGE: Final = 257
VIDEO: Final = 258
AUDIO: Final = 259

_SPECIAL: Final = ("<|endoftext|>", "<|image|>", "<|video|>", "<|audio|>")

_PIECES: Final = (
    *(
        " the",
        " and",
        " of",
        " to",
        " in",
        " is",
        " that",
        " it",
        " was",
        " for",
        " with",
        " on",
        " a",
        " an",
    ),
    *(
        " The",
        "The",
        " house",
        " river",
        " light",
        " morning",
        " water",
        " small",
        " old",
        " every",
        " through",
    ),
    *("th", "er", "in", "on", "an", "re", "ed", "ou", "es", "ar", "ing", "tion", "ll", "st", "ea"),
    *(". ", ", ", "\n\n", '": "', '", "', '": ', '{"', '"}', "caf", "é", " ☕"),
)

_BYTES: Final[tuple[bytes, ...]] = (
    *(bytes([value]) for value in range(256)),
    *(b"" for _ in _SPECIAL),
    *(piece.encode() for piece in _PIECES),
    "☕".encode()[:2],
)


def _by_first_byte() -> dict[int, list[tuple[bytes, int]]]:
    table: dict[int, list[tuple[bytes, int]]] = {}
    for token_id, data in enumerate(_BYTES):
        if data:
            table.setdefault(data[0], []).append((data, token_id))
    for entries in table.values():
        entries.sort(key=lambda entry: -len(entry[0]))
    return table


_LONGEST_FIRST: Final = _by_first_byte()

VOCAB_SIZE: Final = len(_BYTES)


def encode(text: str) -> list[int]:
    """Return the ids of `text`, always taking the longest token that fits."""
    data = text.encode()
    ids: list[int] = []
    position = 0
    while position < len(data):
        for piece, token_id in _LONGEST_FIRST[data[position]]:
            if data.startswith(piece, position):
                ids.append(token_id)
                position += len(piece)
                break
    return ids


def token_bytes(token_id: int) -> bytes:
    """The bytes that a token stands for; special tokens have none."""
    return _BYTES[token_id]


def is_special(token_id: int) -> bool:
    """Whether the token stands for no text."""
    return EOS <= token_id < EOS + len(_SPECIAL)


def decode(token_ids: Sequence[int]) -> str:
    """The text of these ids; special tokens add nothing, broken UTF-8 shows as U+FFFD."""
    return b"".join([_BYTES[token_id] for token_id in token_ids]).decode("utf-8", "replace")


def token_text(token_id: int) -> str:
    """The text of one token by itself, special tokens by their name."""
    if is_special(token_id):
        return _SPECIAL[token_id - EOS]
    return _BYTES[token_id].decode("utf-8", "replace")
