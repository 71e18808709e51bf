# SPDX-License-Identifier: Apache-2.0
"""Run the conformance suite against a vLLM server of each kind that serves tasks, one after the other.

python scripts/setup/conformance_tasks.py                   # every kind
python scripts/setup/conformance_tasks.py reranker -v       # one of them; the rest goes to the suite
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.setup.build_task_models import MINILM
from tests.support import cpu_env
from tests.support.server import REPOSITORY, ServerFailed, executable, serving
from tests.vllm.tasks.cases import SCORE_TEMPLATE

_POOLING: Final = ("--runner", "pooling")
_RERANKER: Final = {
    "architectures": ["Qwen3ForSequenceClassification"],
    "classifier_from_token": ["no", "yes"],
    "is_original_qwen3_reranker": True,
}


@dataclass(frozen=True, slots=True)
class Kind:
    """One server: a model of ours, flags of its own, and whether it needs torchvision."""

    model: str
    flags: tuple[str, ...] = ()
    sees: bool = False


KINDS: Final = {
    "sentences": Kind(MINILM, ("--max-model-len", "256")),
    "cut": Kind(
        cpu_env.TINY_LLAMA, (*_POOLING, "--convert", "embed", "--hf-overrides", '{"is_matryoshka": true}')
    ),
    "sentiment": Kind("tiny-bert-sentiment", ("--max-model-len", "512")),
    "entities": Kind("tiny-bert-entities", ("--max-model-len", "512")),
    "pairs": Kind("tiny-bert-pairs", ("--max-model-len", "512")),
    "reranker": Kind("tiny-qwen3", (*_POOLING, "--hf-overrides", json.dumps(_RERANKER))),
    "labels": Kind(cpu_env.TINY_LLAMA, ("--scheduling-policy", "priority")),
    "images": Kind("tiny-llava", (*_POOLING, "--convert", "embed"), sees=True),
}


def run(name: str, options: list[str]) -> int:
    """Serve one kind, run the suite on it, and return the suite's exit status."""
    kind = KINDS[name]
    env: dict[str, str] = {}
    if kind.sees:
        vision = REPOSITORY / ".venv" / "vllm" / "vision"
        env["PYTHONPATH"] = os.pathsep.join([str(cpu_env.SGLANG_STAND_INS), str(vision)])
    flags = list(kind.flags)
    print(f"== {name}: {kind.model} {' '.join(flags)}", flush=True)
    with tempfile.NamedTemporaryFile("w", suffix=".jinja", encoding="utf-8") as template:
        if name == "reranker":
            template.write(SCORE_TEMPLATE)
            template.flush()
            flags += ["--score-template", template.name]
        with serving("vllm", kind.model, flags, env) as server:
            suite = [executable("reference", "openengine-conformance"), "--target", server.target]
            return subprocess.run([*suite, "--profile", "tasks", *options], check=False).returncode


def main(arguments: list[str]) -> int:
    """Run the kinds that the arguments begin with, or all."""
    names = [name for name in arguments if name in KINDS]
    options = [argument for argument in arguments if argument not in KINDS]
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
