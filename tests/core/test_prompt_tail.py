"""STREAM-03: the output's text begins with the character that it shares with the prompt, and with nothing before it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from openengine_adapters.core.prompt_tail import PromptTail

WHOLE, HALF = list("a漢".encode()), list("a漢".encode()[:-1])


def decode(token_ids: Sequence[int]) -> str:
    """A token is a byte."""
    return bytes(token_ids).decode(errors="replace")


@pytest.mark.parametrize("prompt", [WHOLE, []], ids=["whole", "empty"])
def test_nothing_is_done_where_the_prompt_ends_with_a_character(prompt: list[int]) -> None:
    tail = PromptTail(decode, prompt)
    assert tail.cut(0, "a漢b") == "a漢b"
    assert tail.complete(0, "b", list(b"b")) == "b"


def test_a_prompt_that_is_repeated_is_cut_off_once_for_each_sequence() -> None:
    tail = PromptTail(decode, HALF)
    assert tail.cut(0, "") == ""
    assert tail.cut(0, "a漢b") == "漢b"
    assert tail.cut(0, "a漢") == "a漢"
    assert tail.cut(1, "a\ufffdb") == "b"


def test_a_character_that_is_left_out_is_put_back_once_for_each_sequence() -> None:
    tail = PromptTail(decode, HALF)
    completing = [WHOLE[-1], *b"b"]
    assert tail.complete(0, "", []) == ""
    assert tail.complete(0, "b", completing) == "漢b"
    assert tail.complete(0, "b", completing) == "b"
    assert tail.complete(1, "b", list(b"b")) == "b"
