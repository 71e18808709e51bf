"""What the LoRA tests of both engines share: the adapters, PEFT's numbers for them, and ways to spoil them."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from openengine.v1 import generate_pb2, lora_pb2
from tests.support import cpu_env
from tests.support.cpu_env import LORA_ATTENTION, LORA_EVERYWHERE
from tests.support.server import REPOSITORY, executable
from tests.support.wire import PATIENCE_S, Answer, Wire

TOKENS: Final = 8
PROMPTS: Final = (list(range(100, 140)), [7, 8, 9])
LONG: Final = generate_pb2.StoppingOptions(max_tokens=900, ignore_eos=True)

Greedy = list[tuple[int, float]]
"""The best tokens, each with its log-probability."""


@functools.cache
def reference(engine: str) -> dict[str, list[Greedy]]:
    """PEFT's answers by adapter, "" for none, computed once, in another process of the engine's environment."""
    asked = {
        "prompts": PROMPTS,
        "tokens": TOKENS,
        "adapters": {name: str(cpu_env.model(name)) for name in (LORA_ATTENTION, LORA_EVERYWHERE)},
    }
    done = subprocess.run(
        [executable(engine, "python"), "-m", "tests.support.peft_reference"],
        input=json.dumps(asked),
        env={**os.environ, **cpu_env.env(engine)},
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=PATIENCE_S,
    )
    answer: dict[str, list[Greedy]] = json.loads(done.stdout)
    firsts = {tuple(token for token, _ in outputs[0]) for outputs in answer.values()}
    assert len(firsts) == len(answer)  # else the adapters would prove nothing
    return answer


def adapter(number: int, name: str, folder: Path) -> lora_pb2.LoraAdapter:
    return lora_pb2.LoraAdapter(lora_id=number, lora_name=name, source_path=str(folder))


async def load(wire: Wire, one: lora_pb2.LoraAdapter) -> lora_pb2.LoadLoraResponse:
    request = lora_pb2.LoadLoraRequest(adapter=one)
    answer: lora_pb2.LoadLoraResponse = await wire.stub.LoadLora(request, timeout=PATIENCE_S)
    return answer


async def unload(wire: Wire, name: str) -> None:
    await wire.stub.UnloadLora(lora_pb2.UnloadLoraRequest(lora_name=name), timeout=PATIENCE_S)


async def listed(wire: Wire) -> list[str]:
    answer = await wire.stub.ListLoras(lora_pb2.ListLorasRequest())
    return [one.lora_name for one in answer.adapters]


async def greedy(wire: Wire, name: str, prompt: list[int]) -> Answer:
    """The best tokens with the adapter of this name, "" for none."""
    return await wire.generate(
        prompt,
        lora_name=name,
        stopping=generate_pb2.StoppingOptions(max_tokens=TOKENS, ignore_eos=True),
        response=generate_pb2.ResponseOptions(return_output_logprobs=True),
    )


def same(answer: Answer, expected: Greedy) -> None:
    """The answer's tokens and log-probabilities are PEFT's."""
    assert answer.first.ids == [token for token, _ in expected]
    logprobs = [token.logprob for token in answer.first.tokens]
    assert logprobs == pytest.approx([logprob for _, logprob in expected], abs=2e-3)


def settings(folder: Path, **changes: Any) -> None:
    """Change adapter_config.json."""
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def weights(folder: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Change the weights, by their names."""
    from safetensors.torch import load_file, save_file

    file = folder / "adapter_model.safetensors"
    save_file({name: weight.clone() for name, weight in change(load_file(file)).items()}, file)


def pickled(folder: Path, change: Callable[[Any], Any] = lambda weight: weight) -> None:
    """Write the weights as older versions of PEFT did."""
    import torch
    from safetensors.torch import load_file

    file = folder / "adapter_model.safetensors"
    torch.save(
        {name: change(weight) for name, weight in load_file(file).items()}, folder / "adapter_model.bin"
    )
    file.unlink()


def narrow(folder: Path) -> None:
    """An adapter for a model of half the width; vLLM would fill it up with zeros."""
    weights(folder, lambda all_: {n: w[:, : w.shape[1] // 2] if "_A." in n else w for n, w in all_.items()})


def wide(folder: Path) -> None:
    weights(folder, lambda all_: {n: w.repeat(1, 2) if "_A." in n else w for n, w in all_.items()})


def higher_rank_than_said(folder: Path) -> None:
    def double(all_: dict[str, Any]) -> dict[str, Any]:
        return {name: weight.repeat(*((4, 1) if "_A." in name else (1, 4))) for name, weight in all_.items()}

    weights(folder, double)


def deeper(folder: Path) -> None:
    """An adapter for a model with more layers; vLLM would leave the rest out in silence."""
    weights(folder, lambda all_: {**all_, **{n.replace(".1.", ".2."): w for n, w in all_.items()}})


def one_sided(folder: Path) -> None:
    weights(folder, lambda all_: {name: weight for name, weight in all_.items() if "lora_A" in name})


def foreign(folder: Path) -> None:
    weights(folder, lambda all_: {n.replace("q_proj", "c_attn"): w for n, w in all_.items()})


def truncated(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def no_adapter(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


MISFITS: Final[dict[str, Callable[[Path], object]]] = {
    "no config": lambda folder: (folder / "adapter_config.json").unlink(),
    "no weights": lambda folder: (folder / "adapter_model.safetensors").unlink(),
    "empty folder": no_adapter,
    "config is no JSON": lambda folder: (folder / "adapter_config.json").write_text("{"),
    "config is a list": lambda folder: (folder / "adapter_config.json").write_text("[]"),
    "another method": lambda folder: settings(folder, peft_type="PREFIX_TUNING"),
    "rank above the limit": lambda folder: settings(folder, r=64),
    "rank is a word": lambda folder: settings(folder, r="four"),
    "rank zero": lambda folder: settings(folder, r=0),
    "not what the engine serves": lambda folder: settings(folder, use_dora=True),
    "weights are garbage": lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"x" * 999),
    "weights are cut off": truncated,
    "weights are none": lambda folder: weights(folder, lambda _: {}),
    "too narrow": narrow,
    "too wide": wide,
    "higher rank than said": higher_rank_than_said,
    "too deep": deeper,
    "half of the weights": one_sided,
    "unknown layers": foreign,
}
"""Each makes of a copy of an adapter one that no engine can take."""
