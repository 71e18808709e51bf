# SPDX-License-Identifier: Apache-2.0
"""Media in Generate requests: sources, order, and what must never be fetched or decoded."""

from __future__ import annotations

import asyncio
import base64
import math
import struct
import zlib
from collections.abc import Sequence

from openengine.v1 import generate_pb2, inputs_pb2
from openengine_conformance import needs
from openengine_conformance.case import case
from openengine_conformance.checks import Code, Refused, expect, expect_equal, skip
from openengine_conformance.context import Context
from openengine_conformance.stream import Stream

Item = inputs_pb2.MediaItem
IMAGE = inputs_pb2.MODALITY_IMAGE

NOISE = 1e-3
"""What log-probabilities of one and the same request may be apart."""


def png(red: int, green: int, blue: int, size: int = 32) -> bytes:
    """Return a PNG of one colour."""
    row = b"\0" + bytes((red, green, blue)) * size
    header = struct.pack(">IIBBBBB", size, size, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(row * size)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


RED, BLUE = png(255, 0, 0), png(0, 0, 255)


async def _look(ctx: Context, *items: inputs_pb2.MediaItem) -> Stream:
    """Generate from images, with as many placeholders; skips when this model wants another prompt."""

    def request(chosen: Sequence[inputs_pb2.MediaItem]) -> generate_pb2.GenerateRequest:
        prompt = ctx.options.image_prompt * len(chosen) + " The picture shows"
        scores = generate_pb2.ResponseOptions(
            return_output_logprobs=ctx.offer.generation.output_logprobs.supported
        )
        return ctx.steady(prompt, max_tokens=6, media=chosen, response=scores)

    async def find_out() -> str:
        try:
            await ctx.generate(request([Item(modality=IMAGE, raw_bytes=RED)]))
        except Refused as refused:
            return str(refused)
        return ""

    if refusal := await ctx.session.learn("image prompt", find_out):
        skip(f"the model does not take this image prompt ({refusal}); give its placeholder by --image-prompt")
    return await ctx.generate(request(items))


def _distance(one: Stream, other: Stream) -> float:
    """How far two outputs are apart: infinitely in their tokens, or else in the tokens' log-probabilities."""
    if one.first.ids != other.first.ids:
        return math.inf
    pairs = zip(one.first.records, other.first.records, strict=True)
    return max((abs(left.logprob - right.logprob) for left, right in pairs), default=0.0)


def _expect_apart(one: Stream, again: Stream, other: Stream, what: str) -> None:
    """Require that `other` is further from `one` than the same request sent `again` is."""
    expect_equal(again.first.ids, one.first.ids, "the output for the same images")
    expect(_distance(one, other) > max(2 * _distance(one, again), NOISE), what)


@case(
    "media.no_source",
    "A media item without a source is INVALID_ARGUMENT.",
    "MEDIA-01",
    "MEDIA-02",
    needs=[needs.TAKES_PROMPTS],
)
async def no_source(ctx: Context) -> None:
    request = ctx.request(media=[Item(modality=IMAGE)])
    await ctx.refused(ctx.rpc.Generate, request, Code.INVALID_ARGUMENT, names="media")


@case(
    "media.undecodable",
    "Bytes that are no image are INVALID_ARGUMENT, and the engine goes on serving.",
    "MEDIA-02",
    "GEN-10",
    needs=[needs.GENERATES],
)
async def undecodable(ctx: Context) -> None:
    for item in (
        Item(modality=IMAGE, raw_bytes=b""),
        Item(modality=IMAGE, raw_bytes=b"this is no image"),
        Item(modality=IMAGE, raw_bytes=RED[:40]),
        Item(modality=IMAGE, data_uri="data:image/png;base64,!!!!"),
        Item(modality=IMAGE, data_uri="no data uri"),
        Item(modality=inputs_pb2.MODALITY_AUDIO, raw_bytes=RED),
        Item(modality=inputs_pb2.MODALITY_VIDEO, raw_bytes=RED),
    ):
        prompt = ctx.options.image_prompt if ctx.offer.info.supports_text_input else None
        request = ctx.request(prompt, media=[item])
        await ctx.refused(ctx.rpc.Generate, request, Code.INVALID_ARGUMENT)
    await ctx.still_serves("GEN-10")


@case(
    "media.url_is_not_fetched",
    "A URL that the server was not told to fetch is INVALID_ARGUMENT, and no connection is opened.",
    "MEDIA-03",
    needs=[needs.TAKES_PROMPTS],
)
async def url_is_not_fetched(ctx: Context) -> None:
    """Listen, and see that nobody calls."""
    callers: list[str] = []

    async def called(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        callers.append(str(writer.get_extra_info("peername")))
        writer.close()

    server = await asyncio.start_server(called, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        for url in (
            f"http://127.0.0.1:{port}/a.png",
            f"http://localhost:{port}/",
            "file:///etc/hostname",
            "ftp://x/y",
        ):
            request = ctx.request(media=[Item(modality=IMAGE, url=url)])
            await ctx.refused(ctx.rpc.Generate, request, Code.INVALID_ARGUMENT)
    expect(not callers, f"the server fetched a URL that it was not told to fetch (from {callers})")


@case(
    "media.image_matters",
    "The output depends on the image, and the same image gives the same output.",
    "MEDIA-01",
    needs=[needs.GENERATES, needs.MULTIMODAL],
    exclusive=True,
)
async def image_matters(ctx: Context) -> None:
    red, blue, again = [await _look(ctx, Item(modality=IMAGE, raw_bytes=data)) for data in (RED, BLUE, RED)]
    _expect_apart(red, again, blue, "a red and a blue image give the same output")


@case(
    "media.sources_agree",
    "Raw bytes and a data URI of one image, with and without its modality, give the same output.",
    "MEDIA-01",
    needs=[needs.GENERATES, needs.MULTIMODAL],
    exclusive=True,
)
async def sources_agree(ctx: Context) -> None:
    uri = f"data:image/png;base64,{base64.b64encode(RED).decode()}"
    raw = await _look(ctx, Item(modality=IMAGE, raw_bytes=RED))
    for item in (
        Item(modality=IMAGE, data_uri=uri),
        Item(raw_bytes=RED),
        Item(modality=IMAGE, raw_bytes=RED, mime_type="image/png"),
    ):
        stream = await _look(ctx, item)
        expect_equal(stream.first.ids, raw.first.ids, "the output for the same image from another source")


@case(
    "media.unknown_modality",
    "A modality that the server does not know is UNSPECIFIED, which is an image.",
    "DISC-12",
    "MEDIA-01",
    needs=[needs.GENERATES, needs.MULTIMODAL],
    exclusive=True,
)
async def unknown_modality(ctx: Context) -> None:
    image = await _look(ctx, Item(modality=IMAGE, raw_bytes=RED))
    unknown = await _look(ctx, Item(modality=99, raw_bytes=RED))  # type: ignore[arg-type]  # on purpose
    expect_equal(unknown.first.ids, image.first.ids, "the output for an image of unknown modality")


@case(
    "media.order",
    "The order of two images is kept.",
    "MEDIA-01",
    needs=[needs.GENERATES, needs.MULTIMODAL],
    exclusive=True,
)
async def order(ctx: Context) -> None:
    red, blue = Item(modality=IMAGE, raw_bytes=RED), Item(modality=IMAGE, raw_bytes=BLUE)
    one = await _look(ctx, red, blue)
    other = await _look(ctx, blue, red)
    again = await _look(ctx, red, blue)
    _expect_apart(one, again, other, "two images in the other order give the same output")


@case(
    "media.usage",
    "prompt_tokens counts what an image becomes.",
    "STREAM-07",
    needs=[needs.GENERATES, needs.MULTIMODAL],
)
async def usage(ctx: Context) -> None:
    stream = await _look(ctx, Item(modality=IMAGE, raw_bytes=RED))
    plain = await ctx.generate(ctx.steady(" The picture shows", max_tokens=1))
    with_image = (stream.usage or generate_pb2.Usage()).prompt_tokens
    without = (plain.usage or generate_pb2.Usage()).prompt_tokens
    expect(with_image > without, f"prompt_tokens is {with_image} with an image and {without} without")
