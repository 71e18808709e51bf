# SPDX-License-Identifier: Apache-2.0
"""KvOptions of a request: the prefix cache and the data-parallel rank."""

from __future__ import annotations

from openengine.v1 import generate_pb2
from openengine_conformance import needs, probes
from openengine_conformance.case import case
from openengine_conformance.checks import Code, expect, expect_equal, skip
from openengine_conformance.context import Context

Options = generate_pb2.KvOptions


async def _cached(
    ctx: Context, prompt: str | list[int], options: generate_pb2.KvOptions | None = None
) -> int:
    stream = await ctx.generate(ctx.request(prompt, max_tokens=1, kv=options))
    count = probes.cached(stream)
    expect(count is not None, "cached_prompt_tokens is absent, though other requests report it", "STREAM-07")
    return count or 0


@case(
    "kv_options.bypass_reads_nothing",
    "bypass_prefix_cache computes the whole prompt anew: cached_prompt_tokens is 0.",
    "KVOPT-01",
    needs=[needs.GENERATES, needs.CACHE_BYPASS],
    exclusive=True,
)
async def bypass_reads_nothing(ctx: Context) -> None:
    prompt = ctx.unique_prompt(await probes.require_cache_reports(ctx))
    await _cached(ctx, prompt)
    expect_equal(await _cached(ctx, prompt, Options(bypass_prefix_cache=True)), 0, "cached_prompt_tokens")
    plain = await _cached(ctx, prompt, Options(bypass_prefix_cache=False))
    expect(plain > probes.CHANCE, "bypass_prefix_cache=false reads no cached prefix either")


@case(
    "kv_options.bypass_fills_cache",
    "The blocks that a bypassing request computes can be hit by a later one.",
    "KVOPT-01",
    needs=[needs.GENERATES, needs.CACHE_BYPASS],
    exclusive=True,
)
async def bypass_fills_cache(ctx: Context) -> None:
    prompt = ctx.unique_prompt(await probes.require_cache_reports(ctx))
    await _cached(ctx, prompt, Options(bypass_prefix_cache=True))
    expect(await _cached(ctx, prompt) > probes.CHANCE, "the blocks of a bypassing request were not cached")


@case(
    "kv_options.bypass_same_output",
    "bypass_prefix_cache changes the work, not the output.",
    "KVOPT-01",
    needs=[needs.GENERATES, needs.CACHE_BYPASS],
    exclusive=True,
)
async def bypass_same_output(ctx: Context) -> None:
    plain = await ctx.generate(ctx.steady())
    stream = await ctx.generate(ctx.steady(kv=Options(bypass_prefix_cache=True)))
    expect_equal(stream.first.ids, plain.first.ids, "the output with bypass_prefix_cache")


@case(
    "kv_options.salts_separate",
    "Requests with different salts, or with and without one, share no cached prefix.",
    "KVOPT-02",
    needs=[needs.GENERATES, needs.CACHE_SALT],
    exclusive=True,
)
async def salts_separate(ctx: Context) -> None:
    prompt = ctx.unique_prompt(await probes.require_cache_reports(ctx))
    salt = ctx.new_id()
    await _cached(ctx, prompt, Options(cache_salt=salt))
    for other in (f"{salt}x", salt[:-1], salt.upper()):
        count = await _cached(ctx, prompt, Options(cache_salt=other))
        expect(count <= probes.CHANCE, f"{count} tokens are cached for another salt")
    count = await _cached(ctx, prompt)
    expect(count <= probes.CHANCE, f"{count} tokens are cached without the salt")


@case(
    "kv_options.same_salt_shares",
    "Requests with the same salt share cached prefixes.",
    "KVOPT-02",
    needs=[needs.GENERATES, needs.CACHE_SALT],
    exclusive=True,
)
async def same_salt_shares(ctx: Context) -> None:
    prompt = ctx.unique_prompt(await probes.require_cache_reports(ctx))
    salt = ctx.new_id()
    await _cached(ctx, prompt, Options(cache_salt=salt))
    shared = await _cached(ctx, prompt, Options(cache_salt=salt))
    expect(shared > probes.CHANCE, "the second request with the same salt found nothing cached")


@case(
    "kv_options.rank_out_of_range",
    "A data_parallel_rank that the server does not have is INVALID_ARGUMENT.",
    "KVOPT-03",
    needs=[needs.TAKES_PROMPTS],
)
async def rank_out_of_range(ctx: Context) -> None:
    for rank in (ctx.offer.ranks.stop, ctx.offer.ranks.stop + 1000):
        request = ctx.request(kv=Options(data_parallel_rank=rank))
        await ctx.refused(ctx.rpc.Generate, request, Code.INVALID_ARGUMENT, names="data_parallel_rank")


@case(
    "kv_options.every_rank_serves",
    "Every data-parallel rank that the server has can be chosen.",
    "KVOPT-03",
    needs=[needs.GENERATES],
)
async def every_rank_serves(ctx: Context) -> None:
    await ctx.generate_all(
        *(ctx.request(max_tokens=2, kv=Options(data_parallel_rank=rank)) for rank in ctx.offer.ranks)
    )


@case(
    "kv_options.rank_is_used",
    "A request with a data_parallel_rank runs on that rank.",
    "KVOPT-03",
    needs=[needs.GENERATES],
    exclusive=True,
)
async def rank_is_used(ctx: Context) -> None:
    if len(ctx.offer.ranks) < 2:
        skip("the server has one data-parallel rank")
    for rank in ctx.offer.ranks:
        stream = await ctx.started(ctx.endless(kv=Options(data_parallel_rank=rank)))

        async def runs_there(rank: int = rank) -> bool:
            ranks = (await ctx.load(per_rank=True)).ranks
            return {r.data_parallel_rank: r.running_requests for r in ranks if r.running_requests} == {
                rank: 1
            }

        await ctx.until(runs_there, f"the load did not show one request on rank {rank} alone", within=2)
        stream.cancel()
        await ctx.until(ctx.idle, "the cancelled request still runs", "STREAM-11", within=2)
