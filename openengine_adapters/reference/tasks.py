"""Embeddings, classes and scores: deterministic, and alike for texts that share words.

The model's features of a text come from its tokens one by one, with a little of what stands before each, so order
matters less than content. They are never negative and often zero, which is what the sparse encoding leaves out.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from openengine.v1 import errors_pb2, tasks_pb2
from openengine_adapters.core.errors import EngineFailure, invalid
from openengine_adapters.engine import Classification, GroupScores, TaskCall, Tensor
from openengine_adapters.reference import tokenizer
from openengine_adapters.reference.cache import Namespace
from openengine_adapters.reference.model import ToyModel, log_softmax
from openengine_adapters.reference.prompts import Prompt
from openengine_adapters.reference.scheduler import Work
from openengine_adapters.reference.settings import BLOCK_SIZE

DIMENSION = 64
LABELS = ("negative", "neutral", "positive")

_TOKEN = tasks_pb2.TASK_OUTPUT_GRANULARITY_TOKEN
_CONTEXT = 0.3  # weight of what stands before a token in its features
_LORA = 0.5  # weight of an adapter in the features
_SHARPNESS = 6.0  # of the classes, and of relevance

Result = TypeVar("Result")
Features = list[float]


class TaskWork(Work, Generic[Result]):
    """One task item in the scheduler: it reads its prompts through the prefix cache, then computes its result."""

    def __init__(
        self, call: TaskCall, namespace: Namespace, prompts: Sequence[Prompt], compute: Callable[[], Result]
    ) -> None:
        super().__init__(call.id, call.priority or 0, namespace)
        self.result: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self.cached = [0] * len(prompts)
        self._prompts = prompts
        self._compute = compute
        self._unread: int | None = None

    @property
    def tokens(self) -> int:
        """Tokens of all its prompts."""
        return sum(len(prompt.ids) for prompt in self._prompts)

    @property
    def blocks(self) -> int:
        """Blocks of all its prompts."""
        return sum(-(-len(prompt.ids) // BLOCK_SIZE) for prompt in self._prompts)

    @property
    def done(self) -> bool:
        """Whether there is a result, or a failure."""
        return self.result.done()

    def step(self, budget: int) -> tuple[int, int]:
        """Read prompt tokens; with everything read, compute the result."""
        assert self.lease is not None  # the scheduler gives one before the first step
        if self._unread is None:
            for position, prompt in enumerate(self._prompts):
                chain = self.lease.chain()
                self.cached[position] = chain.match(prompt.ids, prompt.media)
                for place in range(self.cached[position], len(prompt.ids)):
                    chain.append(prompt.ids[place], prompt.media.get(place, b""))
            self._unread = self.tokens - sum(self.cached)
        read = min(budget, self._unread)
        self._unread -= read
        if not self._unread and not self.done:
            self.result.set_result(self._compute())
        return read, 0

    def cancel(self) -> None:
        """End it as aborted."""
        self.fail(EngineFailure("the request was aborted", code=errors_pb2.ERROR_CODE_CANCELLED))

    def fail(self, failure: BaseException) -> None:
        """End it with a failure."""
        if not self.done:
            self.result.set_exception(failure)


class TaskModel:
    """The three tasks over the toy language model. `bias` is that of a LoRA adapter."""

    def __init__(self, model: ToyModel) -> None:
        self._model = model

    # ------------------------------------------------------------------------------------------------- tasks

    def embed(self, prompt: Prompt, options: tasks_pb2.EmbedOptions, bias: Sequence[float] | None) -> Tensor:
        """Embed a prompt, with norm 1 unless told otherwise."""
        size = options.dimensions if options.HasField("dimensions") else DIMENSION
        normalize = options.normalize if options.HasField("normalize") else True
        by_token = options.granularity == _TOKEN
        rows = [row[:size] for row in self._rows(prompt, bias, by_token)]
        values = [value for row in rows for value in (_unit(row) if normalize else row)]
        tensor = Tensor([len(rows), size] if by_token else [size], values)
        if options.encoding == tasks_pb2.EMBEDDING_ENCODING_SPARSE:
            tensor.indices = [index for index, value in enumerate(values) if value]
            tensor.values = [values[index] for index in tensor.indices]
        return _counted(tensor, prompt, by_token)

    def classify(
        self, prompt: Prompt, options: tasks_pb2.ClassifyOptions, bias: Sequence[float] | None
    ) -> Classification:
        """Classify a prompt, in probabilities unless told otherwise."""
        semantics = options.output_semantics or tasks_pb2.TASK_VALUE_SEMANTICS_PROBABILITIES
        by_token = options.granularity == _TOKEN
        rows = [_in_terms_of(_class_logits(row), semantics) for row in self._rows(prompt, bias, by_token)]
        shape = [len(rows), len(LABELS)] if by_token else [len(LABELS)]
        tensor = Tensor(shape, [value for row in rows for value in row])
        return Classification(_counted(tensor, prompt, by_token), semantics, LABELS)

    def score_pairs(
        self, query: Prompt, candidates: Sequence[Prompt], terms: ScoreTerms, bias: Sequence[float] | None
    ) -> GroupScores:
        """Score how well each candidate fits the query, by the cosine of their features."""
        asked = _unit(self._rows(query, bias, by_token=False)[0])
        tensors = []
        for candidate in candidates:
            values = [_dot(asked, _unit(row)) for row in self._rows(candidate, bias, terms.by_token)]
            if terms.semantics == tasks_pb2.TASK_VALUE_SEMANTICS_RELEVANCE:
                values = [1 / (1 + math.exp(_SHARPNESS * (0.5 - value))) for value in values]
            shape = [len(values), 1] if terms.by_token else [1]
            tensors.append(_counted(Tensor(shape, values), candidate, terms.by_token))
        return GroupScores(tensors, terms.semantics, terms.normalization, higher_is_better=True)

    def score_labels(
        self,
        prompts: Sequence[Prompt],
        labels: Sequence[int],
        terms: ScoreTerms,
        bias: Sequence[float] | None,
    ) -> GroupScores:
        """Score each label as the token after query and candidate."""
        tensors = []
        for prompt in prompts:
            logits = self._logits(prompt, bias)
            if terms.normalization == tasks_pb2.SCORE_NORMALIZATION_SOFTMAX:
                values = _in_terms_of([logits[label] for label in labels], terms.semantics)
            else:
                every = _in_terms_of(logits, terms.semantics)
                values = [every[label] for label in labels]
            tensors.append(_counted(Tensor([len(values)], values), prompt, by_token=False))
        return GroupScores(tensors, terms.semantics, terms.normalization, higher_is_better=True)

    # ------------------------------------------------------------------------------------------------- model

    def _rows(self, prompt: Prompt, bias: Sequence[float] | None, by_token: bool) -> list[Features]:
        """The features of each token, or of all tokens together: never negative, and the first never zero."""
        raw = []
        before = [0.0] * DIMENSION
        for position, token in enumerate(prompt.ids):
            own = _vector(b"token" + token.to_bytes(2) + prompt.media.get(position, b""))
            scale = 1.0 if bias is None else 1.0 + _LORA * bias[token]
            row = [scale * value + _CONTEXT * past for value, past in zip(own, before, strict=True)]
            before = [_CONTEXT * past + value for value, past in zip(own, before, strict=True)]
            raw.append(row)
        if not by_token:
            raw = [[math.fsum(column) / len(raw) for column in zip(*raw, strict=True)]]
        return [[abs(row[0]) + 0.01, *(max(0.0, value) for value in row[1:])] for row in raw]

    def _logits(self, prompt: Prompt, bias: Sequence[float] | None) -> list[float]:
        state = self._model.start()
        for position, token in enumerate(prompt.ids):
            state = self._model.advance(state, token, prompt.media.get(position, b""))
        return self._model.logits(state, prompt.ids[-3:], bias)


@dataclass(frozen=True, slots=True)
class ScoreTerms:
    """What the scores of a call are, with the defaults filled in."""

    semantics: tasks_pb2.TaskValueSemantics.ValueType
    normalization: tasks_pb2.ScoreNormalization.ValueType
    by_token: bool


def score_terms(options: tasks_pb2.ScoreOptions) -> ScoreTerms:
    """Settle the terms of a call. Raises `Rejected` for options that do not go together."""
    semantics, normalization = options.output_semantics, options.normalization
    by_token = options.granularity == _TOKEN
    probabilities = tasks_pb2.TASK_VALUE_SEMANTICS_PROBABILITIES
    softmax, none = tasks_pb2.SCORE_NORMALIZATION_SOFTMAX, tasks_pb2.SCORE_NORMALIZATION_NONE
    if not options.label_token_ids:
        if normalization == softmax:
            raise invalid(
                "options.normalization", "SOFTMAX goes over labels; give label_token_ids, or leave it out"
            )
        if semantics and semantics not in PAIR_SEMANTICS:
            raise invalid("options.output_semantics", "without label_token_ids it is RELEVANCE or SIMILARITY")
        return ScoreTerms(semantics or tasks_pb2.TASK_VALUE_SEMANTICS_RELEVANCE, none, by_token)
    if by_token:
        raise invalid("options.granularity", "labels are scored once for each candidate; ask for SEQUENCE")
    if semantics and semantics not in LABEL_SEMANTICS:
        raise invalid(
            "options.output_semantics", "of labels it is LOGITS, PROBABILITIES or LOG_PROBABILITIES"
        )
    if normalization == softmax and semantics not in (0, probabilities):
        raise invalid("options.normalization", "SOFTMAX gives probabilities; ask for these")
    # A softmax is the default wherever it fits what was asked for.
    default = softmax if semantics in (0, probabilities) else none
    return ScoreTerms(semantics or probabilities, normalization or default, by_token=False)


PAIR_SEMANTICS = (tasks_pb2.TASK_VALUE_SEMANTICS_RELEVANCE, tasks_pb2.TASK_VALUE_SEMANTICS_SIMILARITY)
LABEL_SEMANTICS = (
    tasks_pb2.TASK_VALUE_SEMANTICS_PROBABILITIES,
    tasks_pb2.TASK_VALUE_SEMANTICS_LOG_PROBABILITIES,
    tasks_pb2.TASK_VALUE_SEMANTICS_LOGITS,
)


def instructed(prompt: Prompt, instruction: str) -> Prompt:
    """The prompt behind an instruction, in this engine's template."""
    if not instruction:
        return prompt
    head = tokenizer.encode(f"{instruction}\n\n")
    return Prompt((*head, *prompt.ids), {at + len(head): item for at, item in prompt.media.items()})


def joined(first: Prompt, second: Prompt) -> Prompt:
    """Both prompts, one after the other with an empty line between."""
    head = (*first.ids, *tokenizer.encode("\n\n"))
    media = {**first.media, **{at + len(head): item for at, item in second.media.items()}}
    return Prompt((*head, *second.ids), media)


@functools.lru_cache(maxsize=4096)
def _vector(key: bytes) -> tuple[float, ...]:
    noise = array("h", hashlib.shake_128(key).digest(2 * DIMENSION))
    return tuple(value / 2**15 for value in noise)


_CLASSES = [_vector(b"class" + label.encode()) for label in LABELS]


def _class_logits(row: Features) -> list[float]:
    unit = _unit(row)
    return [_SHARPNESS * _dot(unit, weights) for weights in _CLASSES]


def _in_terms_of(logits: Sequence[float], semantics: int) -> list[float]:
    if semantics == tasks_pb2.TASK_VALUE_SEMANTICS_LOGITS:
        return list(logits)
    logs = log_softmax(logits)
    return (
        logs if semantics == tasks_pb2.TASK_VALUE_SEMANTICS_LOG_PROBABILITIES else [math.exp(v) for v in logs]
    )


def _unit(row: Features) -> Features:
    norm = math.sqrt(math.fsum(value * value for value in row))
    return [value / norm for value in row]


def _dot(one: Sequence[float], other: Sequence[float]) -> float:
    return math.fsum(a * b for a, b in zip(one, other, strict=True))


def _counted(tensor: Tensor, prompt: Prompt, by_token: bool) -> Tensor:
    tensor.input_tokens = len(prompt.ids)
    tensor.token_ids = prompt.ids if by_token else ()
    return tensor
