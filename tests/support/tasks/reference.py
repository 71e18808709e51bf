"""Independent answers: Hugging Face models in float32, in a process of their own.

    python reference.py JOBS.json ANSWERS.json

A job names a kind, a model folder and its inputs; an answer is plain lists. Nothing of ours, and nothing of vLLM,
is imported.
"""

from __future__ import annotations

import base64
import io
import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.nn import functional
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

Answer = Any


def embed(model: str, texts: list[str], pooling: str) -> Answer:
    """The vectors of every token and the pooled one, not normalised."""
    tokenizer, network = AutoTokenizer.from_pretrained(model), _load(AutoModel, model)
    answers = []
    for text in texts:
        encoded = tokenizer(text, return_tensors="pt")
        hidden = network(**encoded).last_hidden_state[0]
        pooled = {"mean": hidden.mean(0), "cls": hidden[0], "last": hidden[-1]}[pooling]
        ids = encoded["input_ids"][0].tolist()
        answers.append({"ids": ids, "tokens": hidden.tolist(), "pooled": pooled.tolist()})
    return answers


def adapt(model: str, adapter: str, texts: list[str]) -> Answer:
    """The last token's vector with a LoRA adapter, not normalised."""
    from peft import PeftModel

    tokenizer = AutoTokenizer.from_pretrained(model)
    network = PeftModel.from_pretrained(_load(AutoModelForCausalLM, model), adapter).eval()
    answers = []
    for text in texts:
        states = network(**tokenizer(text, return_tensors="pt"), output_hidden_states=True).hidden_states
        answers.append(states[-1][0, -1].tolist())
    return answers


def classify(model: str, texts: list[str]) -> Answer:
    """The logits of a sequence classifier."""
    tokenizer, network = (
        AutoTokenizer.from_pretrained(model),
        _load(AutoModelForSequenceClassification, model),
    )
    return [network(**tokenizer(text, return_tensors="pt")).logits[0].tolist() for text in texts]


def reward(model: str, texts: list[str]) -> Answer:
    """The reward of every token, by two layers on the states of the language model."""
    tokenizer, network = AutoTokenizer.from_pretrained(model), _load(AutoModel, model)
    weights = load_file(Path(model) / "model.safetensors")
    first, second = ((weights[f"score.{n}.weight"], weights[f"score.{n}.bias"]) for n in (0, 2))
    answers = []
    for text in texts:
        states = network(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
        values = functional.linear(functional.linear(states, *first).relu(), *second)
        answers.append(values[:, 0].tolist())
    return answers


def pairs(model: str, pairs: list[list[str]]) -> Answer:
    """The logit of a cross-encoder for each pair."""
    tokenizer, network = (
        AutoTokenizer.from_pretrained(model),
        _load(AutoModelForSequenceClassification, model),
    )
    return [
        network(**tokenizer(query, text, return_tensors="pt")).logits[0].tolist() for query, text in pairs
    ]


def tokens(model: str, texts: list[str]) -> Answer:
    """The logits of a token classifier, for every token."""
    tokenizer, network = AutoTokenizer.from_pretrained(model), _load(AutoModelForTokenClassification, model)
    return [network(**tokenizer(text, return_tensors="pt")).logits[0].tolist() for text in texts]


def next_token(model: str, prompts: list[list[str]], labels: list[int]) -> Answer:
    """The log-probabilities of `labels` after each prompt, whose parts are tokenised one by one."""
    tokenizer, network = AutoTokenizer.from_pretrained(model), _load(AutoModelForCausalLM, model)
    answers = []
    for parts in prompts:
        ids = [id_ for part in parts for id_ in tokenizer(part)["input_ids"]]
        logits = network(torch.tensor([ids])).logits[0, -1]
        answers.append(torch.log_softmax(logits, -1)[labels].tolist())
    return answers


def rerank(model: str, prompts: list[str]) -> Answer:
    """How much more likely "yes" is than "no" after each prompt, as a difference of logits."""
    tokenizer, network = AutoTokenizer.from_pretrained(model), _load(AutoModelForCausalLM, model)
    no, yes = (tokenizer.convert_tokens_to_ids(word) for word in ("no", "yes"))
    answers = []
    for prompt in prompts:
        logits = network(**tokenizer(prompt, return_tensors="pt")).logits[0, -1]
        answers.append(float(logits[yes] - logits[no]))
    return answers


def see(model: str, prompt: str, images: list[str], count: int) -> Answer:
    """Greedy ids after a prompt with one image each, their log-probabilities, the last hidden state, the prompt."""
    from PIL import Image

    network, processor = _seeing(model)
    answers = []
    for image in images:
        picture = Image.open(io.BytesIO(base64.b64decode(image))).convert("RGB")
        inputs = processor(images=picture, text=prompt, return_tensors="pt")
        embedding = network.model(**inputs).last_hidden_state[0, -1]
        length = inputs["input_ids"].shape[1]
        ids: list[int] = []
        logprobs = []
        for _ in range(count):
            scores = torch.log_softmax(network(**inputs, use_cache=False).logits[0, -1], -1)
            ids.append(int(scores.argmax()))
            logprobs.append(float(scores.max()))
            for name, value in (("input_ids", ids[-1]), ("attention_mask", 1), ("mm_token_type_ids", 0)):
                if name in inputs:
                    inputs[name] = torch.cat([inputs[name], torch.tensor([[value]])], 1)
        answers.append(
            {
                "prompt": processor.tokenizer(prompt)["input_ids"],
                "length": length,
                "ids": ids,
                "logprobs": logprobs,
                "embedding": embedding.tolist(),
            }
        )
    return answers


def _seeing(model: str) -> tuple[Any, Any]:
    """A model that takes images, with what prepares them."""
    import transformers

    kind = transformers.AutoConfig.from_pretrained(model).model_type
    if kind != "llava":
        network = _load(transformers.AutoModelForImageTextToText, model)
        return network, transformers.AutoProcessor.from_pretrained(model)
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    processor = transformers.LlavaProcessor(
        image_processor=CLIPImageProcessorPil.from_pretrained(model),
        tokenizer=AutoTokenizer.from_pretrained(model),
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    return _load(transformers.LlavaForConditionalGeneration, model), processor


def _load(kind: Any, model: str) -> Any:
    return kind.from_pretrained(model, dtype=torch.float32).eval()


KINDS = {
    job.__name__: job for job in (embed, adapt, classify, reward, pairs, tokens, next_token, rerank, see)
}


def main(jobs: Path, answers: Path) -> None:
    """Answer every job of a file."""
    with torch.no_grad():
        done = {
            name: KINDS[job.pop("kind")](**job)
            for name, job in json.loads(jobs.read_text(encoding="utf-8")).items()
        }
    answers.write_text(json.dumps(done), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
