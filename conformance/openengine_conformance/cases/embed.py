# SPDX-License-Identifier: Apache-2.0
"""Embed: shapes, encodings, normalization and dimensions."""

from __future__ import annotations

import math

from openengine.v1 import model_pb2, tasks_pb2
from openengine_conformance import needs, tasking
from openengine_conformance.case import case
from openengine_conformance.checks import Code, expect, expect_close, expect_equal, fail, skip
from openengine_conformance.context import Context

Options = tasks_pb2.EmbedOptions
SEQUENCE, TOKEN = tasks_pb2.TASK_OUTPUT_GRANULARITY_SEQUENCE, tasks_pb2.TASK_OUTPUT_GRANULARITY_TOKEN
DENSE, SPARSE = tasks_pb2.EMBEDDING_ENCODING_DENSE, tasks_pb2.EMBEDDING_ENCODING_SPARSE


def _request(ctx: Context, options: tasks_pb2.EmbedOptions | None, count: int = 2) -> tasks_pb2.EmbedRequest:
    batch = tasking.items(ctx, count)
    return tasks_pb2.EmbedRequest(context=tasking.context(ctx), inputs=batch, options=options)


async def _embed(
    ctx: Context, options: tasks_pb2.EmbedOptions | None = None, count: int = 2
) -> list[tasks_pb2.EmbeddingOutput]:
    answer = await tasking.run(ctx, tasking.EMBED, _request(ctx, options, count))
    expect_equal(len(answer.outputs), count, "the number of outputs", "TASK-14")
    for output in answer.outputs:
        expect(output.WhichOneof("embedding"), "an output has no embedding", "EMB-01")
    for tensor in tasking.tensors(answer):
        tasking.check_tensor(tensor)
    return list(answer.outputs)


def _offers(ctx: Context) -> model_pb2.EmbedCapabilities:
    return ctx.offer.info.tasks.embed


def _dense(output: tasks_pb2.EmbeddingOutput) -> tasks_pb2.DenseFloatTensor:
    if not output.HasField("dense"):
        fail("the embedding is not dense", "EMB-02")
    return output.dense


@case(
    "embed.default",
    "Without options the model's default comes, and says its granularity.",
    "EMB-01",
    "EMB-02",
    needs=[needs.EMBED],
)
async def default(ctx: Context) -> None:
    for output in await _embed(ctx):
        granularities = list(_offers(ctx).granularities)
        expect(output.granularity, "the granularity is UNSPECIFIED", "EMB-02")
        expect(
            not granularities or output.granularity in granularities,
            "the granularity is not advertised",
            "EMB-02",
        )


@case(
    "embed.sequence",
    "SEQUENCE embeddings have the shape [dimension].",
    "EMB-01",
    "EMB-05",
    needs=[needs.EMBED],
)
async def sequence(ctx: Context) -> None:
    if SEQUENCE not in _offers(ctx).granularities:
        skip("SEQUENCE is not advertised")
    sizes = set()
    for output in await _embed(ctx, Options(granularity=SEQUENCE)):
        expect_equal(output.granularity, SEQUENCE, "granularity", "EMB-02")
        shape = list(tasking.tensors(tasks_pb2.EmbedResponse(outputs=[output]))[0].shape)
        expect_equal(len(shape), 1, f"the number of dimensions of {shape}")
        sizes.add(shape[0])
    expect_equal(len(sizes), 1, f"the number of different sizes {sizes}")
    if _offers(ctx).HasField("dimension"):
        expect_equal(sizes, {_offers(ctx).dimension}, "the set of sizes", "EMB-05")


@case(
    "embed.token",
    "TOKEN embeddings have the shape [token_count, dimension], with aligned token_ids.",
    "EMB-01",
    needs=[needs.EMBED],
)
async def token(ctx: Context) -> None:
    if TOKEN not in _offers(ctx).granularities:
        skip("TOKEN is not advertised")
    answer = await tasking.run(ctx, tasking.EMBED, _request(ctx, Options(granularity=TOKEN)))
    rows = 0
    for output in answer.outputs:
        expect_equal(output.granularity, TOKEN, "granularity", "EMB-02")
        shape = list(_dense(output).shape)
        expect_equal(len(shape), 2, f"the number of dimensions of {shape}")
        rows += shape[0]
        if output.token_ids:
            expect_equal(len(output.token_ids), shape[0], f"the number of token_ids of a tensor {shape}")
        if _offers(ctx).HasField("dimension"):
            expect_equal(shape[1], _offers(ctx).dimension, "the dimension of a token's embedding", "EMB-05")
    expect_equal(rows, answer.usage.input_tokens, "the number of rows beside input_tokens", "TASK-13")


@case(
    "embed.granularity_unadvertised",
    "A granularity that is not advertised is INVALID_ARGUMENT by name.",
    "EMB-02",
    "TASK-03",
    needs=[needs.EMBED],
)
async def granularity_unadvertised(ctx: Context) -> None:
    missing = [value for value in (SEQUENCE, TOKEN) if value not in _offers(ctx).granularities]
    if not missing:
        skip("both granularities are advertised")
    for value in missing:
        request = _request(ctx, Options(granularity=value))
        await ctx.refused(ctx.rpc.Embed, request, Code.INVALID_ARGUMENT, names="granularity")


@case("embed.normalize", "normalize=true gives vectors of length 1.", "EMB-03", needs=[needs.EMBED])
async def normalize(ctx: Context) -> None:
    if not _offers(ctx).supports_normalization:
        request = _request(ctx, Options(normalize=True))
        await ctx.refused(ctx.rpc.Embed, request, Code.INVALID_ARGUMENT, names="normalize", rule="EMB-02")
        return
    for output in await _embed(ctx, Options(normalize=True)):
        expect_close(math.hypot(*_dense(output).values), 1.0, 0.01, "the length of a normalized vector")


@case(
    "embed.raw",
    "normalize=false gives the raw vector, of which normalize=true is the direction.",
    "EMB-03",
    needs=[needs.EMBED],
)
async def raw(ctx: Context) -> None:
    if not _offers(ctx).supports_normalization:
        skip("normalization is not advertised")
    raws, units = await _embed(ctx, Options(normalize=False)), await _embed(ctx, Options(normalize=True))
    lengths = [math.hypot(*_dense(output).values) for output in raws]
    for output, unit, length in zip(raws, units, lengths, strict=True):
        scaled = [value / length for value in _dense(output).values]
        expect(tasking.distance(_dense(unit).values, scaled) < 0.02, "normalize=true is another direction")
    if all(abs(length - 1) < 0.01 for length in lengths):
        skip("this model's raw vectors have length 1 themselves")


@case(
    "embed.dimensions",
    "dimensions reduces to that size where it is advertised.",
    "EMB-04",
    needs=[needs.EMBED],
)
async def dimensions(ctx: Context) -> None:
    native = len(_dense((await _embed(ctx))[0]).values)
    if not _offers(ctx).supports_dimension_override:
        request = _request(ctx, Options(dimensions=max(1, native // 2)))
        await ctx.refused(ctx.rpc.Embed, request, Code.INVALID_ARGUMENT, names="dimensions")
        return
    for size in (native // 2, native):
        for output in await _embed(ctx, Options(dimensions=size)):
            expect_equal(list(_dense(output).shape), [size], "the shape")


@case(
    "embed.bad_dimensions",
    "dimensions 0, or above the native size, is INVALID_ARGUMENT.",
    "EMB-04",
    needs=[needs.EMBED],
)
async def bad_dimensions(ctx: Context) -> None:
    native = len(_dense((await _embed(ctx))[0]).values)
    for size in (0, native + 1, 2**31):
        request = _request(ctx, Options(dimensions=size))
        await ctx.refused(ctx.rpc.Embed, request, Code.INVALID_ARGUMENT, names="dimensions")


@case(
    "embed.encodings",
    "Each advertised encoding is served as asked; others are rejected by name.",
    "EMB-02",
    "TASK-12",
    needs=[needs.EMBED],
)
async def encodings(ctx: Context) -> None:
    for encoding, field in ((DENSE, "dense"), (SPARSE, "sparse")):
        if encoding in _offers(ctx).encodings:
            for output in await _embed(ctx, Options(encoding=encoding)):
                expect_equal(output.WhichOneof("embedding"), field, "the encoding")
        elif _offers(ctx).encodings:
            request = _request(ctx, Options(encoding=encoding))
            await ctx.refused(ctx.rpc.Embed, request, Code.INVALID_ARGUMENT, names="encoding")


@case(
    "embed.sparse_equals_dense",
    "The sparse form holds the values of the dense one.",
    "TASK-12",
    needs=[needs.EMBED],
)
async def sparse_equals_dense(ctx: Context) -> None:
    if not {DENSE, SPARSE} <= set(_offers(ctx).encodings):
        skip("dense and sparse are not both advertised")
    dense = (await _embed(ctx, Options(encoding=DENSE), 1))[0].dense
    sparse = (await _embed(ctx, Options(encoding=SPARSE), 1))[0].sparse
    expect_equal(list(sparse.shape), list(dense.shape), "the shape of the sparse form")
    values = [0.0] * len(dense.values)
    for index, value in zip(sparse.indices, sparse.values, strict=True):
        values[index] = value
    expect(
        tasking.distance(dense.values, values) < 0.02, "the sparse form holds other values than the dense one"
    )


@case(
    "embed.text_equals_ids",
    "Inputs of text and of token ids are both served, where advertised.",
    "MODEL-07",
    needs=[needs.EMBED],
)
async def input_types(ctx: Context) -> None:
    for kind, one in (
        (tasking.TEXT, tasks_pb2.TaskInput(item_id="a", text="some words")),
        (tasking.TOKEN_IDS, tasking.ids_item("a", [40, 41, 42])),
    ):
        if kind in _offers(ctx).input_types:
            request = tasks_pb2.EmbedRequest(context=tasking.context(ctx), inputs=[one])
            answer = await tasking.run(ctx, tasking.EMBED, request)
            tasking.check_tensor(tasking.tensors(answer)[0])
