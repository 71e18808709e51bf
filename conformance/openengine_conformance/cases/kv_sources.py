# SPDX-License-Identifier: Apache-2.0
"""GetKvEventSources: where KV events can really be had."""

from __future__ import annotations

import asyncio
import ipaddress

from openengine.v1 import kv_pb2
from openengine_conformance import needs
from openengine_conformance.case import case
from openengine_conformance.checks import Code, expect, expect_equal, expect_in, expect_unique, fail, skip
from openengine_conformance.context import Context
from openengine_conformance.zmtp import NotZmq, subscribe

Request = kv_pb2.GetKvEventSourcesRequest
WILDCARDS = {"", "*", "0.0.0.0", "::", "[::]", "0"}
REACH_TIMEOUT = 5.0


async def _sources(ctx: Context, *ranks: int) -> list[kv_pb2.KvEventSource]:
    answer = await ctx.call(ctx.rpc.GetKvEventSources, Request(data_parallel_ranks=ranks))
    return list(answer.sources)


async def _some(ctx: Context, transport: str = "") -> list[kv_pb2.KvEventSource]:
    sources = [source for source in await _sources(ctx) if transport in ("", source.transport)]
    if not sources:
        skip(f"no {transport or 'KV event'} source is listed")
    return sources


def is_wildcard(host: str) -> bool:
    """Whether a host is one to bind to, not one to connect to."""
    try:
        return host in WILDCARDS or ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return False


@case("kv_sources.answer", "GetKvEventSources answers, with known transports.", "KVS-01")
async def answer(ctx: Context) -> None:
    for source in await _sources(ctx):
        expect_in(source.transport, ("grpc", "zmq"), "transport")
        expect(source.encoding, f"the {source.transport} source has no encoding")


@case("kv_sources.routable", "endpoint_addr is an address to connect to, never one to bind to.", "KVS-01")
async def routable(ctx: Context) -> None:
    for source in await _some(ctx):
        if source.transport == "grpc" and not source.HasField("endpoint_addr"):
            continue
        host, port = source.endpoint_addr.host, source.endpoint_addr.port
        expect(not is_wildcard(host), f"the host of a {source.transport} source is {host!r}")
        expect("://" not in host and "/" not in host, f"the host of a {source.transport} source is {host!r}")
        expect(1 <= port <= 65535, f"the port of a {source.transport} source is {port}")
        replay = source.replay_endpoint.rpartition("://")[2].rpartition(":")[0]
        expect(
            not source.replay_endpoint or not is_wildcard(replay),
            f"replay_endpoint is {source.replay_endpoint!r}",
        )


@case("kv_sources.exists", "Something listens where a source says it is.", "KVS-01")
async def exists(ctx: Context) -> None:
    for source in await _some(ctx):
        if not source.HasField("endpoint_addr"):
            continue
        host, port = source.endpoint_addr.host, source.endpoint_addr.port
        try:
            async with asyncio.timeout(REACH_TIMEOUT):
                _, writer = await asyncio.open_connection(host, port)
            writer.close()
        except (OSError, TimeoutError) as error:
            fail(f"nothing answers at {host}:{port}, where a {source.transport} source should be: {error!r}")


@case(
    "kv_sources.ranks", "Each source names its rank, which the server has, once for each transport.", "KVS-03"
)
async def ranks(ctx: Context) -> None:
    sources = await _some(ctx)
    for source in sources:
        expect(source.HasField("data_parallel_rank"), "a source does not name its rank")
        expect_in(source.data_parallel_rank, ctx.offer.ranks, "data_parallel_rank")
    expect_unique([(s.data_parallel_rank, s.transport) for s in sources], "the (rank, transport)")
    covered = {source.data_parallel_rank for source in sources}
    expect_equal(covered, set(ctx.offer.ranks), "the set of ranks with a source", "KVS-01")


@case("kv_sources.filter", "The rank filter filters; an empty one is all.", "KVS-01")
async def filtered(ctx: Context) -> None:
    every = await _some(ctx)
    for rank in ctx.offer.ranks:
        expected = [source for source in every if source.data_parallel_rank == rank]
        expect_equal(await _sources(ctx, rank), expected, f"the list of sources of rank {rank}")


@case("kv_sources.unknown_rank", "A rank that the server does not have is INVALID_ARGUMENT.", "KVS-01")
async def unknown_rank(ctx: Context) -> None:
    for unknown in (ctx.offer.ranks.stop, 2**31):
        request = Request(data_parallel_ranks=[ctx.offer.ranks.start, unknown])
        await ctx.refused(ctx.rpc.GetKvEventSources, request, Code.INVALID_ARGUMENT, names="rank")


@case(
    "kv_sources.native_parameters",
    "A native ZMQ source carries encoding, buffer, HWM and queue size.",
    "KVS-02",
)
async def native_parameters(ctx: Context) -> None:
    for source in await _some(ctx, "zmq"):
        expect(source.HasField("endpoint_addr"), "a zmq source has no endpoint_addr")
        for name in ("schema_version", "buffer_steps", "hwm", "max_queue_size"):
            expect(source.HasField(name), f"a zmq source does not tell its {name}")


@case(
    "kv_sources.native_is_readable",
    "A plain ZMQ subscriber gets batches from a native source: topic, 8 bytes of sequence number, payload.",
    "KVS-02",
    needs=[needs.GENERATES],
    exclusive=True,
)
async def native_is_readable(ctx: Context) -> None:
    source = (await _some(ctx, "zmq"))[0]
    host, port = source.endpoint_addr.host, source.endpoint_addr.port
    try:
        async with asyncio.timeout(15), subscribe(host, port, source.topic) as subscriber:
            message = asyncio.ensure_future(subscriber.message())
            try:
                while not message.done():
                    # A subscription takes effect when it arrives, so work goes on until an event is seen.
                    await ctx.generate(ctx.request(ctx.unique_prompt(_whole_blocks(ctx)), max_tokens=1))
                frames = await message
            finally:
                message.cancel()
    except (OSError, TimeoutError, NotZmq) as error:
        fail(f"no batch could be read from tcp://{host}:{port} (topic {source.topic!r}): {error!r}")
    expect_equal(len(frames), 3, "the number of frames of a message")
    expect(frames[0].decode(errors="replace").startswith(source.topic), f"the topic frame is {frames[0]!r}")
    expect_equal(len(frames[1]), 8, "the length of the sequence frame")
    expect(frames[2], "the payload is empty")


def _whole_blocks(ctx: Context) -> int:
    return max(ctx.offer.info.kv_block_size, 16) * 2 + 2
