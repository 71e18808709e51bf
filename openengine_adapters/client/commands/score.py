"""`openengine score`."""

from __future__ import annotations

import argparse
from collections.abc import Coroutine, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from openengine.v1 import model_pb2, tasks_pb2
from openengine_adapters.client import OpenEngineClient
from openengine_adapters.client.arguments import UsageError
from openengine_adapters.client.commands._request import token_ids
from openengine_adapters.client.commands._tasks import (
    DEFAULT_BATCH,
    SEMANTICS,
    Job,
    add_task_arguments,
    read_lines,
    task_input,
    values_text,
)
from openengine_adapters.client.layout import Cell
from openengine_adapters.client.messages import enum_value, to_json

if TYPE_CHECKING:
    from openengine_adapters.client.terminal import Terminal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Query, candidates and options."""
    parser.epilog = (
        'With --jsonl and no --query a line is a group: {"query": ..., "candidates": [...]}, with "id" if wanted; '
        'with --query it is a candidate. Both are texts or {"text": ...}, {"token_ids": [...]}, "id", "images".'
    )
    add_task_arguments(parser, "the candidates")
    add = parser.add_argument_group("scoring; what is not given is the model's default").add_argument
    add("--query", metavar="TEXT", help="what the candidates are rated against")
    add("--semantics", choices=SEMANTICS, help="what the values shall mean")
    add("--normalization", choices=("none", "softmax"), help="of each candidate's label values")
    add("--label-token-ids", metavar="IDS", help="rate by the probability of these tokens next: 1,2,3")
    add("--instruction", default="", metavar="TEXT", help="for a reranker that takes one")
    add("--sort", action="store_true", help="show the best candidate of a group first (text output)")


def run(args: argparse.Namespace, terminal: Terminal) -> Coroutine[Any, Any, int]:
    """Print each candidate's scores, in the order given."""
    if args.query is None and not args.jsonl:
        raise UsageError("--query is missing (or groups of --jsonl)")
    lines, options = read_lines(args), _options(args)
    if args.query is not None:
        candidates = [task_input(line, str(number)) for number, line in enumerate(lines)]
        return _Candidates(task_input(args.query, "query"), candidates, options, args.sort).run(
            args, terminal
        )
    return _Groups([_group(line, number) for number, line in enumerate(lines)], options, args.sort).run(
        args, terminal
    )


def _group(line: dict[str, Any], number: int) -> tasks_pb2.ScoreGroup:
    if line.keys() - {"id"} != {"query", "candidates"} or not isinstance(line["candidates"], list):
        raise UsageError(
            f'input line {number + 1}: a group has "query", a list "candidates", and perhaps "id"'
        )
    return tasks_pb2.ScoreGroup(
        group_id=str(line.get("id", number)),
        query=task_input(line["query"], "query"),
        candidates=[task_input(candidate, str(n)) for n, candidate in enumerate(line["candidates"])],
    )


def _options(args: argparse.Namespace) -> tasks_pb2.ScoreOptions:
    options = tasks_pb2.ScoreOptions(instruction=args.instruction)
    if args.label_token_ids is not None:
        options.label_token_ids.extend(token_ids(args.label_token_ids, "--label-token-ids"))
    if args.granularity:
        options.granularity = enum_value(tasks_pb2.TaskOutputGranularity, args.granularity)
    if args.semantics:
        options.output_semantics = enum_value(tasks_pb2.TaskValueSemantics, args.semantics)
    if args.normalization:
        options.normalization = enum_value(tasks_pb2.ScoreNormalization, args.normalization)
    return options


class _Scoring(Job[Any, tasks_pb2.ScoreResponse]):
    """What both ways to score share: the table, and its order."""

    header = ("group", "candidate", "score")

    def __init__(self, items: Sequence[Any], options: tasks_pb2.ScoreOptions, sort: bool) -> None:
        super().__init__(items)
        self._options = options
        self._sort = sort
        self._higher_is_better: bool | None = None

    def rows(self, response: tasks_pb2.ScoreResponse) -> Iterable[list[Cell]]:
        if response.HasField("higher_is_better"):
            self._higher_is_better = response.higher_is_better
        for group in response.groups:
            for candidate in group.candidates:
                values = candidate.scores.values
                score = values[0] if len(values) == 1 else values_text(values)
                yield [group.group_id, candidate.candidate_id, score]

    def arrange(self, rows: list[list[Cell]]) -> list[list[Cell]]:
        if not self._sort:
            return rows
        if self._higher_is_better is None or not all(isinstance(score, float) for *_, score in rows):
            raise UsageError("--sort: these scores have no order; leave it out")
        order = {group: number for number, (group, *_) in reversed(list(enumerate(rows)))}
        sign = -1 if self._higher_is_better else 1

        def key(row: list[Cell]) -> tuple[int, float]:
            return order[row[0]], sign * float(row[2] or 0)

        return sorted(rows, key=key)


class _Groups(_Scoring):
    """Groups with a query each, some to a call."""

    def batch_size(self, tasks: model_pb2.TaskCapabilities) -> int:
        return tasks.score.max_groups or DEFAULT_BATCH

    async def call(
        self,
        client: OpenEngineClient,
        context: tasks_pb2.TaskRequestContext,
        batch: Sequence[tasks_pb2.ScoreGroup],
        timeout: float,
    ) -> tasks_pb2.ScoreResponse:
        request = tasks_pb2.ScoreRequest(context=context, groups=batch, options=self._options)
        return await client.score(request, timeout=timeout)

    def records(self, response: tasks_pb2.ScoreResponse, start: int) -> Iterable[dict[str, Any]]:
        for group in response.groups:
            yield to_json(group) | {"group_index": start + group.group_index} | _meaning(response)


class _Candidates(_Scoring):
    """One query; its candidates are one call's where the server's limit allows it."""

    def __init__(
        self,
        query: tasks_pb2.TaskInput,
        candidates: Sequence[tasks_pb2.TaskInput],
        options: tasks_pb2.ScoreOptions,
        sort: bool,
    ) -> None:
        super().__init__(candidates, options, sort)
        self._query = query

    def batch_size(self, tasks: model_pb2.TaskCapabilities) -> int:
        return tasks.score.max_candidates_per_group or len(self.items)

    async def call(
        self,
        client: OpenEngineClient,
        context: tasks_pb2.TaskRequestContext,
        batch: Sequence[tasks_pb2.TaskInput],
        timeout: float,
    ) -> tasks_pb2.ScoreResponse:
        group = tasks_pb2.ScoreGroup(group_id="0", query=self._query, candidates=batch)
        request = tasks_pb2.ScoreRequest(context=context, groups=[group], options=self._options)
        return await client.score(request, timeout=timeout)

    def records(self, response: tasks_pb2.ScoreResponse, start: int) -> Iterable[dict[str, Any]]:
        for group in response.groups:
            for candidate in group.candidates:
                candidate.candidate_index += start
            yield to_json(group) | _meaning(response)


def _meaning(response: tasks_pb2.ScoreResponse) -> dict[str, Any]:
    """Return what holds for all groups of a call: it goes with each of them."""
    names = ("granularity", "semantics", "higher_is_better", "normalization", "label_token_ids")
    return {name: value for name, value in to_json(response).items() if name in names}
