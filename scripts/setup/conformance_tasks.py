# SPDX-License-Identifier: Apache-2.0
"""Run the conformance suite against a real server of each kind that serves tasks or takes media, one after the other.

    python scripts/setup/conformance_tasks.py                       # every kind on both engines
    python scripts/setup/conformance_tasks.py vllm                  # every kind of one engine
    python scripts/setup/conformance_tasks.py sglang:sentiment -v   # one of them; the rest goes to the suite

The kinds with "few" stand for all others, because they share most with them: `few` runs these alone.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.setup.build_task_models import MINILM
from tests.support import cpu_env
from tests.support.server import ServerFailed, executable, serving
from tests.support.tasks.cases import QWEN_PLACE, QWEN_VL, RERANKER_TEMPLATE, SCORE_TEMPLATE

_POOLING: Final = ("--runner", "pooling")
_EMBED: Final = (*_POOLING, "--convert", "embed")
_MATRYOSHKA: Final = '{"is_matryoshka": true}'
_RERANKER: Final = {
    "architectures": ["Qwen3ForSequenceClassification"],
    "classifier_from_token": ["no", "yes"],
    "is_original_qwen3_reranker": True,
}


@dataclass(frozen=True, slots=True)
class Kind:
    """One server: a model of ours and flags of its own, one of them perhaps with a template's file.

    `place` is an image's placeholder, where media are tried.
    """

    model: str
    flags: tuple[str, ...] = ()
    template: tuple[str, str] | None = None
    place: str = ""
    sees: bool = False
    few: bool = False


KINDS: Final = {
    "vllm:sentences": Kind(MINILM, ("--max-model-len", "256")),
    "vllm:cut": Kind(cpu_env.TINY_LLAMA, (*_EMBED, "--hf-overrides", _MATRYOSHKA), few=True),
    "vllm:sentiment": Kind("tiny-bert-sentiment", ("--max-model-len", "512")),
    "vllm:entities": Kind("tiny-bert-entities", ("--max-model-len", "512")),
    "vllm:rewards": Kind("tiny-qwen2-reward"),
    "vllm:pairs": Kind("tiny-bert-pairs", ("--max-model-len", "512")),
    "vllm:reranker": Kind(
        "tiny-qwen3",
        (*_POOLING, "--hf-overrides", json.dumps(_RERANKER)),
        template=("--score-template", SCORE_TEMPLATE),
    ),
    "vllm:labels": Kind(cpu_env.TINY_LLAMA, ("--scheduling-policy", "priority")),
    "vllm:images": Kind("tiny-llava", _EMBED, sees=True),
    "vllm:eyes": Kind("tiny-llava", place="<image>", sees=True),
    "sglang:cut": Kind(cpu_env.TINY_LLAMA, ("--is-embedding", "--json-model-override-args", _MATRYOSHKA)),
    "sglang:encoder": Kind("tiny-bert-embed", ("--context-length", "512")),
    "sglang:sentiment": Kind("tiny-bert-sentiment", ("--context-length", "512")),
    "sglang:classes": Kind("tiny-llama-classifier"),
    "sglang:rewards": Kind("tiny-qwen2-reward"),
    "sglang:pairs": Kind("tiny-bert-pairs", ("--context-length", "512"), few=True),
    "sglang:reranker": Kind("tiny-qwen3", template=("--chat-template", RERANKER_TEMPLATE)),
    "sglang:labels": Kind(cpu_env.TINY_LLAMA, ("--enable-priority-scheduling",)),
    "sglang:images": Kind(QWEN_VL, ("--is-embedding", "--mm-attention-backend", "sdpa")),
    "sglang:eyes": Kind(QWEN_VL, ("--mm-attention-backend", "sdpa"), place=QWEN_PLACE),
}


def run(name: str, options: list[str]) -> int:
    """Serve one kind, run the suite on it, and return the suite's exit status."""
    kind, engine = KINDS[name], name.partition(":")[0]
    env = cpu_env.vision_env() if kind.sees else {}
    flags = list(kind.flags)
    print(f"== {name}: {kind.model} {' '.join(flags)}", flush=True)
    with tempfile.NamedTemporaryFile("w", suffix=".jinja", encoding="utf-8") as template:
        if kind.template is not None:
            flag, text = kind.template
            template.write(text)
            template.flush()
            flags += [flag, template.name]
        with serving(engine, kind.model, flags, env) as server:
            suite = [executable("reference", "openengine-conformance"), "--target", server.target]
            suite += (
                ["--area", "media", "--image-prompt", kind.place] if kind.place else ["--profile", "tasks"]
            )
            return subprocess.run([*suite, *options], check=False).returncode


def chosen(word: str) -> list[str]:
    """The kinds that a word of the command line names; none for an option of the suite."""
    if word == "few":
        return [name for name, kind in KINDS.items() if kind.few]
    return [name for name in KINDS if word in (name, name.partition(":")[0])]


def main(arguments: list[str]) -> int:
    """Run the kinds that the arguments name, or all."""
    names = [name for word in arguments for name in chosen(word)]
    options = [word for word in arguments if not chosen(word)]
    failed = []
    for name in names or KINDS:
        try:
            if run(name, options):
                failed.append(name)
        except ServerFailed as error:
            print(f"conformance: {error}", file=sys.stderr)
            failed.append(name)
    if failed:
        print(f"conformance: failed on {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
