"""Embed, Classify and Score, from the validated request to the response.

One call is one batch: it holds one id, its items run side by side in the engine, and it succeeds or fails as a
whole. Cancelling the handler ends the engine's work, whoever cancels: the client, its deadline, Abort, a drain, or
the first item that fails (TASK-08, TASK-09, TASK-15).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import uuid
from collections.abc import AsyncIterator, Iterable, Mapping

import grpc

from openengine.v1 import errors_pb2, inputs_pb2, tasks_pb2
from openengine_adapters.core import task_outputs, task_validation
from openengine_adapters.core.batches import run_batch
from openengine_adapters.core.errors import EngineDied, EngineFailure, Rejected
from openengine_adapters.core.lora import LoraRegistry
from openengine_adapters.core.media import MediaLoader, RequestMedia
from openengine_adapters.core.requests import ActiveRequest, RequestTable
from openengine_adapters.core.task_outputs import Expected, TensorChecker
from openengine_adapters.engine import (
    Classification,
    Classifies,
    Embeds,
    Engine,
    EngineDescription,
    GroupScores,
    Media,
    Scores,
    TaskCall,
    TaskSupport,
    Tensor,
)

DEFAULT_RUNNING = 64
"""Requests that an engine is taken to run at once when it does not say."""

MOST_AT_ONCE = 512
"""Items of one call that are in the engine at once, at most."""

_FAILURE_STATUS = {
    errors_pb2.ERROR_CODE_CANCELLED: grpc.StatusCode.CANCELLED,
    errors_pb2.ERROR_CODE_OVERLOADED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors_pb2.ERROR_CODE_INVALID_ARGUMENT: grpc.StatusCode.INVALID_ARGUMENT,
}


class Tasks:
    """Runs task calls on one engine."""

    def __init__(
        self,
        engine: Engine,
        description: EngineDescription,
        requests: RequestTable,
        loras: LoraRegistry,
        media: MediaLoader,
    ) -> None:
        self._engine = engine
        self._description = description
        self._requests = requests
        self._loras = loras
        self._media = media
        # Twice what runs at once, so that the engine finds the next step's items waiting.
        running = description.max_running_requests or DEFAULT_RUNNING
        self._at_once = min(2 * running, MOST_AT_ONCE)

    async def embed(
        self, request: tasks_pb2.EmbedRequest, trace_headers: Mapping[str, str]
    ) -> tasks_pb2.EmbedResponse:
        """Serve one Embed request. Raises `Rejected`."""
        options = task_validation.check_embed(request, self._description)
        engine, support = self._engine, self._description.embed
        assert isinstance(engine, Embeds)
        assert support is not None
        columns = options.dimensions or support.dimension
        checker = TensorChecker(Expected(options.granularity, columns, support.max_output_values))
        async with self._running(request.context, "Embed", trace_headers) as (call, media):

            async def one(index: int, item: tasks_pb2.TaskInput) -> Tensor:
                place = f"inputs[{index}]"
                tensor = await engine.embed(await _part(call, index, place, media, item), item, options)
                checker.check(place, item.item_id, tensor)
                return tensor

            tensors = await run_batch(request.inputs, one, self._at_once)
            return task_outputs.embed_response(request, options, tensors)

    async def classify(
        self, request: tasks_pb2.ClassifyRequest, trace_headers: Mapping[str, str]
    ) -> tasks_pb2.ClassifyResponse:
        """Serve one Classify request. Raises `Rejected`."""
        options = task_validation.check_classify(request, self._description)
        engine, support = self._engine, self._description.classify
        assert isinstance(engine, Classifies)
        assert support is not None
        checker = TensorChecker(Expected(options.granularity, max_values=support.max_output_values))
        async with self._running(request.context, "Classify", trace_headers) as (call, media):

            async def one(index: int, item: tasks_pb2.TaskInput) -> Classification:
                place = f"inputs[{index}]"
                found = await engine.classify(await _part(call, index, place, media, item), item, options)
                checker.check(place, item.item_id, found.scores)
                task_outputs.check_labels(place, found)
                return found

            found = await run_batch(request.inputs, one, self._at_once)
            return task_outputs.classify_response(request, options, found)

    async def score(
        self, request: tasks_pb2.ScoreRequest, trace_headers: Mapping[str, str]
    ) -> tasks_pb2.ScoreResponse:
        """Serve one Score request. Raises `Rejected`."""
        options = task_validation.check_score(request, self._description)
        engine, support = self._engine, self._description.score
        assert isinstance(engine, Scores)
        assert support is not None
        labels = len(options.label_token_ids) or None
        checker = TensorChecker(Expected(options.granularity, labels, support.max_output_values))
        async with self._running(request.context, "Score", trace_headers) as (call, media):

            async def one(index: int, group: tasks_pb2.ScoreGroup) -> GroupScores:
                part = await _group(call, index, media, group)
                scores = await engine.score(part, group, options)
                if len(scores.candidates) != len(group.candidates):
                    raise EngineFailure(f"{part.place}: the engine did not score every candidate")
                for position, tensor in enumerate(scores.candidates):
                    place = f"{part.place}.candidates[{position}]"
                    checker.check(place, group.candidates[position].item_id, tensor)
                return scores

            # A group is one batch in the engine; several run side by side only as far as there is room.
            largest = max(len(group.candidates) for group in request.groups)
            scored = await run_batch(request.groups, one, max(1, self._at_once // largest))
            return task_outputs.score_response(request, options, scored)

    @contextlib.asynccontextmanager
    async def _running(
        self, context: tasks_pb2.TaskRequestContext, task: str, trace_headers: Mapping[str, str]
    ) -> AsyncIterator[tuple[TaskCall, RequestMedia]]:
        """Hold id and adapter for one call, and turn every end but success into `Rejected`."""
        with self._requests.claim(context.request_id, unary=True) as active:
            try:
                async with self._loras.use(context.lora_name) as lora:
                    call = TaskCall(
                        id=active.call_id,
                        at_once=self._at_once,
                        priority=context.priority if context.HasField("priority") else None,
                        lora=lora,
                        trace_headers=trace_headers,
                    )
                    yield call, self._media.for_request()
            except asyncio.CancelledError:
                if active.failure is None:
                    raise
                raise _ended_outside(active, active.failure) from None
            except EngineFailure as failure:
                ended = _ended_outside(active, active.failure or failure)
                if isinstance(failure, EngineDied):
                    self._requests.report_death(active, failure)
                raise ended from failure


async def probe(engine: Engine, description: EngineDescription) -> bool:
    """Run the smallest task that the model serves (HEALTH-02); False when it serves none."""
    call = TaskCall(id=uuid.uuid4().hex, place="health-probe")
    if description.embed is not None and isinstance(engine, Embeds):
        support = description.embed
        embedding = tasks_pb2.EmbedOptions(granularity=support.granularities[0])
        await engine.embed(call, _smallest("probe", support, description), embedding)
    elif description.classify is not None and isinstance(engine, Classifies):
        support = description.classify
        classification = tasks_pb2.ClassifyOptions(granularity=support.granularities[0])
        await engine.classify(call, _smallest("probe", support, description), classification)
    elif description.score is not None and description.score.native_scoring and isinstance(engine, Scores):
        support = description.score
        group = tasks_pb2.ScoreGroup(
            group_id="probe",
            query=_smallest("query", support, description),
            candidates=[_smallest("candidate", support, description)],
        )
        await engine.score(call, group, tasks_pb2.ScoreOptions(granularity=support.granularities[0]))
    else:
        return False
    return True


def _smallest(item_id: str, support: TaskSupport, description: EngineDescription) -> tasks_pb2.TaskInput:
    if tasks_pb2.TASK_INPUT_TYPE_TOKEN_IDS in support.input_types:
        ids = inputs_pb2.TokenIds(ids=[min(1, description.vocab_size - 1)])
        return tasks_pb2.TaskInput(item_id=item_id, token_ids=ids)
    return tasks_pb2.TaskInput(item_id=item_id, text="a")


def _ended_outside(active: ActiveRequest, failure: EngineFailure) -> Rejected:
    """The status of a call that did not end by itself; a cancellation of our own has done its work."""
    task = asyncio.current_task()
    if task is not None and active.failure is not None:
        task.uncancel()
    if active.aborted:
        return Rejected(grpc.StatusCode.CANCELLED, "the request was aborted")
    otherwise = grpc.StatusCode.UNAVAILABLE if failure.retryable else grpc.StatusCode.INTERNAL
    return Rejected(_FAILURE_STATUS.get(failure.code, otherwise), str(failure))


async def _part(
    call: TaskCall, index: int, place: str, media: RequestMedia, item: tasks_pb2.TaskInput
) -> TaskCall:
    """The call of one item of a batch, its media loaded."""
    return dataclasses.replace(
        call, id=call.part_id(index), place=place, media=await _load([(place, item)], media)
    )


async def _group(call: TaskCall, index: int, media: RequestMedia, group: tasks_pb2.ScoreGroup) -> TaskCall:
    """The call of one group; its candidates number themselves in the id's last eight digits."""
    place = f"groups[{index}]"
    return dataclasses.replace(
        call,
        id=f"{call.id[:16]}{index:08x}{call.id[24:]}",
        place=place,
        media=await _load(task_validation.placed_inputs(place, group), media),
    )


async def _load(
    placed: Iterable[tuple[str, tasks_pb2.TaskInput]], media: RequestMedia
) -> dict[str, list[Media]]:
    return {
        item.item_id: await media.load(f"{place}.multimodal.media", item.multimodal.media)
        for place, item in placed
        if item.HasField("multimodal")
    }
