# SPDX-License-Identifier: Apache-2.0
"""The three task RPCs under one roof, for the rules that they share, and checks of what they return."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from openengine.v1 import inputs_pb2, tasks_pb2
from openengine_conformance.checks import Refused, expect, expect_equal
from openengine_conformance.context import Context, UnaryRpc
from openengine_conformance.offer import Offer

TEXT, TOKEN_IDS = tasks_pb2.TASK_INPUT_TYPE_TEXT, tasks_pb2.TASK_INPUT_TYPE_TOKEN_IDS
WORDS = ("river", "stone", "morning", "light", "harbour", "window", "garden", "winter")


@dataclass(frozen=True)
class Task:
    """One task RPC. A batch of `build` is a list of inputs, or for Score the candidates of one query."""

    name: str
    capability: Callable[[Offer], Any]
    rpc: Callable[[Context], UnaryRpc[Any, Any]]
    build: Callable[[Context, Sequence[tasks_pb2.TaskInput]], Any]

    def supported(self, offer: Offer) -> bool:
        """Whether the model advertises it."""
        return bool(self.capability(offer).supported)


def context(ctx: Context, **fields: Any) -> tasks_pb2.TaskRequestContext:
    """A task context with a fresh id and the tested model."""
    return tasks_pb2.TaskRequestContext(request_id=ctx.new_id(), model=ctx.offer.model, **fields)


def _embed(ctx: Context, inputs: Sequence[tasks_pb2.TaskInput]) -> tasks_pb2.EmbedRequest:
    return tasks_pb2.EmbedRequest(context=context(ctx), inputs=inputs)


def _classify(ctx: Context, inputs: Sequence[tasks_pb2.TaskInput]) -> tasks_pb2.ClassifyRequest:
    return tasks_pb2.ClassifyRequest(context=context(ctx), inputs=inputs)


def _score(ctx: Context, inputs: Sequence[tasks_pb2.TaskInput]) -> tasks_pb2.ScoreRequest:
    group = tasks_pb2.ScoreGroup(group_id="group", query=item(ctx, "query", 5), candidates=inputs)
    return tasks_pb2.ScoreRequest(context=context(ctx), groups=[group])


EMBED = Task("Embed", lambda o: o.info.tasks.embed, lambda c: c.rpc.Embed, _embed)
CLASSIFY = Task("Classify", lambda o: o.info.tasks.classify, lambda c: c.rpc.Classify, _classify)
SCORE = Task("Score", lambda o: o.info.tasks.score, lambda c: c.rpc.Score, _score)
TASKS = (EMBED, CLASSIFY, SCORE)


def supported(ctx: Context) -> list[Task]:
    """The tasks that the model advertises; never empty under the need ANY_TASK."""
    return [task for task in TASKS if task.supported(ctx.offer)]


def item(ctx: Context, item_id: str, number: int = 0, *, words: int = 6) -> tasks_pb2.TaskInput:
    """An input of a few words, or of token ids where text is not taken; each `number` is another text."""
    types = {kind for task in supported(ctx) for kind in task.capability(ctx.offer).input_types}
    if TEXT in types or TOKEN_IDS not in types:
        text = " ".join(WORDS[(number + step * (number % 3 + 1)) % len(WORDS)] for step in range(words))
        return tasks_pb2.TaskInput(item_id=item_id, text=text)
    return ids_item(item_id, [40 + (number * 7 + step) % 80 for step in range(words)])


def ids_item(item_id: str, ids: Sequence[int]) -> tasks_pb2.TaskInput:
    """An input of token ids."""
    return tasks_pb2.TaskInput(item_id=item_id, token_ids=inputs_pb2.TokenIds(ids=ids))


def items(ctx: Context, count: int, *, words: int = 6) -> list[tasks_pb2.TaskInput]:
    """Several different inputs."""
    return [item(ctx, f"item-{number}", number, words=words) for number in range(count)]


async def run(ctx: Context, task: Task, request: Any) -> Any:
    """Make a task call and check what every task's answer must hold."""
    if task is SCORE:
        await choose_scoring(ctx, request)
    answer = await ctx.call(task.rpc(ctx), request)
    expect_equal(answer.request_id, request.context.request_id, "request_id", "TASK-14")
    check_usage(answer.usage)
    return answer


async def choose_scoring(ctx: Context, request: tasks_pb2.ScoreRequest) -> None:
    """Ask for label tokens where the model has no scores of its own."""

    async def find_out() -> bool:
        try:
            await ctx.call(ctx.rpc.Score, _score(ctx, items(ctx, 1)))
        except Refused:
            return False
        return True

    native = await ctx.session.learn("native scores", find_out)
    if (
        not native
        and ctx.offer.info.tasks.score.supports_label_token_scoring
        and not request.options.label_token_ids
    ):
        request.options.label_token_ids.extend([40, 41])


def tensors(answer: Any) -> list[tasks_pb2.DenseFloatTensor | tasks_pb2.SparseFloatTensor]:
    """Every tensor of a task's answer, in order."""
    if isinstance(answer, tasks_pb2.EmbedResponse):
        return [o.sparse if o.HasField("sparse") else o.dense for o in answer.outputs]
    if isinstance(answer, tasks_pb2.ClassifyResponse):
        return [output.scores for output in answer.outputs]
    return [candidate.scores for group in answer.groups for candidate in group.candidates]


def check_tensor(tensor: tasks_pb2.DenseFloatTensor | tasks_pb2.SparseFloatTensor) -> None:
    """Check a tensor's shape against its values."""
    rule = "TASK-11" if isinstance(tensor, tasks_pb2.DenseFloatTensor) else "TASK-12"
    shape = list(tensor.shape)
    expect(shape, "a tensor has no shape: a scalar is [1]", rule)
    expect(all(shape), f"a dimension of the shape {shape} is 0", rule)
    expect(all(math.isfinite(value) for value in tensor.values), "a value is not finite", "TASK-16")
    if isinstance(tensor, tasks_pb2.DenseFloatTensor):
        expect_equal(len(tensor.values), math.prod(shape), f"the number of values of a tensor {shape}", rule)
        return
    indices = list(tensor.indices)
    expect_equal(len(tensor.values), len(indices), "the number of values beside the indices", rule)
    expect(indices == sorted(set(indices)), "the indices are not strictly increasing", rule)
    expect(not indices or indices[-1] < math.prod(shape), f"index {indices[-1:]} lies outside {shape}", rule)


def check_usage(usage: tasks_pb2.TaskUsage) -> None:
    """Check a task's usage by itself."""
    expect(usage.input_tokens > 0, "input_tokens is 0", "TASK-13")
    cached, every = usage.cached_input_tokens, usage.input_tokens
    expect(cached <= every, f"{cached} of {every} input tokens are cached", "TASK-13")


def distance(one: Sequence[float], other: Sequence[float]) -> float:
    """How far two vectors lie apart, relative to the first one's length."""
    apart = math.dist(one, other)
    return apart / (math.hypot(*one) or 1.0)
