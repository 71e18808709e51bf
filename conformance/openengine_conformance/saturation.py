# SPDX-License-Identifier: Apache-2.0
"""Filling an engine, so that further requests have to wait: what the order of a queue needs to be seen."""

from __future__ import annotations

import asyncio

from openengine.v1 import generate_pb2, lifecycle_pb2
from openengine_conformance.checks import Skip, expect, skip
from openengine_conformance.context import Context
from openengine_conformance.stream import Stream

MOST_RUNNING = 16
PATIENCE_WITH_QUEUE = 0.5
"""Seconds without a first token, after which a queue that is not empty says that the request waits in it."""


async def fill(ctx: Context, *, priority: int | None = None) -> list[Stream]:
    """Start endless requests until one has to wait, and take that one back; skips when none does."""
    if not (await ctx.load()).HasField("queued_requests"):
        skip("queued_requests is not reported, so nobody can tell a request that waits")
    if ctx.offer.info.max_running_requests > MOST_RUNNING * len(ctx.offer.ranks):
        skip(f"{ctx.offer.info.max_running_requests} running requests are too many to fill the engine with")
    running: list[Stream] = []
    while len(running) < MOST_RUNNING:
        request = on_one_rank(ctx, ctx.endless())
        if priority is not None:
            request.priority = priority
        stream = ctx.open(request)
        if not await _starts(ctx, stream):
            stream.cancel()
            return running
        running.append(stream)
    raise Skip(f"{MOST_RUNNING} requests at once don't fill the engine")


async def _starts(ctx: Context, stream: Stream) -> bool:
    """Whether the request gets a token, or else waits in the queue."""
    first_token = asyncio.ensure_future(stream.wait_tokens())
    try:
        while not (await asyncio.wait({first_token}, timeout=PATIENCE_WITH_QUEUE))[0]:
            if (await ctx.load()).queued_requests > 0:
                return False
        await first_token
        return True
    finally:
        first_token.cancel()
        await asyncio.gather(first_token, return_exceptions=True)


def on_one_rank(ctx: Context, request: generate_pb2.GenerateRequest) -> generate_pb2.GenerateRequest:
    """Pin a request to the rank that is being filled."""
    if len(ctx.offer.ranks) > 1:
        request.kv.data_parallel_rank = ctx.offer.ranks.start
    return request


async def expect_first_to_start(expected: Stream, other: Stream) -> None:
    """Require that of two waiting requests `expected` gets a token first."""
    winner = asyncio.ensure_future(expected.wait_tokens())
    loser = asyncio.ensure_future(other.wait_tokens())
    started: list[asyncio.Future[None]] = []
    for task in (winner, loser):
        # Both may have started before this is asked again, so that the order is noted as they come.
        task.add_done_callback(started.append)
    try:
        await asyncio.wait({winner, loser}, return_when=asyncio.FIRST_COMPLETED)
        expect(started[0] is winner, "the request of the smaller priority was started first")
    finally:
        for task in (winner, loser):
            task.cancel()
        await asyncio.gather(winner, loser, return_exceptions=True)


async def end_all(ctx: Context, streams: list[Stream]) -> None:
    """End requests that would run for long."""
    for stream in streams:
        if stream.open:
            stream.cancel()
    aborts = (ctx.call(ctx.rpc.Abort, lifecycle_pb2.AbortRequest(request_id=s.id)) for s in streams)
    await asyncio.gather(*aborts, return_exceptions=True)
