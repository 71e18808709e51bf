"""What the running vLLM serves of Embed, Classify and Score, told from its live configuration.

vLLM runs a model either to generate or to pool. A generating one scores label tokens by the probability that they
come next; a pooling one does what its head can do. Version-specific like `config`.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from vllm.config import ModelConfig, VllmConfig
from vllm.model_executor.layers.pooler.activations import (
    PoolerClassify,
    PoolerMultiLabelClassify,
    get_act_fn,
)

from openengine.v1 import inputs_pb2, tasks_pb2
from openengine_adapters.engine import TaskSupport

MAX_LOGPROB_TOKEN_IDS = 128
"""`MAX_LOGPROB_TOKEN_IDS` of vLLM's sampling_params."""

_SEQUENCE = tasks_pb2.TASK_OUTPUT_GRANULARITY_SEQUENCE
_TOKEN = tasks_pb2.TASK_OUTPUT_GRANULARITY_TOKEN
_LOGITS = tasks_pb2.TASK_VALUE_SEMANTICS_LOGITS
_PROBABILITIES = tasks_pb2.TASK_VALUE_SEMANTICS_PROBABILITIES
_LOG_PROBABILITIES = tasks_pb2.TASK_VALUE_SEMANTICS_LOG_PROBABILITIES
_REWARD = tasks_pb2.TASK_VALUE_SEMANTICS_REWARD
_MODEL_DEFINED = tasks_pb2.TASK_VALUE_SEMANTICS_MODEL_DEFINED
_NONE = tasks_pb2.SCORE_NORMALIZATION_NONE


class Scoring(enum.Enum):
    """How Score is computed."""

    LABELS = enum.auto()  # the next token's probabilities on a generating model
    PAIRS = enum.auto()  # a cross-encoder reads query and candidate together
    SIMILARITY = enum.auto()  # the cosine of two embeddings


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskConfig:
    """The three tasks as they are served, and what serving them needs to know."""

    embed: TaskSupport | None = None
    classify: TaskSupport | None = None
    score: TaskSupport | None = None
    scoring: Scoring | None = None
    labels: tuple[str, ...] = ()
    dimensions: frozenset[int] = frozenset()  # the only sizes that embeddings can be cut to; empty: any
    rewards: bool = False  # the head gives each token a reward, and the last token's is the sequence's


def task_config(
    config: VllmConfig,
    tasks: Collection[str],
    modalities: Collection[inputs_pb2.Modality.ValueType],
    *,
    text: bool,
    score_template: str = "",
) -> TaskConfig:
    """`tasks` are vLLM's own names for what the model's pooler does; `text` says that there is a tokenizer."""
    model = config.model_config
    common: dict[str, Any] = {
        "priority": config.scheduler_config.policy == "priority",
        "lora": config.lora_config is not None,
    }
    inputs = [tasks_pb2.TASK_INPUT_TYPE_TOKEN_IDS]
    if text:
        inputs.insert(0, tasks_pb2.TASK_INPUT_TYPE_TEXT)
    words = {**common, "input_types": tuple(inputs)}
    if modalities and text:
        inputs.append(tasks_pb2.TASK_INPUT_TYPE_MULTIMODAL)
    everything = {**common, "input_types": tuple(inputs)}
    if modalities and text:
        everything["modalities"] = tuple(sorted(modalities))

    scoring = _scoring(config, tasks, text=text)
    score = None
    if scoring is Scoring.LABELS:
        score = TaskSupport(**words, **_LABEL_SCORING)
    elif scoring is Scoring.PAIRS:
        pair = {**common, "input_types": (tasks_pb2.TASK_INPUT_TYPE_TEXT,)}
        score = TaskSupport(**pair, **_PAIR_SCORING, instruction="instruction" in score_template)
    elif scoring is Scoring.SIMILARITY:
        score = TaskSupport(**everything, **_SIMILARITY)
    dimensions = getattr(model, "matryoshka_dimensions", None) or ()
    return TaskConfig(
        embed=_embed(model, tasks, everything),
        classify=_classify(model, tasks, everything),
        score=score,
        scoring=scoring,
        labels=_labels(model),
        dimensions=frozenset(dimensions),
        rewards=_rewards(model),
    )


_LABEL_SCORING: dict[str, Any] = {
    "granularities": (_SEQUENCE,),
    "semantics": (_PROBABILITIES, _LOG_PROBABILITIES),
    "normalizations": (_NONE, tasks_pb2.SCORE_NORMALIZATION_SOFTMAX),
    "native_scoring": False,
    "label_token_scoring": True,
    "max_label_token_ids": MAX_LOGPROB_TOKEN_IDS,
}
_PAIR_SCORING: dict[str, Any] = {
    "granularities": (_SEQUENCE,),
    "semantics": (tasks_pb2.TASK_VALUE_SEMANTICS_RELEVANCE, _LOGITS),
    "normalizations": (_NONE,),
    "higher_is_better": True,
}
_SIMILARITY: dict[str, Any] = {
    "granularities": (_SEQUENCE,),
    "semantics": (tasks_pb2.TASK_VALUE_SEMANTICS_SIMILARITY,),
    "normalizations": (_NONE,),
    "higher_is_better": True,
}


def _embed(model: ModelConfig, tasks: Collection[str], common: dict[str, Any]) -> TaskSupport | None:
    granularities = _granularities(tasks, "embed", "token_embed")
    if not granularities:
        return None
    return TaskSupport(
        **common,
        granularities=granularities,
        encodings=(tasks_pb2.EMBEDDING_ENCODING_DENSE,),
        dimension=model.pooler_config.dimensions or model.embedding_size,
        normalization=True,
        dimension_override=bool(model.is_matryoshka),
    )


def _classify(model: ModelConfig, tasks: Collection[str], common: dict[str, Any]) -> TaskSupport | None:
    granularities = _granularities(tasks, "classify", "token_classify")
    if not granularities:
        return None
    if _rewards(model):
        return TaskSupport(**common, granularities=(_SEQUENCE, _TOKEN), semantics=(_REWARD,))
    return TaskSupport(**common, granularities=granularities, semantics=_semantics(model))


def _rewards(model: ModelConfig) -> bool:
    """Whether it is a reward model of one value; a process reward model tells two classes of steps apart."""
    return any(name.endswith("ForRewardModel") for name in model.architectures)


def _granularities(
    tasks: Collection[str], sequence: str, token: str
) -> tuple[tasks_pb2.TaskOutputGranularity.ValueType, ...]:
    named = ((sequence, _SEQUENCE), (token, _TOKEN))
    return tuple(granularity for name, granularity in named if name in tasks)


def _semantics(model: ModelConfig) -> tuple[tasks_pb2.TaskValueSemantics.ValueType, ...]:
    """What the values of the model's head mean, its default first.

    With its activation a head gives probabilities when that is a softmax or a sigmoid; without, it gives logits.
    """
    found: tuple[tasks_pb2.TaskValueSemantics.ValueType, ...] = (_MODEL_DEFINED, _LOGITS)
    if isinstance(get_act_fn(model.hf_config), (PoolerClassify, PoolerMultiLabelClassify)):
        found = (_PROBABILITIES, _LOGITS, _LOG_PROBABILITIES)
    if model.pooler_config.use_activation is False:
        return tuple(sorted(found, key=lambda one: one != _LOGITS))
    return found


def is_softmax(model: ModelConfig) -> bool:
    """Whether the classes exclude each other; a single class, or several at once, have a sigmoid each."""
    activation = get_act_fn(model.hf_config)
    return isinstance(activation, PoolerClassify) and getattr(model.hf_config, "num_labels", 0) > 1


def _labels(model: ModelConfig) -> tuple[str, ...]:
    """The model's label map, in the order of its classes (CLS-03)."""
    names: dict[int, str] = getattr(model.hf_config, "id2label", None) or {}
    return tuple(name for _, name in sorted(names.items(), key=operator.itemgetter(0)))


def _scoring(config: VllmConfig, tasks: Collection[str], *, text: bool) -> Scoring | None:
    model = config.model_config
    if "generate" in tasks:
        # Other modes do not give the natural logarithm of the model's own probability.
        usable = model.logprobs_mode == "raw_logprobs" and model.max_logprobs != 0
        return Scoring.LABELS if usable else None
    one_class = getattr(model.hf_config, "num_labels", 0) == 1
    if "classify" in tasks and model.score_type == "cross-encoder":
        return Scoring.PAIRS if one_class and text else None
    if "embed" in tasks and model.score_type == "bi-encoder":
        return Scoring.SIMILARITY
    return None
