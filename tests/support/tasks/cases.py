"""What the tests of tasks and media ask, told once for the engines and for the reference."""

from __future__ import annotations

import base64
import io
import json
import random
import subprocess
import sys
import zlib
from collections.abc import Collection
from pathlib import Path
from typing import Any, Final

from tests.support import cpu_env
from tests.support.server import REPOSITORY

MINILM: Final = "all-MiniLM-L6-v2"
ADAPTER: Final = "tiny-llama-lora-everywhere"

SENTENCES: Final = (
    "A cat sits on the mat.",
    "A kitten is resting on the rug.",
    "The stock market fell sharply on Monday.",
    "Shares dropped a lot at the start of the week.",
    "How do I bake sourdough bread?",
)
WORDS: Final = ("the quick brown fox", "paris is the capital of france", "a", "dog and cat . what ?")
QUERY: Final = "what is the capital of france"
DOCUMENTS: Final = ("paris is the capital of france", "berlin is a city in germany", "the cat sat on the mat")
ENTITY_TEXT: Final = "the fox jumps to berlin"
LABEL_IDS: Final = (3, 1000, 42)
SEEING_PROMPT: Final = "Look: <image> What is it?"
QWEN_VL: Final = "tiny-qwen2.5-vl"
QWEN_PLACE: Final = "<|vision_start|><|image_pad|><|vision_end|>"
QWEN_PROMPT: Final = f"Look: {QWEN_PLACE} What is it?"

INSTRUCTION: Final = "Prefer cats."
DEFAULT_INSTRUCTION: Final = "Find what answers the query."
SCORE_TEMPLATE: Final = (
    "{% set query = messages | selectattr('role', 'eq', 'query') | first %}"
    "{% set document = messages | selectattr('role', 'eq', 'document') | first %}"
    "Judge. {{ instruction | default('" + DEFAULT_INSTRUCTION + "') }}\n"
    "Query: {{ query.content }}\nDocument: {{ document.content }}\nAnswer:"
)

RERANKER_TEMPLATE: Final = (
    'Note that the answer can only be "yes" or "no". {{ instruct | default("'
    + DEFAULT_INSTRUCTION
    + '") }}\n'
    "Query: {{ messages[0].content }}\nDocument: {{ messages[1].content }}\nAnswer:"
)


def reranker_prompt(document: str, instruction: str = DEFAULT_INSTRUCTION) -> str:
    """What `RERANKER_TEMPLATE` makes of a pair."""
    head = f'Note that the answer can only be "yes" or "no". {instruction}'
    return f"{head}\nQuery: {QUERY}\nDocument: {document}\nAnswer:"


def score_prompt(document: str, instruction: str = DEFAULT_INSTRUCTION) -> str:
    """What `SCORE_TEMPLATE` makes of a pair."""
    return f"Judge. {instruction}\nQuery: {QUERY}\nDocument: {document}\nAnswer:"


def png(seed: int, width: int = 56, height: int = 56) -> bytes:
    """A picture of noise, written without any library, so that it is the same everywhere."""
    noise = random.Random(seed)
    rows = b"".join(b"\0" + noise.randbytes(3 * width) for _ in range(height))
    return png_file(width, height, zlib.compress(rows))


def png_file(width: int, height: int, data: bytes) -> bytes:
    """A PNG of 8-bit RGB whose compressed rows are `data`, whatever they hold."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return len(body).to_bytes(4, "big") + kind + body + zlib.crc32(kind + body).to_bytes(4, "big")

    header = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes((8, 2, 0, 0, 0))
    file = io.BytesIO()
    file.write(b"\x89PNG\r\n\x1a\n")
    for kind, body in ((b"IHDR", header), (b"IDAT", data), (b"IEND", b"")):
        file.write(chunk(kind, body))
    return file.getvalue()


def model(name: str) -> Path:
    """The folder of a model, built first when it is missing."""
    folder = cpu_env.models_dir() / name
    if not folder.is_dir():
        script, *named = ("build_lora_adapters.py",) if name == ADAPTER else ("build_task_models.py", name)
        path = REPOSITORY / "scripts" / "setup" / script
        subprocess.run([sys.executable, str(path), *named], check=True, timeout=300)
    return folder


PICTURES: Final = tuple(png(seed) for seed in (1, 2))

_IMAGES: Final = [base64.b64encode(picture).decode() for picture in PICTURES]
_PAIRS: Final = [[QUERY, text] for text in DOCUMENTS]
_PROMPTS: Final = [score_prompt(text) for text in DOCUMENTS]
_INSTRUCTED: Final = [score_prompt(text, INSTRUCTION) for text in DOCUMENTS]

JOBS: Final[dict[str, tuple[str, str, dict[str, Any]]]] = {
    "minilm": ("embed", MINILM, {"texts": SENTENCES, "pooling": "mean"}),
    "llama": ("embed", cpu_env.TINY_LLAMA, {"texts": WORDS, "pooling": "last"}),
    "bert": ("embed", "tiny-bert-embed", {"texts": WORDS, "pooling": "cls"}),
    "adapted": ("adapt", cpu_env.TINY_LLAMA, {"texts": WORDS}),
    "sentiment": ("classify", "tiny-bert-sentiment", {"texts": WORDS}),
    "classes": ("classify", "tiny-llama-classifier", {"texts": WORDS}),
    "rewards": ("reward", "tiny-qwen2-reward", {"texts": WORDS}),
    "entities": ("tokens", "tiny-bert-entities", {"texts": [ENTITY_TEXT]}),
    "pairs": ("pairs", "tiny-bert-pairs", {"pairs": _PAIRS}),
    "labels": ("next_token", cpu_env.TINY_LLAMA, {"prompts": _PAIRS, "labels": LABEL_IDS}),
    "rerank": ("rerank", "tiny-qwen3", {"prompts": _PROMPTS}),
    "rerank-instructed": ("rerank", "tiny-qwen3", {"prompts": _INSTRUCTED}),
    "asked": ("rerank", "tiny-qwen3", {"prompts": [reranker_prompt(text) for text in DOCUMENTS]}),
    "asked-instructed": (
        "rerank",
        "tiny-qwen3",
        {"prompts": [reranker_prompt(text, INSTRUCTION) for text in DOCUMENTS]},
    ),
    "see": ("see", "tiny-llava", {"prompt": SEEING_PROMPT, "images": _IMAGES, "count": 6}),
    "see-qwen": ("see", QWEN_VL, {"prompt": QWEN_PROMPT, "images": _IMAGES, "count": 6}),
}
"""The reference's work, by the name that a test asks for: what to compute, with which model, of what."""


def _job(name: str) -> dict[str, Any]:
    kind, model_name, inputs = JOBS[name]
    found = {"kind": kind, "model": str(model(model_name)), **inputs}
    if kind == "adapt":
        found["adapter"] = str(model(ADAPTER))
    return found


class Reference:
    """Runs the reference beside the engines; its answers are waited for when they are first needed."""

    def __init__(self, folder: Path, names: Collection[str]) -> None:
        self._answers = folder / "answers.json"
        asked = folder / "jobs.json"
        asked.write_text(json.dumps({name: _job(name) for name in names}), encoding="utf-8")
        script = Path(__file__).with_name("reference.py")
        self._process = subprocess.Popen([sys.executable, str(script), str(asked), str(self._answers)])

    def __getitem__(self, name: str) -> Any:
        """The answer to one of the jobs that were named."""
        assert self._process.wait(300) == 0
        return json.loads(self._answers.read_text(encoding="utf-8"))[name]

    def close(self) -> None:
        """End the process if it still runs."""
        self._process.kill()
        self._process.wait()
