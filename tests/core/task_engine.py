"""A fake engine that serves every option of Embed, Classify and Score, and counts what runs in it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator

from openengine.v1 import inputs_pb2, tasks_pb2
from openengine_adapters.engine import (
    Classification,
    GroupScores,
    Lora,
    TaskCall,
    TaskSupport,
    Tensor,
)
from tests.core.fake_engine import FakeEngine

DIMENSION = 4
LABELS = ("no", "perhaps", "yes")

SEQUENCE = tasks_pb2.TASK_OUTPUT_GRANULARITY_SEQUENCE
TOKEN = tasks_pb2.TASK_OUTPUT_GRANULARITY_TOKEN
DENSE = tasks_pb2.EMBEDDING_ENCODING_DENSE
SPARSE = tasks_pb2.EMBEDDING_ENCODING_SPARSE
LOGITS = tasks_pb2.TASK_VALUE_SEMANTICS_LOGITS
PROBABILITIES = tasks_pb2.TASK_VALUE_SEMANTICS_PROBABILITIES
RELEVANCE = tasks_pb2.TASK_VALUE_SEMANTICS_RELEVANCE
NONE = tasks_pb2.SCORE_NORMALIZATION_NONE
SOFTMAX = tasks_pb2.SCORE_NORMALIZATION_SOFTMAX
IMAGE = inputs_pb2.MODALITY_IMAGE

SUPPORT = TaskSupport(
    input_types=(
        tasks_pb2.TASK_INPUT_TYPE_TEXT,
        tasks_pb2.TASK_INPUT_TYPE_TOKEN_IDS,
        tasks_pb2.TASK_INPUT_TYPE_MULTIMODAL,
    ),
    granularities=(SEQUENCE, TOKEN),
    semantics=(PROBABILITIES, LOGITS, RELEVANCE),
    encodings=(DENSE, SPARSE),
    normalizations=(NONE, SOFTMAX),
    modalities=(IMAGE,),
    dimension=DIMENSION,
    max_batch_size=40,
    max_groups=3,
    max_candidates_per_group=5,
    max_label_token_ids=2,
    max_output_values=40,
    priority=True,
    lora=True,
    normalization=True,
    dimension_override=True,
    label_token_scoring=True,
    instruction=True,
    higher_is_better=True,
)

PLAIN = TaskSupport(
    input_types=(tasks_pb2.TASK_INPUT_TYPE_TOKEN_IDS,), granularities=(SEQUENCE,), encodings=(DENSE,)
)
"""A task that offers nothing beyond what it must."""


class TaskEngine(FakeEngine):
    """Answers each item with values made from its length; `results` and `failures` say otherwise by item id.

    While `gate` is shut, items wait inside the engine.
    """

    def __init__(self, support: TaskSupport | None = SUPPORT, **changes: object) -> None:
        changes = {"embed": support, "classify": support, "score": support, "lora": True, **changes}
        super().__init__(**changes)
        self.results: dict[str, Tensor] = {}
        self.failures: dict[str, Exception] = {}
        self.drops: set[str] = set()
        self.inside: set[str] = set()
        self.seen: list[TaskCall] = []
        self.cancelled: list[str] = []
        self.most = 0
        self.loras = [Lora(1, "adapter", "/adapter")]

    def unfinished(self) -> int:
        return len(self.inside) + super().unfinished()

    async def embed(
        self, call: TaskCall, item: tasks_pb2.TaskInput, options: tasks_pb2.EmbedOptions
    ) -> Tensor:
        async with self._item(call, call.id, item):
            columns = options.dimensions or DIMENSION
            tensor = self._tensor(item, options.granularity, columns)
            if options.encoding == SPARSE:
                return dataclasses.replace(tensor, values=[1.0], indices=[columns - 1])
            return tensor

    async def classify(
        self, call: TaskCall, item: tasks_pb2.TaskInput, options: tasks_pb2.ClassifyOptions
    ) -> Classification:
        async with self._item(call, call.id, item):
            semantics = options.output_semantics or PROBABILITIES
            return Classification(self._tensor(item, options.granularity, len(LABELS)), semantics, LABELS)

    async def score(
        self, call: TaskCall, group: tasks_pb2.ScoreGroup, options: tasks_pb2.ScoreOptions
    ) -> GroupScores:
        tensors = []
        for index, candidate in enumerate(group.candidates):
            async with self._item(call, call.part_id(index), candidate):
                columns = len(options.label_token_ids) or 1
                tensors.append(self._tensor(candidate, options.granularity, columns))
        softmax = options.normalization == SOFTMAX
        semantics = options.output_semantics or (PROBABILITIES if softmax else RELEVANCE)
        return GroupScores(tensors, semantics, options.normalization or NONE, higher_is_better=True)

    def static_loras(self) -> list[Lora]:
        return self.loras

    async def load_lora(self, lora: Lora) -> None:
        self.loras.append(lora)

    async def lora_unused(self, lora: Lora) -> None: ...

    async def unload_lora(self, lora: Lora) -> None:
        self.loras.remove(lora)

    @contextlib.asynccontextmanager
    async def _item(self, call: TaskCall, part_id: str, item: tasks_pb2.TaskInput) -> AsyncIterator[None]:
        self.seen.append(dataclasses.replace(call, id=part_id))
        self.inside.add(part_id)
        self.most = max(self.most, len(self.inside))
        try:
            if item.item_id in self.failures:
                raise self.failures[item.item_id]
            if item.item_id in self.drops:
                raise asyncio.CancelledError
            await asyncio.sleep(0)
            await self.gate.wait()
            yield
        except asyncio.CancelledError:
            self.cancelled.append(part_id)
            raise
        finally:
            self.inside.discard(part_id)

    def _tensor(self, item: tasks_pb2.TaskInput, granularity: int, columns: int) -> Tensor:
        if item.item_id in self.results:
            return self.results[item.item_id]
        ids = list(item.token_ids.ids) or [7] * (len(item.text) or 1)
        rows = len(ids) if granularity == TOKEN else 1
        shape = [rows, columns] if granularity == TOKEN else [columns]
        return Tensor(
            shape,
            [len(ids) + 0.5] * (rows * columns),
            token_ids=ids if granularity == TOKEN else (),
            input_tokens=len(ids),
            cached_input_tokens=0,
        )
