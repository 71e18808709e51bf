"""Embed, Classify and Score on vLLM's AsyncLLM."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm import PoolingParams, SamplingParams
from vllm.entrypoints.pooling.scoring.io_processor import CrossEncoderIOProcessor
from vllm.entrypoints.pooling.typing import ScoringRenderParams
from vllm.lora.request import LoRARequest
from vllm.outputs import PoolingRequestOutput, RequestOutput
from vllm.renderers.chat_utils import ChatTemplateConfig
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from openengine.v1 import tasks_pb2
from openengine_adapters.core.batches import run_batch
from openengine_adapters.core.errors import EngineFailure, Rejected, invalid
from openengine_adapters.core.task_validation import check_input_length
from openengine_adapters.engine import Classification, EngineDescription, GroupScores, Lora, TaskCall, Tensor
from openengine_adapters.vllm import errors
from openengine_adapters.vllm.media import Prompts
from openengine_adapters.vllm.task_config import Scoring, TaskConfig, is_softmax

_TOKEN = tasks_pb2.TASK_OUTPUT_GRANULARITY_TOKEN
_LOGITS = tasks_pb2.TASK_VALUE_SEMANTICS_LOGITS
_REWARD = tasks_pb2.TASK_VALUE_SEMANTICS_REWARD
_PROBABILITIES = tasks_pb2.TASK_VALUE_SEMANTICS_PROBABILITIES
_LOG_PROBABILITIES = tasks_pb2.TASK_VALUE_SEMANTICS_LOG_PROBABILITIES
_SIMILARITY = tasks_pb2.TASK_VALUE_SEMANTICS_SIMILARITY
_NONE = tasks_pb2.SCORE_NORMALIZATION_NONE
_SOFTMAX = tasks_pb2.SCORE_NORMALIZATION_SOFTMAX


@dataclass(frozen=True, slots=True)
class _Piece:
    """One input on its way into the engine, under the engine's id for it."""

    call: TaskCall
    id: str
    place: str


class VllmTasks:
    """Serves the tasks of one running engine."""

    def __init__(
        self,
        llm: AsyncLLM,
        description: EngineDescription,
        config: TaskConfig,
        prompts: Prompts,
        lora_request: Callable[[Lora | None], LoRARequest | None],
        score_template: str = "",
    ) -> None:
        self._llm = llm
        self._description = description
        self._config = config
        self._prompts = prompts
        self._lora_request = lora_request
        self._score_template = score_template or None
        self._softmax = is_softmax(llm.model_config)
        self._pairs = None
        if config.scoring is Scoring.PAIRS:
            template = ChatTemplateConfig(chat_template=self._score_template)
            self._pairs = CrossEncoderIOProcessor(llm.vllm_config, llm.renderer, template)

    # ------------------------------------------------------------------------------------ embed and classify

    async def embed(
        self, call: TaskCall, item: tasks_pb2.TaskInput, options: tasks_pb2.EmbedOptions
    ) -> Tensor:
        """Embed one item; vLLM's activation is the normalisation."""
        token = options.granularity == _TOKEN
        dimensions = options.dimensions or None
        if dimensions and self._config.dimensions and dimensions not in self._config.dimensions:
            sizes = ", ".join(map(str, sorted(self._config.dimensions)))
            raise invalid(
                "options.dimensions", f"{dimensions} is not among {sizes}", limit=sizes, value=dimensions
            )
        params = PoolingParams(
            task="token_embed" if token else "embed",
            use_activation=options.normalize if options.HasField("normalize") else None,
            dimensions=dimensions,
        )
        piece = _Piece(call, call.id, call.place)
        output = await self._pool(piece, await self._input(piece, item), params)
        return _tensor(output, output.outputs.data, token_ids=token)

    async def classify(
        self, call: TaskCall, item: tasks_pb2.TaskInput, options: tasks_pb2.ClassifyOptions
    ) -> Classification:
        """Classify one item; logarithms of probabilities are taken here, from the logits.

        A reward is what the head computes: vLLM's activation would squeeze it between 0 and 1.
        """
        token = options.granularity == _TOKEN
        support = self._description.classify
        assert support is not None
        semantics = options.output_semantics or support.semantics[0]
        params = PoolingParams(
            task="token_classify" if token or self._config.rewards else "classify",
            use_activation=semantics not in (_LOGITS, _LOG_PROBABILITIES, _REWARD),
        )
        piece = _Piece(call, call.id, call.place)
        output = await self._pool(piece, await self._input(piece, item), params)
        data = output.outputs.data
        if self._config.rewards and not token:
            data = data[-1]
        if semantics == _LOG_PROBABILITIES:
            data = torch.log_softmax(data, -1) if self._softmax else torch.nn.functional.logsigmoid(data)
        labels = self._config.labels
        return Classification(
            _tensor(output, data, token_ids=token),
            semantics,
            labels if len(labels) == data.shape[-1] else (),
        )

    # ----------------------------------------------------------------------------------------------- scoring

    async def score(
        self, call: TaskCall, group: tasks_pb2.ScoreGroup, options: tasks_pb2.ScoreOptions
    ) -> GroupScores:
        """Score one group, its candidates side by side."""
        if self._config.scoring is Scoring.LABELS:
            return await self._score_labels(call, group, options)
        if self._config.scoring is Scoring.PAIRS:
            return await self._score_pairs(call, group, options)
        return await self._score_similarity(call, group)

    async def _score_labels(
        self, call: TaskCall, group: tasks_pb2.ScoreGroup, options: tasks_pb2.ScoreOptions
    ) -> GroupScores:
        """The probabilities that the label tokens come next after query and candidate (SCO-02, SCO-03)."""
        softmax = options.normalization == _SOFTMAX
        semantics = options.output_semantics or _PROBABILITIES
        labels = list(options.label_token_ids)
        query = await self._tokens(group.query, f"{call.place}.query", special=True)

        async def one(index: int, candidate: tasks_pb2.TaskInput) -> Tensor:
            piece = _Piece(call, call.part_id(index), f"{call.place}.candidates[{index}]")
            ids = [*query, *await self._tokens(candidate, piece.place, special=False)]
            check_input_length(piece.place, len(ids), self._description, new_tokens=1)
            logprobs, output = await self._next_token(piece, ids, labels)
            if softmax:
                values = torch.softmax(logprobs, -1)
            else:
                values = logprobs if semantics == _LOG_PROBABILITIES else logprobs.exp()
            return _tensor(output, values)

        tensors = await run_batch(group.candidates, one, call.at_once)
        # Several labels have no common direction; the one probability does.
        direction = True if len(labels) == 1 else None
        return GroupScores(tensors, semantics, _SOFTMAX if softmax else _NONE, direction)

    async def _score_pairs(
        self, call: TaskCall, group: tasks_pb2.ScoreGroup, options: tasks_pb2.ScoreOptions
    ) -> GroupScores:
        """A cross-encoder or reranker; vLLM renders the pair as the model wants it."""
        support = self._description.score
        assert support is not None
        semantics = options.output_semantics or support.semantics[0]

        async def one(index: int, candidate: tasks_pb2.TaskInput) -> Tensor:
            piece = _Piece(call, call.part_id(index), f"{call.place}.candidates[{index}]")
            params = PoolingParams(task="classify", use_activation=semantics != _LOGITS)
            prompt, params = await self._pair(
                piece, group.query.text, candidate.text, options.instruction, params
            )
            output = await self._pool(piece, prompt, params)
            return _tensor(output, output.outputs.data)

        tensors = await run_batch(group.candidates, one, call.at_once)
        return GroupScores(tensors, semantics, _NONE, higher_is_better=True)

    async def _score_similarity(self, call: TaskCall, group: tasks_pb2.ScoreGroup) -> GroupScores:
        """The cosine between the embedding of the query, computed once, and that of each candidate."""

        async def one(index: int, item: tasks_pb2.TaskInput) -> PoolingRequestOutput[Any]:
            place = f"{call.place}.candidates[{index - 1}]" if index else f"{call.place}.query"
            piece = _Piece(call, call.part_id(index), place)
            params = PoolingParams(task="embed", use_activation=False)
            return await self._pool(piece, await self._input(piece, item), params)

        query, *candidates = await run_batch([group.query, *group.candidates], one, call.at_once)
        tensors = []
        for output in candidates:
            cosine = torch.cosine_similarity(query.outputs.data.double(), output.outputs.data.double(), dim=0)
            tensors.append(_tensor(output, cosine.reshape(1)))
        # The query's tokens were read once for the whole group.
        tensors[0].input_tokens += len(query.prompt_token_ids)
        tensors[0].cached_input_tokens = (tensors[0].cached_input_tokens or 0) + query.num_cached_tokens
        return GroupScores(tensors, _SIMILARITY, _NONE, higher_is_better=True)

    # --------------------------------------------------------------------------------------- into the engine

    async def _input(self, piece: _Piece, item: tasks_pb2.TaskInput) -> Any:
        """vLLM's input for one item, as long as it is: nothing is cut (TASK-03)."""
        place = piece.place
        if item.HasField("multimodal"):
            holder: tasks_pb2.TaskInput | tasks_pb2.MultimodalTaskInput = item.multimodal
            place = f"{place}.multimodal"
        else:
            holder = item
        prompt: str | Sequence[int] | None = None
        if holder.HasField("text"):
            prompt, place = holder.text, f"{place}.text"
        elif holder.HasField("token_ids"):
            prompt, place = holder.token_ids.ids, f"{place}.token_ids"
        try:
            rendered = await self._prompts.render(prompt, piece.call.media.get(item.item_id, ()), field=place)
        except Rejected:
            raise
        except Exception as error:
            raise errors.task_refusal(error, place) from error
        ids = rendered["prompt_token_ids"]
        if not ids:
            raise invalid(place, "has no tokens; the tokenizer makes nothing of it")
        check_input_length(place, len(ids), self._description)
        return rendered

    async def _pair(
        self, piece: _Piece, query: str, candidate: str, instruction: str, params: PoolingParams
    ) -> tuple[Any, PoolingParams]:
        assert self._pairs is not None
        # Nothing is cut, so what cannot fit need not be tokenised.
        longest = self._llm.model_config.max_model_len * self._llm.get_tokenizer().max_chars_per_token
        if len(query) + len(candidate) > longest:
            raise invalid(piece.place, f"with the query it has more than {longest} characters", limit=longest)
        extras = {"chat_template_kwargs": {"instruction": instruction}} if instruction else None
        try:
            rendered = await self._pairs.render_async(
                ScoringRenderParams(
                    data_1=query,
                    data_2=candidate,
                    chat_template=self._score_template,
                    max_tokens_per_query=0,
                    max_tokens_per_doc=0,
                    tok_params=self._llm.renderer.default_cmpl_tok_params,
                    prompt_extras=extras,
                    skip_mm_cache=False,
                    params=params,
                    lora_requests=None,
                    priorities=0,
                )
            )
        except Exception as error:
            raise errors.task_refusal(error, piece.place) from error
        return rendered["prompts"], rendered["params"]

    async def _tokens(self, item: tasks_pb2.TaskInput, place: str, *, special: bool) -> list[int]:
        """The ids of one part of a prompt; only the first part begins with the tokenizer's special tokens."""
        if item.HasField("token_ids"):
            return list(item.token_ids.ids)
        place = f"{place}.text"
        try:
            rendered = await self._prompts.render(item.text, field=place, special=special)
        except Exception as error:
            raise errors.task_refusal(error, place) from error
        return list(rendered["prompt_token_ids"])

    async def _pool(self, piece: _Piece, prompt: Any, params: PoolingParams) -> PoolingRequestOutput[Any]:
        stream = self._llm.encode(prompt, params, piece.id, **self._extras(piece.call))
        output: PoolingRequestOutput[Any] = await self._last(piece, stream)
        if output.error is not None:
            raise EngineFailure(f"{piece.place}: {output.error.message}", retryable=output.error.retryable)
        return output

    async def _next_token(
        self, piece: _Piece, ids: list[int], labels: list[int]
    ) -> tuple[torch.Tensor, RequestOutput]:
        """The log-probabilities of `labels` at the position after `ids`."""
        params = SamplingParams(
            temperature=0.0,
            max_tokens=1,
            logprob_token_ids=labels,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        prompt = await self._prompts.render(ids, field=piece.place)
        output: RequestOutput = await self._last(
            piece, self._llm.generate(prompt, params, piece.id, **self._extras(piece.call))
        )
        logprobs = output.outputs[0].logprobs
        if not logprobs:
            raise EngineFailure(f"{piece.place}: the engine ended before the next token")
        return torch.tensor([logprobs[0][label].logprob for label in labels]), output

    async def _last(self, piece: _Piece, stream: Any) -> Any:
        """The one output of a request. Whatever ends the wait early ends the request in the engine, too."""
        last = None
        try:
            async with contextlib.aclosing(stream):
                async for output in stream:
                    last = output
        except Exception as error:
            raise errors.task_refusal(error, piece.place) from error
        finally:
            if last is None and not self._llm.errored:
                await self._llm.abort(piece.id)
        if last is None:
            raise EngineFailure(f"{piece.place}: the engine ended without a result", retryable=True)
        return last

    def _extras(self, call: TaskCall) -> dict[str, Any]:
        return {
            "lora_request": self._lora_request(call.lora),
            "trace_headers": call.trace_headers or None,
            # vLLM schedules the lower value first, the contract the larger (TASK-10).
            "priority": -(call.priority or 0),
        }


def _tensor(
    output: PoolingRequestOutput[Any] | RequestOutput, data: torch.Tensor, *, token_ids: bool = False
) -> Tensor:
    """A result with what vLLM counted for it; ids only where the rows are the prompt's tokens."""
    ids = output.prompt_token_ids or []
    aligned = token_ids and data.dim() == 2 and data.shape[0] == len(ids)
    return Tensor(
        tuple(data.shape),
        data.float().flatten().tolist(),
        token_ids=ids if aligned else (),
        input_tokens=len(ids),
        cached_input_tokens=output.num_cached_tokens,
    )
