# SPDX-License-Identifier: Apache-2.0
"""Classify: shapes, semantics and labels."""

from __future__ import annotations

import math

from openengine.v1 import model_pb2, tasks_pb2
from openengine_conformance import needs, tasking
from openengine_conformance.case import case
from openengine_conformance.checks import Code, expect, expect_close, expect_equal, skip
from openengine_conformance.context import Context

Options = tasks_pb2.ClassifyOptions
Semantics = tasks_pb2.TaskValueSemantics
LOGITS, PROBABILITIES = tasks_pb2.TASK_VALUE_SEMANTICS_LOGITS, tasks_pb2.TASK_VALUE_SEMANTICS_PROBABILITIES
LOG_PROBABILITIES = tasks_pb2.TASK_VALUE_SEMANTICS_LOG_PROBABILITIES
SEQUENCE, TOKEN = tasks_pb2.TASK_OUTPUT_GRANULARITY_SEQUENCE, tasks_pb2.TASK_OUTPUT_GRANULARITY_TOKEN


def _offers(ctx: Context) -> model_pb2.ClassifyCapabilities:
    return ctx.offer.info.tasks.classify


def _request(ctx: Context, options: tasks_pb2.ClassifyOptions | None) -> tasks_pb2.ClassifyRequest:
    batch = tasking.items(ctx, 2)
    return tasks_pb2.ClassifyRequest(context=tasking.context(ctx), inputs=batch, options=options)


async def _classify(
    ctx: Context, options: tasks_pb2.ClassifyOptions | None = None
) -> list[tasks_pb2.ClassificationOutput]:
    answer = await tasking.run(ctx, tasking.CLASSIFY, _request(ctx, options))
    for output in answer.outputs:
        tasking.check_tensor(output.scores)
        expect(output.semantics, "the semantics are UNSPECIFIED", "CLS-02")
        classes = output.scores.shape[-1]
        if output.labels:
            expect_equal(len(output.labels), classes, "the number of labels", "CLS-03")
    return list(answer.outputs)


def _rows(output: tasks_pb2.ClassificationOutput) -> list[list[float]]:
    size = output.scores.shape[-1]
    values = list(output.scores.values)
    return [values[start : start + size] for start in range(0, len(values), size)]


@case("classify.sequence", "SEQUENCE scores have the shape [class_count].", "CLS-01", needs=[needs.CLASSIFY])
async def sequence(ctx: Context) -> None:
    if SEQUENCE not in _offers(ctx).granularities:
        skip("SEQUENCE is not advertised")
    outputs = await _classify(ctx, Options(granularity=SEQUENCE))
    for output in outputs:
        expect_equal(output.granularity, SEQUENCE, "granularity")
        expect_equal(len(output.scores.shape), 1, f"the number of dimensions of {list(output.scores.shape)}")
    expect_equal(len({tuple(output.scores.shape) for output in outputs}), 1, "the number of different shapes")


@case(
    "classify.token",
    "TOKEN scores have the shape [token_count, class_count], with aligned token_ids.",
    "CLS-01",
    needs=[needs.CLASSIFY],
)
async def token(ctx: Context) -> None:
    if TOKEN not in _offers(ctx).granularities:
        skip("TOKEN is not advertised")
    for output in await _classify(ctx, Options(granularity=TOKEN)):
        shape = list(output.scores.shape)
        expect_equal(output.granularity, TOKEN, "granularity")
        expect_equal(len(shape), 2, f"the number of dimensions of {shape}")
        if output.token_ids:
            expect_equal(len(output.token_ids), shape[0], f"the number of token_ids of a tensor {shape}")


@case(
    "classify.default",
    "Without options the response states the actual granularity and semantics.",
    "CLS-02",
    needs=[needs.CLASSIFY],
)
async def default(ctx: Context) -> None:
    for output in await _classify(ctx):
        expect(output.granularity, "the granularity is UNSPECIFIED")
        advertised = list(_offers(ctx).semantics)
        expect(not advertised or output.semantics in advertised, "the semantics are not advertised")


@case(
    "classify.semantics",
    "Advertised semantics are given as asked: probabilities and log-probabilities sum to 1.",
    "CLS-02",
    needs=[needs.CLASSIFY],
)
async def semantics(ctx: Context) -> None:
    for wanted in _offers(ctx).semantics:
        for output in await _classify(ctx, Options(output_semantics=wanted)):
            expect_equal(output.semantics, wanted, "the semantics")
            for row in _rows(output):
                _check_row(row, wanted)


def _check_row(row: list[float], wanted: int) -> None:
    if wanted == PROBABILITIES:
        expect(all(-1e-6 <= value <= 1 + 1e-4 for value in row), f"probabilities lie outside [0, 1]: {row}")
        if len(row) > 1:  # a single class has a sigmoid
            expect_close(math.fsum(row), 1.0, 0.01, "the sum of the probabilities")
    elif wanted == LOG_PROBABILITIES:
        expect(all(value <= 1e-4 for value in row), f"log-probabilities lie above 0: {row}")
        if len(row) > 1:
            expect_close(
                math.fsum(math.exp(value) for value in row), 1.0, 0.01, "the sum of the probabilities"
            )


@case(
    "classify.semantics_agree",
    "Logits, probabilities and log-probabilities of one input tell the same.",
    "CLS-02",
    needs=[needs.CLASSIFY],
    exclusive=True,
)
async def semantics_agree(ctx: Context) -> None:
    wanted = [
        value for value in (LOGITS, PROBABILITIES, LOG_PROBABILITIES) if value in _offers(ctx).semantics
    ]
    if len(wanted) < 2:
        skip("fewer than two of these semantics are advertised")
    rows = {value: _rows((await _classify(ctx, Options(output_semantics=value)))[0])[0] for value in wanted}
    if len(rows[wanted[0]]) < 2:
        skip("the model has one class")
    forms = [
        _softmax(row) if value == LOGITS else _as_probabilities(row, value) for value, row in rows.items()
    ]
    for form in forms[1:]:
        expect(tasking.distance(forms[0], form) < 0.02, f"they come to different probabilities: {forms}")


def _softmax(row: list[float]) -> list[float]:
    powers = [math.exp(value - max(row)) for value in row]
    return [value / math.fsum(powers) for value in powers]


def _as_probabilities(row: list[float], kind: int) -> list[float]:
    return [math.exp(value) for value in row] if kind == LOG_PROBABILITIES else row


@case(
    "classify.semantics_unadvertised",
    "Semantics that are not advertised are INVALID_ARGUMENT by name.",
    "CLS-02",
    "TASK-03",
    needs=[needs.CLASSIFY],
)
async def semantics_unadvertised(ctx: Context) -> None:
    if not (advertised := set(_offers(ctx).semantics)):
        skip("the semantics are not reported")
    for value in set(Semantics.values()) - advertised - {0}:
        request = _request(ctx, Options(output_semantics=value))
        await ctx.refused(ctx.rpc.Classify, request, Code.INVALID_ARGUMENT, names="semantics")


@case(
    "classify.granularity_unadvertised",
    "A granularity that is not advertised is INVALID_ARGUMENT by name.",
    "TASK-03",
    needs=[needs.CLASSIFY],
)
async def granularity_unadvertised(ctx: Context) -> None:
    missing = [value for value in (SEQUENCE, TOKEN) if value not in _offers(ctx).granularities]
    if not missing:
        skip("both granularities are advertised")
    for value in missing:
        request = _request(ctx, Options(granularity=value))
        await ctx.refused(ctx.rpc.Classify, request, Code.INVALID_ARGUMENT, names="granularity")


@case(
    "classify.labels",
    "Labels, when returned, are one for each class, the same for every input.",
    "CLS-03",
    needs=[needs.CLASSIFY],
)
async def labels(ctx: Context) -> None:
    outputs = await _classify(ctx)
    if not any(output.labels for output in outputs):
        skip("the model returns no labels")
    expect_equal(len({tuple(output.labels) for output in outputs}), 1, "the number of different label lists")
    names = list(outputs[0].labels)
    expect_equal(len(set(names)), len(names), f"the number of different labels of {names}")
