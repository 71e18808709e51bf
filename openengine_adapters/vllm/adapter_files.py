"""A LoRA adapter's own files, checked against the model before vLLM sees them (LORA-08).

vLLM looks at names and at the configured rank only. Weights of another shape it cuts or fills up in silence, or it
fails in the middle of a step, which ends the engine.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import torch
import transformers
from transformers.pytorch_utils import Conv1D
from vllm.config import ModelConfig
from vllm.config.lora import LoRAConfig
from vllm.lora.peft_helper import PEFTHelper

from openengine_adapters.core.errors import Rejected, invalid

log = logging.getLogger(__name__)

Shapes = Mapping[str, tuple[int, int]]
"""Inputs and outputs of each layer that an adapter may change, by its bare name."""

_WEIGHT = re.compile(
    r"(?:base_model\.model\.)?(?P<layer>.+)\.lora_(?:embedding_)?(?P<side>[AB])(?:\.weight)?"
)
_WRAPPER = re.compile(r"(?:(?:model|language_model|transformer|thinker)\.)*")
_PICKLES = ("adapter_model.bin", "adapter_model.pt")


def layer_shapes(config: ModelConfig) -> Shapes | None:
    """The model's layers, from its architecture alone; None when transformers does not know that.

    The model is built without memory for its weights, so neither quantisation nor parallelism changes a shape.
    """
    architecture = next(iter(config.hf_config.architectures or ()), "")
    try:
        with torch.device("meta"):
            model = getattr(transformers, architecture)(config.hf_config)
    except Exception as error:
        log.warning("the shapes of %r are unknown, adapters are checked less: %s", architecture, error)
        return None
    shapes: dict[str, tuple[int, int]] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear):
            shapes[_bare(name)] = (layer.in_features, layer.out_features)
        elif isinstance(layer, torch.nn.Embedding):
            shapes[_bare(name)] = (layer.num_embeddings, layer.embedding_dim)
        elif isinstance(layer, Conv1D):
            shapes[_bare(name)] = (layer.nx, layer.nf)
    return shapes


def check(folder: Path, shapes: Shapes | None, limits: LoRAConfig) -> None:
    """Raise `Rejected` unless the directory holds an adapter that fits."""
    settings = _settings(folder, limits)
    layers: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in _weights(folder).items():
        # What is no low-rank weight, such as a saved head, vLLM takes or refuses by itself.
        if match := _WEIGHT.fullmatch(name):
            layers.setdefault(match["layer"], {})[match["side"]] = shape
    if not layers:
        raise _misfit("its weights file holds no LoRA weights")
    for layer, sides in layers.items():
        if ".experts" in layer:
            continue  # fused or not as the versions of three libraries please; vLLM knows
        _check_layer(layer, sides, settings.get_rank_and_scaling(layer)[0], shapes)


def _check_layer(layer: str, sides: Mapping[str, tuple[int, ...]], rank: int, shapes: Shapes | None) -> None:
    if sides.keys() != {"A", "B"} or any(len(shape) != 2 for shape in sides.values()):
        raise _misfit(f"{layer} needs two matrices, lora_A and lora_B")
    (rank_a, inputs), (outputs, rank_b) = sides["A"], sides["B"]
    if not rank_a == rank_b == rank:
        raise _misfit(f"{layer} has weights of rank {rank_a} and {rank_b}, adapter_config.json says {rank}")
    if shapes is None:
        return
    expected = shapes.get(_bare(layer))
    if expected is None:
        raise _misfit(f"the model has no layer {layer}")
    if expected != (inputs, outputs):
        raise _misfit(
            f"{layer} has {inputs} inputs and {outputs} outputs, the model's has {expected[0]} and {expected[1]}"
        )


def _settings(folder: Path, limits: LoRAConfig) -> PEFTHelper:
    file = folder / "adapter_config.json"
    if not file.is_file():
        raise _misfit("has no adapter_config.json")
    try:
        found: Any = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(found, dict) or found.get("peft_type") != "LORA":
            raise ValueError('adapter_config.json must be an object of "peft_type": "LORA"')
        settings = PEFTHelper.from_dict(found)
        settings.validate_legal(limits)
    except Exception as error:  # a file can hold anything, and readers fail in any way
        raise _misfit(f"its adapter_config.json is not usable: {_short(error)}") from error
    return settings


def _weights(folder: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes, without reading the weights themselves."""
    file = folder / "adapter_model.safetensors"
    pickles = [folder / name for name in _PICKLES]
    try:
        if file.is_file():
            with safetensors.safe_open(file, framework="pt") as opened:
                return {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
        for pickle in filter(Path.is_file, pickles):
            loaded = torch.load(pickle, map_location="meta", weights_only=True)
            return {name: tuple(weight.shape) for name, weight in loaded.items()}
    except Exception as error:  # as above
        raise _misfit(f"its weights file cannot be read: {_short(error)}") from error
    raise _misfit(f"has no weights file, none of {file.name}, {', '.join(_PICKLES)}")


def _bare(name: str) -> str:
    """A layer's name without its wrappers, which change with the version that an adapter was trained with."""
    return name[_WRAPPER.match(name).end() :]  # type: ignore[union-attr]  # matches the empty string at least


def _misfit(reason: str) -> Rejected:
    return invalid("adapter.source_path", reason)


def _short(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
