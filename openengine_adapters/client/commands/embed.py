"""`openengine embed`."""

from __future__ import annotations

import argparse
import math
from collections.abc import Coroutine, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from openengine.v1 import model_pb2, tasks_pb2
from openengine_adapters.client import OpenEngineClient
from openengine_adapters.client.arguments import uint32
from openengine_adapters.client.commands._tasks import (
    DEFAULT_BATCH,
    Job,
    add_task_arguments,
    read_lines,
    shape_text,
    task_input,
    values_text,
)
from openengine_adapters.client.layout import Cell
from openengine_adapters.client.messages import enum_value, to_json

if TYPE_CHECKING:
    from openengine_adapters.client.terminal import Terminal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Inputs and options."""
    parser.epilog = (
        'With --jsonl a line is {"text": ...} or {"token_ids": [...]}, with "id" and "images" if wanted.'
    )
    add_task_arguments(parser, "texts to embed")
    add = parser.add_argument_group("embedding; what is not given is the model's default").add_argument
    add("--normalize", action=argparse.BooleanOptionalAction, help="scale vectors to length 1")
    add("--dimensions", type=uint32, metavar="N", help="reduce vectors to so many values")
    add("--encoding", choices=("dense", "sparse"), help="how vectors are written")


def run(args: argparse.Namespace, terminal: Terminal) -> Coroutine[Any, Any, int]:
    """Print one vector an input, in the order of the inputs."""
    items = [task_input(line, str(number)) for number, line in enumerate(read_lines(args))]
    options = tasks_pb2.EmbedOptions(normalize=args.normalize, dimensions=args.dimensions)
    if args.granularity:
        options.granularity = enum_value(tasks_pb2.TaskOutputGranularity, args.granularity)
    if args.encoding:
        options.encoding = enum_value(tasks_pb2.EmbeddingEncoding, args.encoding)
    return _Embedding(items, options).run(args, terminal)


class _Embedding(Job[tasks_pb2.TaskInput, tasks_pb2.EmbedResponse]):
    header = ("item", "shape", "length", "values")

    def __init__(self, items: Sequence[tasks_pb2.TaskInput], options: tasks_pb2.EmbedOptions) -> None:
        super().__init__(items)
        self._options = options

    def batch_size(self, tasks: model_pb2.TaskCapabilities) -> int:
        return tasks.embed.max_batch_size or DEFAULT_BATCH

    async def call(
        self,
        client: OpenEngineClient,
        context: tasks_pb2.TaskRequestContext,
        batch: Sequence[tasks_pb2.TaskInput],
        timeout: float,
    ) -> tasks_pb2.EmbedResponse:
        request = tasks_pb2.EmbedRequest(context=context, inputs=batch, options=self._options)
        return await client.embed(request, timeout=timeout)

    def records(self, response: tasks_pb2.EmbedResponse, start: int) -> Iterable[dict[str, Any]]:
        for output in response.outputs:
            yield to_json(output) | {"input_index": start + output.input_index}

    def rows(self, response: tasks_pb2.EmbedResponse) -> Iterable[list[Cell]]:
        for output in response.outputs:
            tensor = output.sparse if output.HasField("sparse") else output.dense
            length = math.hypot(*tensor.values) if len(tensor.shape) == 1 else None
            yield [output.item_id, shape_text(tensor.shape), length, values_text(tensor.values)]
