# SPDX-License-Identifier: Apache-2.0
"""Build two LoRA adapters for the tiny Llama, written by PEFT itself, into the models' cache folder.

They are random but reproducible, strong enough that every greedy output differs, and unlike each other in rank,
scaling and target modules. Tests of an adapter that does not fit spoil copies of them.

    python scripts/setup/build_lora_adapters.py
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.setup import build_models
from tests.support.cpu_env import LORA_ATTENTION, LORA_EVERYWHERE, TINY_LLAMA, models_dir

_TARGETS: Final = {
    LORA_ATTENTION: (4, 8, 1.0, ["q_proj", "v_proj"]),
    LORA_EVERYWHERE: (
        8,
        4,
        0.3,
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    ),
}


def _build(name: str, folder: Path) -> None:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    rank, alpha, strength, targets = _TARGETS[name]
    base = AutoModelForCausalLM.from_pretrained(build_models.build(TINY_LLAMA), dtype=torch.float32)
    torch.manual_seed(rank)
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets, task_type="CAUSAL_LM")
    adapted = get_peft_model(base, config)
    for key, weight in adapted.named_parameters():
        if "lora_B" in key:  # PEFT starts with zeros, which change nothing
            torch.nn.init.normal_(weight, std=strength)
    adapted.save_pretrained(folder)
    # A card with advice for a model hub, and where the base model lay on this machine, are nobody's business.
    (folder / "README.md").unlink()
    settings = folder / "adapter_config.json"
    settings.write_text(settings.read_text().replace(str(models_dir() / TINY_LLAMA), TINY_LLAMA))


build_models.BUILDERS.update({name: functools.partial(_build, name) for name in _TARGETS})

if __name__ == "__main__":
    raise SystemExit(build_models.main())
