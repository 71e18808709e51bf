"""PEFT's own greedy continuations of the tiny Llama, as a process of its own: JSON in, JSON out.

In: `{"prompts": [[id, ...]], "tokens": 8, "adapters": {name: directory}}`. Out: for each name, and for "" without
an adapter, the list over the prompts of `[[id, logprob], ...]`. All in float32.
"""

from __future__ import annotations

import json
import sys

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.support import cpu_env


def greedy(model: PreTrainedModel, prompt: list[int], tokens: int) -> list[tuple[int, float]]:
    """The best token at each step with its log-probability."""
    ids, found = list(prompt), []
    for _ in range(tokens):
        logprobs = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
        best = int(logprobs.argmax())
        found.append((best, float(logprobs[best])))
        ids.append(best)
    return found


@torch.inference_mode()  # type: ignore[untyped-decorator]  # torch is untyped here
def main() -> None:
    """Answer the request on standard input."""
    asked = json.load(sys.stdin)
    answer = {}
    for name, folder in {"": "", **asked["adapters"]}.items():
        base = AutoModelForCausalLM.from_pretrained(cpu_env.model(cpu_env.TINY_LLAMA), dtype=torch.float32)
        model = PeftModel.from_pretrained(base, folder) if folder else base
        answer[name] = [greedy(model.eval(), prompt, asked["tokens"]) for prompt in asked["prompts"]]
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
