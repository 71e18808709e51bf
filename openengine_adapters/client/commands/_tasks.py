"""What embed, classify and score share: reading inputs, and calling the server batch by batch."""

from __future__ import annotations

import abc
import argparse
import json
import uuid
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

from openengine.v1 import inputs_pb2, model_pb2, tasks_pb2
from openengine_adapters.client import OpenEngineClient
from openengine_adapters.client.arguments import UsageError, count, int32
from openengine_adapters.client.commands._common import LONG_TIMEOUT, choose_model, connected, read_file
from openengine_adapters.client.commands._request import image, pair
from openengine_adapters.client.layout import Cell, table
from openengine_adapters.client.messages import to_json

if TYPE_CHECKING:
    from openengine_adapters.client.terminal import Terminal

GRANULARITIES = ("sequence", "token")
SEMANTICS = (
    "logits",
    "probabilities",
    "log-probabilities",
    "similarity",
    "relevance",
    "reward",
    "model-defined",
)
DEFAULT_BATCH = 64  # for a server that advertises no limit
_LONGEST_VALUES = 6  # values of a tensor shown in text


def add_task_arguments(parser: argparse.ArgumentParser, inputs: str) -> None:
    """Add where the inputs come from and the options of every task; `inputs` says what is read."""
    add = parser.add_argument_group("inputs").add_argument
    add("texts", metavar="TEXT", nargs="*", help=f"{inputs} (default: the lines of standard input)")
    add("--file", metavar="FILE", help="read them from this file, a line each; - is standard input")
    add("--jsonl", action="store_true", help="each line is a JSON object: see below")
    add(
        "--batch-size",
        type=count,
        metavar="N",
        help="at most so many in a call (default: what the server advertises)",
    )
    add = parser.add_argument_group("request").add_argument
    add("--model", default="", help="which model (default: the server's only one)")
    add("--request-id", default="", metavar="ID", help="an id to abort it by; later batches add -1, -2, ...")
    add("--lora", default="", metavar="NAME", help="a loaded LoRA adapter")
    add("--priority", type=int32, help="larger runs earlier")
    add("--metadata", action="append", default=[], metavar="KEY=VALUE", help="carried along; may be repeated")
    add("--granularity", choices=GRANULARITIES, help="one result for the whole input, or for each token")


def read_lines(args: argparse.Namespace) -> list[Any]:
    """Return the inputs as given: texts, or JSON objects with --jsonl. Raises `UsageError`."""
    if args.texts and args.file:
        raise UsageError("inputs are given twice: as arguments and with --file")
    source = args.file or "-"
    lines: list[str] = args.texts or read_file(source, "inputs").splitlines()
    lines = [line for line in lines if line.strip()]
    if not lines:
        raise UsageError("no input: give texts, --file, or lines on standard input")
    if not args.jsonl:
        return lines
    return [_object(line, number) for number, line in enumerate(lines, 1)]


def task_input(value: Any, fallback_id: str) -> tasks_pb2.TaskInput:
    """Return one input, given as text or as an object with `id`, `text` or `token_ids`, and `images`."""
    fields = value if isinstance(value, dict) else {"text": value}
    unknown = fields.keys() - {"id", "text", "token_ids", "images"}
    if unknown:
        raise UsageError(f"input {fallback_id}: unknown {', '.join(sorted(unknown))}")
    item = tasks_pb2.TaskInput(item_id=str(fields.get("id", fallback_id)))
    try:
        prompt: dict[str, Any] = {}
        if "text" in fields:
            prompt["text"] = fields["text"]
        if "token_ids" in fields:
            prompt["token_ids"] = inputs_pb2.TokenIds(ids=fields["token_ids"])
        if len(prompt) > 1:
            raise UsageError(f"input {fallback_id}: has both text and token_ids")
        if images := fields.get("images"):
            media = [image(source) for source in images]
            item.multimodal.CopyFrom(tasks_pb2.MultimodalTaskInput(media=media, **prompt))
        else:
            item.MergeFrom(tasks_pb2.TaskInput(**prompt))
    except (TypeError, ValueError):
        raise UsageError(f"input {fallback_id}: wrong type of value") from None
    return item


class Response(Protocol):
    """What every task's response has."""

    @property
    def usage(self) -> tasks_pb2.TaskUsage:
        """What the call used."""


ItemT = TypeVar("ItemT")
ResponseT = TypeVar("ResponseT", bound=Response)


class Job(abc.ABC, Generic[ItemT, ResponseT]):
    """Any number of items for one task, in as many calls as the server's limits ask for."""

    header: ClassVar[Sequence[str]]

    def __init__(self, items: Sequence[ItemT]) -> None:
        self.items = items

    @abc.abstractmethod
    def batch_size(self, tasks: model_pb2.TaskCapabilities) -> int:
        """How many items one call may have."""

    @abc.abstractmethod
    async def call(
        self,
        client: OpenEngineClient,
        context: tasks_pb2.TaskRequestContext,
        batch: Sequence[ItemT],
        timeout: float,
    ) -> ResponseT:
        """Have one batch computed."""

    @abc.abstractmethod
    def records(self, response: ResponseT, start: int) -> Iterable[dict[str, Any]]:
        """Return the JSON output of a batch whose first item is number `start` of all."""

    @abc.abstractmethod
    def rows(self, response: ResponseT) -> Iterable[list[Cell]]:
        """Return the text output of a batch, as rows under `header`."""

    def arrange(self, rows: list[list[Cell]]) -> list[list[Cell]]:
        """Return all rows in the order to be shown."""
        return rows

    async def run(self, args: argparse.Namespace, terminal: Terminal) -> int:
        """Compute and print everything."""
        usage = tasks_pb2.TaskUsage()
        rows: list[list[Cell]] = []
        async with connected(args) as client:
            common = _context(args, choose_model(client, args.model))
            tasks = (await client.model_info(common.model)).tasks
            size = args.batch_size or self.batch_size(tasks)
            with terminal.progress(len(self.items)) as advance:
                for start in range(0, len(self.items), size):
                    batch = self.items[start : start + size]
                    context = tasks_pb2.TaskRequestContext()
                    context.CopyFrom(common)
                    context.request_id += f"-{start // size}" if start else ""
                    response = await self.call(client, context, batch, args.timeout or LONG_TIMEOUT)
                    _add(usage, response.usage)
                    if terminal.json:
                        for record in self.records(response, start):
                            terminal.record({"event": "output"} | record)
                    else:
                        rows.extend(self.rows(response))
                    advance(len(batch))
        if terminal.json:
            terminal.record({"event": "usage", "usage": to_json(usage)})
        else:
            terminal.lines(table(self.header, self.arrange(rows)))
            cached = f" ({usage.cached_input_tokens} cached)" if usage.cached_input_tokens else ""
            terminal.note(f"{usage.input_tokens} input tokens{cached}")
        return 0


def values_text(values: Sequence[float]) -> str:
    """Return the beginning of a tensor's values."""
    shown = " ".join(f"{value:.4g}" for value in values[:_LONGEST_VALUES])
    return shown + (" ..." if len(values) > _LONGEST_VALUES else "")


def shape_text(shape: Sequence[int]) -> str:
    """Return a shape as 3x384."""
    return "x".join(map(str, shape))


def _context(args: argparse.Namespace, model: str) -> tasks_pb2.TaskRequestContext:
    return tasks_pb2.TaskRequestContext(
        request_id=args.request_id or f"cli-{uuid.uuid4().hex}",
        model=model,
        lora_name=args.lora,
        priority=args.priority,
        metadata=dict(pair(item) for item in args.metadata),
    )


def _add(total: tasks_pb2.TaskUsage, usage: tasks_pb2.TaskUsage) -> None:
    total.input_tokens += usage.input_tokens
    if usage.HasField("cached_input_tokens"):
        total.cached_input_tokens += usage.cached_input_tokens


def _object(line: str, number: int) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise UsageError(f"input line {number}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise UsageError(f"input line {number}: not a JSON object")
    return value
