"""A prompt of token ids that ends inside a character, which engines tend to repeat at the head of the output."""

from __future__ import annotations

from tokenizers import Tokenizer

from tests.support import cpu_env
from tests.support.wire import Wire

WORDS = ["crab 🦀", "漢漢"]


async def prove(wire: Wire, whole: str) -> None:
    """Cut the last token off `whole` and see that the output's text is the output's alone (STREAM-03)."""
    tokenizer = Tokenizer.from_file(str(cpu_env.model(cpu_env.TINY_LLAMA) / "tokenizer.json"))
    prompt = tokenizer.encode(whole).ids[:-1]
    answer = await wire.generate(prompt, max_tokens=12)
    before, both = tokenizer.decode(prompt), tokenizer.decode([*prompt, *answer.first.ids])
    assert before.endswith("\ufffd")
    start = before if both.startswith(before) else before.rstrip("\ufffd")
    assert answer.first.text.rstrip("\ufffd") == both.removeprefix(start).rstrip("\ufffd")
