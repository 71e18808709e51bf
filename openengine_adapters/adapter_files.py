"""A LoRA adapter's own files, checked against the model before an engine sees them (LORA-08).

Engines look at names and at the configured rank at most. Weights of another shape they cut or fill up in silence, or
they fail in the middle of a step, which ends them. What an engine makes of the settings in adapter_config.json is for
its adapter to say.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
import transformers
from transformers.pytorch_utils import Conv1D

from openengine_adapters.core.errors import Rejected, invalid

log = logging.getLogger(__name__)

Shape = tuple[int, ...]
Shapes = Mapping[str, tuple[int, int]]
"""Inputs and outputs of each layer that an adapter may change, by its bare name."""

_WEIGHT = re.compile(
    r"(?:base_model\.model\.)?(?P<layer>.+)\.lora_(?:embedding_)?(?P<side>[AB])(?:\.weight)?"
)
_WRAPPER = re.compile(r"(?:(?:model|language_model|transformer|thinker)\.)*")
_PICKLES = ("adapter_model.bin", "adapter_model.pt")


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """What an adapter's directory holds.

    `layers` has the shapes of `A` and `B` of each layer, `others` the names of weights that belong to no layer's pair.
    """

    config: Mapping[str, Any]
    layers: Mapping[str, Mapping[str, Shape]]
    others: tuple[str, ...]


def layer_shapes(config: Any) -> Shapes | None:
    """The layers of the model of a Hugging Face configuration; None when transformers does not know it.

    The model is built without memory for its weights, so neither quantisation nor parallelism changes a shape.
    """
    architecture = next(iter(config.architectures or ()), "")
    try:
        with torch.device("meta"):
            model = getattr(transformers, architecture)(config)
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


def read(folder: Path) -> AdapterFiles:
    """Read an adapter's directory; no weight itself is read. Raises `Rejected` when it holds none."""
    config = _config(folder)
    layers: dict[str, dict[str, Shape]] = {}
    others = []
    for name, shape in _weights(folder).items():
        if match := _WEIGHT.fullmatch(name):
            layers.setdefault(match["layer"], {})[match["side"]] = shape
        else:
            others.append(name)
    if not layers:
        raise misfit("its weights file holds no LoRA weights")
    return AdapterFiles(config, layers, tuple(others))


def check_layers(files: AdapterFiles, rank_of: Callable[[str], int], shapes: Shapes | None) -> None:
    """Raise `Rejected` unless every layer has a pair of the rank that its settings say, and of the model's shape."""
    for layer, sides in files.layers.items():
        # Experts are fused or not as the versions of three libraries please; the engine knows.
        if ".experts" not in layer:
            _check_layer(layer, sides, rank_of(layer), shapes)


def _check_layer(layer: str, sides: Mapping[str, Shape], rank: int, shapes: Shapes | None) -> None:
    if sides.keys() != {"A", "B"} or any(len(shape) != 2 for shape in sides.values()):
        raise misfit(f"{layer} needs two matrices, lora_A and lora_B")
    (rank_a, inputs), (outputs, rank_b) = sides["A"], sides["B"]
    if not rank_a == rank_b == rank:
        raise misfit(f"{layer} has weights of rank {rank_a} and {rank_b}, adapter_config.json says {rank}")
    if shapes is None:
        return
    expected = shapes.get(_bare(layer))
    if expected is None:
        raise misfit(f"the model has no layer {layer}")
    if expected != (inputs, outputs):
        raise misfit(
            f"{layer} has {inputs} inputs and {outputs} outputs, the model's has {expected[0]} and {expected[1]}"
        )


def misfit(reason: str) -> Rejected:
    """The refusal of an adapter's directory."""
    return invalid("adapter.source_path", reason)


def unusable_config(error: BaseException) -> Rejected:
    """The refusal of what a reader of adapter_config.json raised; readers fail in any way."""
    return misfit(f"its adapter_config.json is not usable: {_short(error)}")


def _config(folder: Path) -> dict[str, Any]:
    file = folder / "adapter_config.json"
    if not file.is_file():
        raise misfit("has no adapter_config.json")
    try:
        found: Any = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(found, dict) or found.get("peft_type") != "LORA":
            raise ValueError('adapter_config.json must be an object of "peft_type": "LORA"')
    except (OSError, ValueError, RecursionError) as error:
        raise unusable_config(error) from error
    return found


def _weights(folder: Path) -> dict[str, Shape]:
    """Names and shapes."""
    file = folder / "adapter_model.safetensors"
    pickles = [folder / name for name in _PICKLES]
    try:
        if file.is_file():
            with safetensors.safe_open(file, framework="pt") as opened:
                return {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
        for pickle in filter(Path.is_file, pickles):
            loaded = torch.load(pickle, map_location="meta", weights_only=True)
            return {name: tuple(weight.shape) for name, weight in loaded.items()}
    except Exception as error:  # a file can hold anything
        raise misfit(f"its weights file cannot be read: {_short(error)}") from error
    raise misfit(f"has no weights file, none of {file.name}, {', '.join(_PICKLES)}")


def _bare(name: str) -> str:
    """A layer's name without its wrappers, which change with the version that an adapter was trained with."""
    return name[_WRAPPER.match(name).end() :]  # type: ignore[union-attr]  # matches the empty string at least


def _short(error: BaseException) -> str:
    text = (
        (error.strerror if isinstance(error, OSError) else "") or str(error).strip() or type(error).__name__
    )
    return text.splitlines()[0][:200]
