"""What the running SGLang serves of Embed, Classify and Score, told from its live configuration.

SGLang runs a model either to generate or to pool, and a pooling model has one output: an embedding that it normalises,
or the raw values of the model's head. A generating one scores label tokens by the probability that they come next.
Version-specific like `config`.
"""

from __future__ import annotations

import enum
import json
import logging
import operator
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang.srt.environ import envs

from openengine.v1 import inputs_pb2, tasks_pb2
from openengine_adapters.engine import TaskSupport
from openengine_adapters.sglang.reranking import Reranker, reranker

log = logging.getLogger(__name__)

MAX_LABEL_TOKEN_IDS = 128
"""The most label tokens of one call. SGLang itself has no limit."""

_SEQUENCE = tasks_pb2.TASK_OUTPUT_GRANULARITY_SEQUENCE
_LOGITS = tasks_pb2.TASK_VALUE_SEMANTICS_LOGITS
_PROBABILITIES = tasks_pb2.TASK_VALUE_SEMANTICS_PROBABILITIES
_LOG_PROBABILITIES = tasks_pb2.TASK_VALUE_SEMANTICS_LOG_PROBABILITIES
_MODEL_DEFINED = tasks_pb2.TASK_VALUE_SEMANTICS_MODEL_DEFINED
_RELEVANCE = tasks_pb2.TASK_VALUE_SEMANTICS_RELEVANCE
_NONE = tasks_pb2.SCORE_NORMALIZATION_NONE

_CROSS_ENCODERS = frozenset({"BertForSequenceClassification", "XLMRobertaForSequenceClassification"})
_ENCODERS = _CROSS_ENCODERS | {"BertModel", "Contriever", "XLMRobertaModel"}


class Scoring(enum.Enum):
    """How Score is computed."""

    LABELS = enum.auto()  # the next token's probabilities on a generating model
    PAIRS = enum.auto()  # a cross-encoder reads query and candidate together
    PROMPTS = enum.auto()  # a generating model is asked whether the candidate answers the query
    SIMILARITY = enum.auto()  # the cosine of two embeddings


class Head(enum.Enum):
    """What the values are that SGLang returns for a classifier."""

    SOFTMAX = enum.auto()  # logits of classes that exclude each other
    SIGMOID = enum.auto()  # logits of one class, or of several at once
    PROBABILITIES = enum.auto()  # behind a sigmoid of the model's own
    REWARD = enum.auto()
    OTHER = enum.auto()  # behind something else, or of a regression


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskConfig:
    """The three tasks as they are served, and what serving them needs to know."""

    embed: TaskSupport | None = None
    classify: TaskSupport | None = None
    score: TaskSupport | None = None
    scoring: Scoring | None = None
    reranker: Reranker | None = None
    head: Head = Head.OTHER
    labels: tuple[str, ...] = ()
    dimensions: frozenset[int] = frozenset()  # the only sizes that embeddings can be cut to; empty: any


def reads_both_ways(architectures: Collection[str]) -> bool:
    """Whether each token's vector depends on the ones behind it, so that no part of an input can be reused."""
    return not _ENCODERS.isdisjoint(architectures)


def pools_otherwise(model: Path, architectures: Collection[str]) -> bool:
    """Whether a sentence transformer's files name another token than the one that SGLang takes for the whole input."""
    try:
        wanted = json.loads((model / "1_Pooling" / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    token = "cls_token" if reads_both_ways(architectures) else "lasttoken"
    return not wanted.get(f"pooling_mode_{token}")


def task_config(manager: Any, modalities: Collection[inputs_pb2.Modality.ValueType]) -> TaskConfig:
    """`manager` is SGLang's tokenizer manager; `modalities` is what the model takes beside text."""
    model = manager.model_config
    architectures = frozenset(model.hf_config.architectures or ())
    common: dict[str, Any] = {
        "granularities": (_SEQUENCE,),
        "priority": bool(manager.config_value("enable_priority_scheduling")),
    }
    words = {**common, "input_types": (tasks_pb2.TASK_INPUT_TYPE_TEXT, tasks_pb2.TASK_INPUT_TYPE_TOKEN_IDS)}
    one_text = {**common, "input_types": (tasks_pb2.TASK_INPUT_TYPE_TEXT,)}
    if (asked := reranker(manager)) is not None:
        return TaskConfig(
            score=TaskSupport(**one_text, **_pair_scoring(Head.OTHER), instruction=True),
            scoring=Scoring.PROMPTS,
            reranker=asked,
        )
    if manager.is_generation:
        return TaskConfig(score=TaskSupport(**words, **_LABEL_SCORING), scoring=Scoring.LABELS)
    if _classifies(architectures):
        head = _head(model.hf_config, architectures)
        pairs = not _CROSS_ENCODERS.isdisjoint(architectures) and model.hf_config.num_labels == 1
        return TaskConfig(
            classify=TaskSupport(**words, semantics=_SEMANTICS[head]),
            score=TaskSupport(**one_text, **_pair_scoring(head)) if pairs else None,
            scoring=Scoring.PAIRS if pairs else None,
            head=head,
            labels=_labels(model.hf_config),
        )
    if not _embeds(manager):
        return TaskConfig()
    if pools_otherwise(Path(manager.model_path), architectures):
        log.warning(
            "the model's files ask for another pooling than SGLang's: its embeddings are not the model's own"
        )
    everything = words
    if modalities:
        everything = {
            **words,
            "input_types": (*words["input_types"], tasks_pb2.TASK_INPUT_TYPE_MULTIMODAL),
            "modalities": tuple(sorted(modalities)),
        }
    return TaskConfig(
        embed=TaskSupport(
            **everything,
            encodings=(tasks_pb2.EMBEDDING_ENCODING_DENSE,),
            dimension=model.hidden_size,
            dimension_override=bool(model.is_matryoshka),
        ),
        score=TaskSupport(**everything, **_SIMILARITY),
        scoring=Scoring.SIMILARITY,
        dimensions=frozenset(model.matryoshka_dimensions or ()),
    )


_LABEL_SCORING: dict[str, Any] = {
    "semantics": (_PROBABILITIES, _LOG_PROBABILITIES),
    "normalizations": (_NONE, tasks_pb2.SCORE_NORMALIZATION_SOFTMAX),
    "native_scoring": False,
    "label_token_scoring": True,
    "max_label_token_ids": MAX_LABEL_TOKEN_IDS,
}
_SIMILARITY: dict[str, Any] = {
    "semantics": (tasks_pb2.TASK_VALUE_SEMANTICS_SIMILARITY,),
    "normalizations": (_NONE,),
    "higher_is_better": True,
}
_FROM_LOGITS = (_PROBABILITIES, _LOGITS, _LOG_PROBABILITIES)
_SEMANTICS = {
    Head.SOFTMAX: _FROM_LOGITS,
    Head.SIGMOID: _FROM_LOGITS,
    Head.PROBABILITIES: (_PROBABILITIES, _LOG_PROBABILITIES),
    Head.REWARD: (tasks_pb2.TASK_VALUE_SEMANTICS_REWARD,),
    Head.OTHER: (_MODEL_DEFINED,),
}


def _pair_scoring(head: Head) -> dict[str, Any]:
    return {
        "semantics": (_RELEVANCE, _LOGITS) if head is Head.SIGMOID else (_RELEVANCE,),
        "normalizations": (_NONE,),
        "higher_is_better": True,
    }


def _classifies(architectures: Collection[str]) -> bool:
    kinds = ("ForSequenceClassification", "ForClassification", "RewardModel")
    return any(kind in architecture for architecture in architectures for kind in kinds)


def _embeds(manager: Any) -> bool:
    """Whether the output is one dense vector for an input; some models have heads of another shape."""
    model = manager.model_config
    odd = envs.SGLANG_EMBEDDINGS_SPARSE_HEAD.get() or model.joint_head_config or model.pointer_head
    return not odd and model.embedding_model_spec.task.value == "embed"


def _head(config: Any, architectures: Collection[str]) -> Head:
    if any("RewardModel" in architecture for architecture in architectures):
        return Head.REWARD
    if not _CROSS_ENCODERS.isdisjoint(architectures):
        activation = getattr(config, "sbert_ce_default_activation_function", None) or "Identity"
        name = str(activation).rpartition(".")[2]
        if name != "Identity":
            return Head.PROBABILITIES if name == "Sigmoid" else Head.OTHER
    problem = getattr(config, "problem_type", None)
    if problem == "regression":
        return Head.OTHER
    several = config.num_labels > 1 and problem != "multi_label_classification"
    return Head.SOFTMAX if several else Head.SIGMOID


def _labels(config: Any) -> tuple[str, ...]:
    """The model's label map, in the order of its classes (CLS-03)."""
    names: dict[int, str] = getattr(config, "id2label", None) or {}
    return tuple(name for _, name in sorted(names.items(), key=operator.itemgetter(0)))
