"""Embed, Classify and Score on SGLang's runtime."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sglang.srt.managers.io_struct import EmbeddingReqInput, GenerateReqInput

from openengine.v1 import tasks_pb2
from openengine_adapters.core.batches import run_batch
from openengine_adapters.core.errors import EngineFailure, Rejected, invalid
from openengine_adapters.core.task_validation import check_input_length
from openengine_adapters.engine import Classification, EngineDescription, GroupScores, TaskCall, Tensor
from openengine_adapters.sglang import errors
from openengine_adapters.sglang.media import LONG_TEXT, Prompts
from openengine_adapters.sglang.requests import Terms
from openengine_adapters.sglang.task_config import Head, Scoring, TaskConfig

_LOGITS = tasks_pb2.TASK_VALUE_SEMANTICS_LOGITS
_PROBABILITIES = tasks_pb2.TASK_VALUE_SEMANTICS_PROBABILITIES
_LOG_PROBABILITIES = tasks_pb2.TASK_VALUE_SEMANTICS_LOG_PROBABILITIES
_RELEVANCE = tasks_pb2.TASK_VALUE_SEMANTICS_RELEVANCE
_SIMILARITY = tasks_pb2.TASK_VALUE_SEMANTICS_SIMILARITY
_NONE = tasks_pb2.SCORE_NORMALIZATION_NONE
_SOFTMAX = tasks_pb2.SCORE_NORMALIZATION_SOFTMAX

Values = Sequence[float]


@dataclass(frozen=True, slots=True)
class _Piece:
    """One input on its way into the engine, under the engine's id for it."""

    call: TaskCall
    id: str
    place: str


class SglangTasks:
    """Serves the tasks of one running engine; `manager` returns its tokenizer manager, or raises `EngineDied`."""

    def __init__(
        self,
        manager: Callable[[], Any],
        description: EngineDescription,
        config: TaskConfig,
        prompts: Prompts,
        terms: Terms,
    ) -> None:
        self._manager = manager
        self._description = description
        self._config = config
        self._prompts = prompts
        self._low_priority_first = terms.low_priority_first

    # ------------------------------------------------------------------------------------ embed and classify

    async def embed(
        self, call: TaskCall, item: tasks_pb2.TaskInput, options: tasks_pb2.EmbedOptions
    ) -> Tensor:
        """Embed one item; SGLang normalises every embedding."""
        dimensions = options.dimensions or None
        if dimensions and self._config.dimensions and dimensions not in self._config.dimensions:
            sizes = ", ".join(map(str, sorted(self._config.dimensions)))
            raise invalid(
                "options.dimensions", f"{dimensions} is not among {sizes}", limit=sizes, value=dimensions
            )
        return await self._pool(_Piece(call, call.id, call.place), item, dimensions=dimensions)

    async def classify(
        self, call: TaskCall, item: tasks_pb2.TaskInput, options: tasks_pb2.ClassifyOptions
    ) -> Classification:
        """Classify one item; SGLang returns what the head computes, probabilities are made of it here."""
        support = self._description.classify
        assert support is not None
        semantics = options.output_semantics or support.semantics[0]
        tensor = await self._pool(_Piece(call, call.id, call.place), item)
        tensor.values = meant(tensor.values, self._config.head, semantics)
        labels = self._config.labels
        return Classification(tensor, semantics, labels if len(labels) == len(tensor.values) else ())

    # ----------------------------------------------------------------------------------------------- scoring

    async def score(
        self, call: TaskCall, group: tasks_pb2.ScoreGroup, options: tasks_pb2.ScoreOptions
    ) -> GroupScores:
        """Score one group, its candidates side by side."""
        if self._config.scoring is Scoring.LABELS:
            return await self._score_labels(call, group, options)
        if self._config.scoring is Scoring.PAIRS:
            return await self._score_pairs(call, group, options)
        if self._config.scoring is Scoring.PROMPTS:
            return await self._score_prompts(call, group, options)
        return await self._score_similarity(call, group)

    async def _score_labels(
        self, call: TaskCall, group: tasks_pb2.ScoreGroup, options: tasks_pb2.ScoreOptions
    ) -> GroupScores:
        """The probabilities that the label tokens come next after query and candidate (SCO-02, SCO-03)."""
        softmax = options.normalization == _SOFTMAX
        semantics = options.output_semantics or _PROBABILITIES
        labels = list(options.label_token_ids)
        query = await self._part(group.query, f"{call.place}.query", special=True)

        async def one(index: int, candidate: tasks_pb2.TaskInput) -> Tensor:
            piece = _Piece(call, call.part_id(index), f"{call.place}.candidates[{index}]")
            ids = [*query, *await self._part(candidate, piece.place, special=False)]
            check_input_length(piece.place, len(ids), self._description, new_tokens=1)
            tensor = await self._next_token(piece, ids, labels)
            if softmax:
                tensor.values = _softmax(tensor.values)
            elif semantics == _PROBABILITIES:
                tensor.values = [math.exp(value) for value in tensor.values]
            return tensor

        tensors = await run_batch(group.candidates, one, call.at_once)
        # Several labels have no common direction; the one probability does.
        direction = True if len(labels) == 1 else None
        return GroupScores(tensors, semantics, _SOFTMAX if softmax else _NONE, direction)

    async def _score_pairs(
        self, call: TaskCall, group: tasks_pb2.ScoreGroup, options: tasks_pb2.ScoreOptions
    ) -> GroupScores:
        """A cross-encoder, which reads query and candidate as one input of two parts."""
        semantics = options.output_semantics or _RELEVANCE
        wanted = _PROBABILITIES if semantics == _RELEVANCE else semantics

        async def one(index: int, candidate: tasks_pb2.TaskInput) -> Tensor:
            piece = _Piece(call, call.part_id(index), f"{call.place}.candidates[{index}]")
            tensor = await self._pool_pair(piece, group.query.text, candidate.text)
            tensor.values = meant(tensor.values, self._config.head, wanted)
            return tensor

        tensors = await run_batch(group.candidates, one, call.at_once)
        return GroupScores(tensors, semantics, _NONE, higher_is_better=True)

    async def _score_prompts(
        self, call: TaskCall, group: tasks_pb2.ScoreGroup, options: tasks_pb2.ScoreOptions
    ) -> GroupScores:
        """A reranker that is a language model: how likely its "yes" is, of "yes" and "no" (SCO-04)."""
        reranker = self._config.reranker
        assert reranker is not None

        async def one(index: int, candidate: tasks_pb2.TaskInput) -> Tensor:
            piece = _Piece(call, call.part_id(index), f"{call.place}.candidates[{index}]")
            self._prompts.check_text(piece.place, group.query.text, candidate.text, options.instruction)
            prompt = reranker.prompt(group.query.text, candidate.text, options.instruction)
            ids = await self._prompts.tokens(prompt)
            check_input_length(piece.place, len(ids), self._description, new_tokens=1)
            tensor = await self._next_token(piece, ids, reranker.labels)
            tensor.values, tensor.shape = _softmax(tensor.values)[:1], (1,)
            return tensor

        tensors = await run_batch(group.candidates, one, call.at_once)
        return GroupScores(tensors, _RELEVANCE, _NONE, higher_is_better=True)

    async def _score_similarity(self, call: TaskCall, group: tasks_pb2.ScoreGroup) -> GroupScores:
        """The cosine between the embedding of the query, computed once, and that of each candidate."""

        async def one(index: int, item: tasks_pb2.TaskInput) -> Tensor:
            place = f"{call.place}.candidates[{index - 1}]" if index else f"{call.place}.query"
            return await self._pool(_Piece(call, call.part_id(index), place), item)

        query, *tensors = await run_batch([group.query, *group.candidates], one, call.at_once)
        for tensor in tensors:
            tensor.values = [_cosine(query.values, tensor.values)]
            tensor.shape = (1,)
        # The query's tokens were read once for the whole group.
        tensors[0].input_tokens += query.input_tokens
        return GroupScores(tensors, _SIMILARITY, _NONE, higher_is_better=True)

    # --------------------------------------------------------------------------------------- into the engine

    async def _pool(self, piece: _Piece, item: tasks_pb2.TaskInput, dimensions: int | None = None) -> Tensor:
        """One vector for one input, as long as it is: nothing is cut (TASK-03)."""
        place = piece.place
        holder: tasks_pb2.TaskInput | tasks_pb2.MultimodalTaskInput = item
        if item.HasField("multimodal"):
            holder, place = item.multimodal, f"{place}.multimodal"
        prompt: str | Sequence[int] | None = None
        if holder.HasField("text"):
            prompt, place = holder.text, f"{place}.text"
            self._prompts.check_text(place, holder.text)
        elif holder.HasField("token_ids"):
            prompt, place = holder.token_ids.ids, f"{place}.token_ids"
        media = piece.call.media.get(item.item_id, ())
        async with self._prompts.rendered(prompt, media, field=place) as rendered:
            self._check_ids(place, rendered.ids)
            # For some models SGLang ends a text in a way of its own, so a text stays one.
            fields = {"text": prompt} if isinstance(prompt, str) and not media else rendered.fields
            request = EmbeddingReqInput(
                rid=piece.id, **fields, dimensions=dimensions, **self._extras(piece.call)
            )
            output = await self._answer(piece, request)
        return _tensor(output, output["embedding"])

    async def _pool_pair(self, piece: _Piece, query: str, candidate: str) -> Tensor:
        self._prompts.check_text(piece.place, query, candidate)
        if len(query) + len(candidate) < LONG_TEXT:
            count = self._pair_length(query, candidate)
        else:
            count = await asyncio.to_thread(self._pair_length, query, candidate)
        check_input_length(piece.place, count, self._description)
        # A pair is SGLang's only in a list, so this is a batch of one.
        request = EmbeddingReqInput(
            rid=[piece.id],
            text=[[query, candidate]],
            is_cross_encoder_request=True,
            **self._extras(piece.call),
        )
        (output,) = await self._answer(piece, request)
        return _tensor(output, output["embedding"])

    def _pair_length(self, query: str, candidate: str) -> int:
        return len(self._manager().tokenizer(query, candidate)["input_ids"])

    async def _next_token(self, piece: _Piece, ids: list[int], labels: list[int]) -> Tensor:
        """The log-probabilities of `labels` at the position after `ids`; nothing is generated."""
        request = GenerateReqInput(
            rid=piece.id,
            input_ids=ids,
            sampling_params={"max_new_tokens": 0},
            return_logprob=True,
            logprob_start_len=-1,
            token_ids_logprob=labels,
            stream=False,
            **self._extras(piece.call),
        )
        output = await self._answer(piece, request)
        rows = output["meta_info"].get("output_token_ids_logprobs") or ()
        found = {token: logprob for logprob, token, _ in (rows[0] if rows else ())}
        if not found.keys() >= set(labels):
            raise EngineFailure(f"{piece.place}: the engine ended before the next token", retryable=True)
        return _tensor(output, [found[label] for label in labels])

    async def _part(self, item: tasks_pb2.TaskInput, place: str, *, special: bool) -> list[int]:
        """The ids of one part of a prompt; only the first part begins with the tokenizer's special tokens."""
        if item.HasField("token_ids"):
            return list(item.token_ids.ids)
        self._prompts.check_text(place, item.text)
        return await self._prompts.tokens(item.text, special=special)

    def _check_ids(self, place: str, ids: Sequence[int]) -> None:
        """SGLang dies of an input without tokens."""
        if not ids:
            raise invalid(place, "has no tokens; the tokenizer makes nothing of it")
        check_input_length(place, len(ids), self._description)

    def _extras(self, call: TaskCall) -> dict[str, Any]:
        extras: dict[str, Any] = {"external_trace_header": dict(call.trace_headers) or None}
        if call.priority is not None:
            extras["priority"] = -call.priority if self._low_priority_first else call.priority
        return extras

    async def _answer(self, piece: _Piece, request: Any) -> Any:
        """The one answer to a request. SGLang's generator ends the request when it is left early."""
        try:
            async with contextlib.aclosing(self._manager().generate_request(request, None)) as answers:
                answer = await anext(answers)
        except Rejected:
            raise
        except Exception as error:
            raise errors.task_refusal(error, piece.place) from error
        for one in answer if isinstance(answer, list) else [answer]:
            if one["meta_info"]["finish_reason"]["type"] == "abort":
                raise EngineFailure(f"{piece.place}: the engine dropped this input", retryable=True)
        return answer


def meant(values: Values, head: Head, semantics: tasks_pb2.TaskValueSemantics.ValueType) -> Values:
    """What a head's values become under the semantics asked for; those that the head has anyway stay."""
    if head is Head.PROBABILITIES:
        if semantics != _LOG_PROBABILITIES:
            return values
        return [math.log(value) if value else -math.inf for value in values]
    if semantics == _PROBABILITIES:
        return (
            _softmax(values) if head is Head.SOFTMAX else [math.exp(_log_sigmoid(value)) for value in values]
        )
    if semantics == _LOG_PROBABILITIES:
        return _log_softmax(values) if head is Head.SOFTMAX else [_log_sigmoid(value) for value in values]
    return values


def _softmax(values: Values) -> list[float]:
    return [math.exp(value) for value in _log_softmax(values)]


def _log_softmax(values: Values) -> list[float]:
    highest = max(values)
    total = highest + math.log(sum(math.exp(value - highest) for value in values))
    return [value - total for value in values]


def _log_sigmoid(value: float) -> float:
    return min(value, 0.0) - math.log1p(math.exp(-abs(value)))


def _cosine(a: Values, b: Values) -> float:
    product = (
        math.sumprod(a, b) if hasattr(math, "sumprod") else sum(x * y for x, y in zip(a, b, strict=True))
    )
    return product / (math.hypot(*a) * math.hypot(*b))


def _tensor(output: Any, values: float | Values) -> Tensor:
    """A vector with what SGLang counted for it; it returns a single value bare."""
    vector = [values] if isinstance(values, float | int) else values
    meta = output["meta_info"]
    return Tensor(
        (len(vector),),
        vector,
        input_tokens=meta["prompt_tokens"],
        cached_input_tokens=meta.get("cached_tokens"),  # counted for a generating model only
    )
