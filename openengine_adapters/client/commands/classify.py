"""`openengine classify`."""

from __future__ import annotations

import argparse
from collections.abc import Coroutine, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from openengine.v1 import model_pb2, tasks_pb2
from openengine_adapters.client import OpenEngineClient
from openengine_adapters.client.commands._tasks import (
    DEFAULT_BATCH,
    SEMANTICS,
    Job,
    add_task_arguments,
    read_lines,
    shape_text,
    task_input,
    values_text,
)
from openengine_adapters.client.layout import Cell
from openengine_adapters.client.messages import enum_name, enum_value, to_json

if TYPE_CHECKING:
    from openengine_adapters.client.terminal import Terminal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Inputs and options."""
    parser.epilog = (
        'With --jsonl a line is {"text": ...} or {"token_ids": [...]}, with "id" and "images" if wanted.'
    )
    add_task_arguments(parser, "texts to classify")
    parser.add_argument(
        "--semantics", choices=SEMANTICS, help="what the values shall mean (default: the model's)"
    )


def run(args: argparse.Namespace, terminal: Terminal) -> Coroutine[Any, Any, int]:
    """Print the class values of each input, in the order of the inputs."""
    items = [task_input(line, str(number)) for number, line in enumerate(read_lines(args))]
    options = tasks_pb2.ClassifyOptions()
    if args.granularity:
        options.granularity = enum_value(tasks_pb2.TaskOutputGranularity, args.granularity)
    if args.semantics:
        options.output_semantics = enum_value(tasks_pb2.TaskValueSemantics, args.semantics)
    return _Classification(items, options).run(args, terminal)


class _Classification(Job[tasks_pb2.TaskInput, tasks_pb2.ClassifyResponse]):
    header = ("item", "semantics", "best", "values")

    def __init__(self, items: Sequence[tasks_pb2.TaskInput], options: tasks_pb2.ClassifyOptions) -> None:
        super().__init__(items)
        self._options = options

    def batch_size(self, tasks: model_pb2.TaskCapabilities) -> int:
        return tasks.classify.max_batch_size or DEFAULT_BATCH

    async def call(
        self,
        client: OpenEngineClient,
        context: tasks_pb2.TaskRequestContext,
        batch: Sequence[tasks_pb2.TaskInput],
        timeout: float,
    ) -> tasks_pb2.ClassifyResponse:
        request = tasks_pb2.ClassifyRequest(context=context, inputs=batch, options=self._options)
        return await client.classify(request, timeout=timeout)

    def records(self, response: tasks_pb2.ClassifyResponse, start: int) -> Iterable[dict[str, Any]]:
        for output in response.outputs:
            yield to_json(output) | {"input_index": start + output.input_index}

    def rows(self, response: tasks_pb2.ClassifyResponse) -> Iterable[list[Cell]]:
        for output in response.outputs:
            semantics = enum_name(tasks_pb2.TaskValueSemantics, output.semantics).lower()
            yield [output.item_id, semantics, *_best_and_all(output)]


def _best_and_all(output: tasks_pb2.ClassificationOutput) -> tuple[str | None, str]:
    shape, values = output.scores.shape, output.scores.values
    if len(shape) != 1 or not values:
        return None, f"{shape_text(shape)}: {values_text(values)}"
    labels = output.labels or [str(number) for number in range(len(values))]
    named = list(zip(labels, values, strict=False))
    best, _ = max(named, key=lambda pair: pair[1])
    return best, "  ".join(f"{label}={value:.4g}" for label, value in named)
