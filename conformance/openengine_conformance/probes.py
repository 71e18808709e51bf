# SPDX-License-Identifier: Apache-2.0
"""What several cases must find out about the model before they can ask anything of it. Each is found out once."""

from __future__ import annotations

from openengine.v1 import generate_pb2, model_pb2
from openengine_conformance.checks import Refused, fail, skip
from openengine_conformance.context import Context
from openengine_conformance.stream import Stream

BASELINE_TOKENS = 12
UNSHOWABLE = "\ufffd"
CHANCE = 3
"""Tokens that a random prompt may share with an earlier one: felt where a cache block is one token long."""


async def baseline(ctx: Context) -> Stream:
    """A greedy run of the standard prompt: what the same request gives again, whatever the model.

    It runs twice: the second one finds the prompt cached, as every later run will.
    """

    async def find_out() -> Stream:
        await ctx.generate(ctx.steady(max_tokens=BASELINE_TOKENS))
        return await ctx.generate(ctx.steady(max_tokens=BASELINE_TOKENS))

    stream = await ctx.session.learn("baseline", find_out)
    if stream.exchange not in ctx.exchanges:
        ctx.exchanges.append(stream.exchange)
    return stream


async def eos(ctx: Context) -> int:
    """The model's EOS token; skips when no request makes the model end by itself."""

    async def find_out() -> int | None:
        for request in requests_that_may_end(ctx):
            stream = await ctx.generate(request)
            if stream.finish.stop_match.HasField("eos_token_id"):
                return stream.finish.stop_match.eos_token_id
        return None

    found = await ctx.session.learn("eos", find_out)
    if found is None:
        skip("nothing made the model end by itself")
    return found


def requests_that_may_end(ctx: Context) -> list[generate_pb2.GenerateRequest]:
    """Requests that a model is likely to end by EOS; the first one surely, where guides are served."""
    requests = []
    if ctx.offer.guided(model_pb2.GUIDED_DECODING_MODE_CHOICE):
        # When the choice is complete, a guide leaves nothing but EOS.
        choice = generate_pb2.ChoiceConstraint(choices=["yes"])
        requests.append(ctx.request(max_tokens=16, guided=generate_pb2.GuidedDecoding(choice=choice)))
    if ctx.offer.info.supports_text_input:
        prompts = ("Question: What is two plus two? Answer with one word.\nAnswer:", "The end.")
        requests += [ctx.request(prompt, max_tokens=16) for prompt in prompts]
    return requests


async def prompt_ids(ctx: Context, text: str) -> list[int]:
    """The token ids of a text prompt, as the server's own prompt records tell; skips when there are none."""

    async def find_out() -> list[int]:
        options = generate_pb2.ResponseOptions(return_prompt_logprobs=True)
        stream = await ctx.generate(ctx.request(text, max_tokens=1, response=options))
        return [record.token_id for record in stream.prompt.tokens] if stream.prompt else []

    if not (ctx.offer.generation.prompt_logprobs.supported and ctx.offer.info.supports_text_input):
        skip("only prompt records tell the token ids of a text, and they are not advertised")
    return await ctx.session.learn(f"prompt_ids {text}", find_out)


async def require_cache_reports(ctx: Context) -> int:
    """How many tokens make a prompt cacheable; skips when the engine shows no prefix caching."""

    async def find_out() -> int | None:
        size = max(ctx.offer.info.kv_block_size, 16) * 2 + 8
        prompt = ctx.unique_prompt(size)
        first = await ctx.generate(ctx.request(prompt, max_tokens=1))
        again = await ctx.generate(ctx.request(prompt, max_tokens=1))
        before, after = cached(first), cached(again)
        if before is None or after is None:
            return None
        return size if before <= CHANCE < after else None

    found = await ctx.session.learn("prefix cache", find_out)
    if found is None:
        skip("a repeated prompt shows no cached_prompt_tokens: the prefix cache is off or not reported")
    return found


def cached(stream: Stream) -> int | None:
    """The request's cached prompt tokens, None when not reported."""
    usage = stream.usage
    return usage.cached_prompt_tokens if usage and usage.HasField("cached_prompt_tokens") else None


async def require_seeds(ctx: Context) -> None:
    """Skip when the engine, as configured, rejects an explicit seed."""

    async def find_out() -> str:
        sampling = generate_pb2.SamplingParams(seed=1)
        try:
            await ctx.generate(ctx.request(max_tokens=1, temperature=1.0, sampling=sampling))
        except Refused as refused:
            return str(refused)
        return ""

    if refusal := await ctx.session.learn("seeds", find_out):
        if not ("INVALID_ARGUMENT" in refusal and "seed" in refusal):
            fail(f"a seed is neither served nor rejected by name: {refusal}", "SAMP-03")
        skip("the engine rejects seeds as it is configured")
