"""LoRA adapters: a real adapter directory whose weights become a bias on the logits."""

from __future__ import annotations

import hashlib
import json
import pathlib
import struct
from dataclasses import dataclass

from openengine_adapters.core.errors import invalid
from openengine_adapters.engine import Lora
from openengine_adapters.reference.model import lora_bias

MAX_RANK = 256
MAX_BYTES = 64 * 1024 * 1024

_FIELD = "adapter.source_path"


@dataclass(frozen=True, slots=True)
class LoadedLora:
    """An adapter in the engine. `digest` tells its weights from any others loaded under the same name."""

    digest: bytes
    bias: list[float]


def read_adapter(lora: Lora) -> LoadedLora:
    """Read an adapter's directory. Raises `Rejected` when it holds no valid adapter (LORA-08)."""
    folder = pathlib.Path(lora.path)
    config = _config(folder / "adapter_config.json")
    weights = _weights(folder)
    digest = hashlib.blake2b(
        json.dumps(config, sort_keys=True).encode() + b"\0" + weights, digest_size=16
    ).digest()
    return LoadedLora(digest, lora_bias(weights))


def _config(path: pathlib.Path) -> dict[str, object]:
    try:
        config = json.loads(path.read_text())
    except OSError:
        raise invalid(_FIELD, "holds no readable adapter_config.json") from None
    except ValueError as error:
        raise invalid(_FIELD, f"adapter_config.json is not JSON: {error}") from None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise invalid(_FIELD, 'adapter_config.json must be an object of "peft_type": "LORA"')
    rank = config.get("r")
    if not isinstance(rank, int) or not 1 <= rank <= MAX_RANK:
        raise invalid(_FIELD, f"adapter_config.json has rank {rank!r}; it must be 1 to {MAX_RANK}")
    return config


def _weights(folder: pathlib.Path) -> bytes:
    for name, check in (("adapter_model.safetensors", _is_safetensors), ("adapter_model.bin", bool)):
        path = folder / name
        if not path.is_file():
            continue
        try:
            if path.stat().st_size > MAX_BYTES:
                raise invalid(_FIELD, f"{name} is larger than {MAX_BYTES} bytes", limit=MAX_BYTES)
            weights = path.read_bytes()
        except OSError:
            raise invalid(_FIELD, f"{name} cannot be read") from None
        if not check(weights):
            raise invalid(_FIELD, f"{name} is damaged")
        return weights
    raise invalid(_FIELD, "holds no adapter_model.safetensors or adapter_model.bin")


def _is_safetensors(data: bytes) -> bool:
    """Whether the header is whole and its tensors lie within the file."""
    if len(data) < 8:
        return False
    (length,) = struct.unpack_from("<Q", data)
    try:
        header = json.loads(data[8 : 8 + length])
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        return False
    return 8 + length <= len(data) and bool(ends) and 8 + length + max(ends) <= len(data)
