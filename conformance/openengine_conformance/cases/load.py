# SPDX-License-Identifier: Apache-2.0
"""GetLoad: counts that are true, fresh and cheap."""

from __future__ import annotations

import asyncio
import time

from openengine.v1 import generate_pb2
from openengine_conformance import needs
from openengine_conformance.case import case
from openengine_conformance.checks import expect, expect_equal, expect_unique, fail, skip
from openengine_conformance.context import POLL_INTERVAL, Context

AT_ONCE = 0.5
ATTEMPTS = 5
LOOKS = 10
ROUNDS = 20


@case(
    "load.counts_running",
    "While k requests run running_requests is k, and after they end it is 0.",
    "LOAD-01",
    needs=[needs.GENERATES],
    exclusive=True,
)
async def counts_running(ctx: Context) -> None:
    await ctx.until(ctx.idle, "running_requests is not 0 on an idle server", within=3)
    for count in (1, 2, 3):
        for _ in range(ATTEMPTS):
            if await _counted(ctx, count):
                break
        else:
            fail(f"running_requests did not become {count} with {count} running, in {ATTEMPTS} attempts")


async def _counted(ctx: Context, count: int) -> bool:
    """Whether `count` new requests are counted while they run, which on a fast engine is a moment only."""
    # Nobody reads on: the tokens of a fast engine would keep this side from asking in time.
    streams = await asyncio.gather(*(ctx.started(ctx.endless()) for _ in range(count)))
    counted = False
    for _ in range(LOOKS):
        if counted := (await ctx.load()).running_requests == count:
            break
        await asyncio.sleep(POLL_INTERVAL)
    await asyncio.gather(*(ctx.abort(stream.id) for stream in streams))
    await ctx.until(ctx.idle, "running_requests did not return to 0", within=1.5)
    return counted


@case(
    "load.counts_sequences",
    "After a request of several sequences running_requests is 0 again.",
    "LOAD-01",
    needs=[needs.GENERATES, needs.SEVERAL_SEQUENCES],
    exclusive=True,
)
async def counts_sequences(ctx: Context) -> None:
    sampling = generate_pb2.SamplingParams(num_sequences=2)
    await ctx.generate(ctx.request(max_tokens=3, temperature=1.0, sampling=sampling))
    await ctx.until(ctx.idle, "running_requests did not return to 0", within=1.5)


@case(
    "load.zero_is_present",
    "On an idle server a measured zero is present, not absent.",
    "LOAD-01",
    exclusive=True,
)
async def zero_is_present(ctx: Context) -> None:
    await ctx.until(ctx.idle, "running_requests is not 0 on an idle server", within=3)
    load = await ctx.load()
    expect(load.HasField("running_requests"), "running_requests is absent")
    expect(load.HasField("queued_requests"), "queued_requests is absent")


@case("load.per_rank", "include_per_rank gives one entry for each data-parallel rank.", "LOAD-02")
async def per_rank(ctx: Context) -> None:
    load = await ctx.load(per_rank=True)
    for entry in load.ranks:
        expect(entry.HasField("data_parallel_rank"), "an entry does not name its rank")
    ranks = [entry.data_parallel_rank for entry in load.ranks]
    expect_unique(ranks, "rank")
    expect_equal(sorted(ranks), list(ctx.offer.ranks), "the list of ranks")


@case(
    "load.sums",
    "The ranks' loads add up to the totals.",
    "LOAD-02",
    needs=[needs.GENERATES],
    exclusive=True,
)
async def sums(ctx: Context) -> None:
    await asyncio.gather(*(ctx.started(ctx.endless()) for _ in range(2)))
    for _ in range(5):
        load = await ctx.load(per_rank=True)
        for name in ("running_requests", "queued_requests", "used_kv_blocks", "total_kv_blocks"):
            reported = load.HasField(name)
            if reported and all(entry.HasField(name) for entry in load.ranks):
                total = sum(getattr(entry, name) for entry in load.ranks)
                expect_equal(total, getattr(load, name), f"the sum of {name} over the ranks")


@case("load.kv_blocks", "used_kv_blocks is within total_kv_blocks, which is that of GetModelInfo.", "LOAD-03")
async def kv_blocks(ctx: Context) -> None:
    load = await ctx.load(per_rank=True)
    if not load.HasField("total_kv_blocks"):
        skip("total_kv_blocks is not reported")
    expect(
        load.used_kv_blocks <= load.total_kv_blocks, f"{load.used_kv_blocks} of {load.total_kv_blocks} in use"
    )
    if ctx.offer.info.HasField("total_kv_blocks"):
        expect_equal(load.total_kv_blocks, ctx.offer.info.total_kv_blocks, "total_kv_blocks")
    for entry in load.ranks:
        within = entry.used_kv_blocks <= entry.total_kv_blocks or not entry.HasField("total_kv_blocks")
        expect(
            within, f"rank {entry.data_parallel_rank} uses {entry.used_kv_blocks} of {entry.total_kv_blocks}"
        )


@case(
    "load.kv_blocks_in_use",
    "While a long request runs, used_kv_blocks is above 0.",
    "LOAD-03",
    "LOAD-01",
    needs=[needs.GENERATES],
    exclusive=True,
)
async def kv_blocks_in_use(ctx: Context) -> None:
    if not (await ctx.load()).HasField("used_kv_blocks"):
        skip("used_kv_blocks is not reported")
    await ctx.started(ctx.endless(ctx.unique_prompt(2 * max(ctx.offer.info.kv_block_size, 16))))

    async def in_use() -> bool:
        return (await ctx.load()).used_kv_blocks > 0

    await ctx.until(in_use, "used_kv_blocks did not rise above 0 while a request ran", within=2)


@case("load.instance", "The load names the instance that discovery names.", "DISC-08")
async def instance(ctx: Context) -> None:
    expect_equal((await ctx.load()).instance_id, ctx.offer.engine.instance_id, "instance_id")


@case(
    "load.fresh",
    "The snapshot's time moves on while the engine works.",
    "LOAD-04",
    needs=[needs.GENERATES],
    exclusive=True,
)
async def fresh(ctx: Context) -> None:
    await ctx.started(ctx.endless())
    first = await ctx.load()
    if not first.HasField("timestamp_unix_nanos"):
        skip("timestamp_unix_nanos is not reported")

    async def moved_on() -> bool:
        return (await ctx.load()).timestamp_unix_nanos > first.timestamp_unix_nanos

    await ctx.until(moved_on, "timestamp_unix_nanos did not move on while a request ran", within=1.5)
    latest = (await ctx.load()).timestamp_unix_nanos / 1e9
    expect(latest > 1e9, f"timestamp_unix_nanos is not in nanoseconds since 1970: {latest * 1e9:.0f}")


@case(
    "load.never_waits",
    "GetLoad answers at once while the engine is busy, however often it is asked.",
    "LOAD-04",
    needs=[needs.GENERATES],
    exclusive=True,
)
async def never_waits(ctx: Context) -> None:
    streams = [ctx.open(ctx.endless(ctx.unique_prompt(128))) for _ in range(4)]
    await asyncio.gather(*(stream.accepted() for stream in streams))
    slow = []
    for _ in range(ROUNDS):
        start = time.monotonic()
        await asyncio.gather(*(ctx.load(per_rank=True) for _ in range(5)))
        seconds = time.monotonic() - start
        slow += [seconds] if seconds > AT_ONCE else []
    # A machine that is short of processor time is slow now and then; one that waits for the engine often is.
    expect(
        len(slow) < ROUNDS / 4,
        f"{len(slow)} of {ROUNDS} times five calls at once took up to {max(slow, default=0):.2f} s",
    )
