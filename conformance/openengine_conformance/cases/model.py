# SPDX-License-Identifier: Apache-2.0
"""GetModelInfo: limits and capabilities, and that they are true."""

from __future__ import annotations

from openengine.v1 import generate_pb2, inputs_pb2, model_pb2
from openengine_conformance import needs
from openengine_conformance.case import case
from openengine_conformance.checks import Code, expect, expect_equal, expect_in, skip
from openengine_conformance.context import Context

MOST_SEQUENCES = 16
"""More sequences are not waited for: that they are accepted is enough."""

LIMITS = (
    "max_context_length",
    "max_output_tokens",
    "kv_block_size",
    "total_kv_blocks",
    "max_running_requests",
    "max_batched_tokens",
)


async def _model_info(ctx: Context, name: str = "") -> model_pb2.ModelInfo:
    return await ctx.call(ctx.rpc.GetModelInfo, model_pb2.GetModelInfoRequest(model=name or ctx.offer.model))


@case("model.empty_name", "GetModelInfo without a model is INVALID_ARGUMENT.", "MODEL-01")
async def empty_name(ctx: Context) -> None:
    request = model_pb2.GetModelInfoRequest()
    await ctx.refused(ctx.rpc.GetModelInfo, request, Code.INVALID_ARGUMENT, names="model")


@case("model.unknown_name", "GetModelInfo for an unknown model is NOT_FOUND.", "MODEL-01")
async def unknown_name(ctx: Context) -> None:
    request = model_pb2.GetModelInfoRequest(model="no-such-model")
    await ctx.refused(ctx.rpc.GetModelInfo, request, Code.NOT_FOUND)


@case(
    "model.names", "model_id, served_model_name and every alias get the same GetModelInfo answer.", "MODEL-02"
)
async def names(ctx: Context) -> None:
    info = await _model_info(ctx)
    expect(info.model_id, "model_id is empty")
    for name in ctx.offer.names:
        expect_equal(await _model_info(ctx, name), info, f"the answer for {name!r}")


@case(
    "model.names_in_requests",
    "A request may name the model by model_id, by served_model_name or by any alias.",
    "MODEL-02",
    needs=[needs.GENERATES],
)
async def names_in_requests(ctx: Context) -> None:
    for name in ctx.offer.names:
        request = ctx.request(max_tokens=1)
        request.model = name
        await ctx.generate(request)


@case("model.limits", "Every reported limit is above zero.", "MODEL-03")
async def limits(ctx: Context) -> None:
    info = await _model_info(ctx)
    for name in LIMITS:
        reported = info.HasField(name)  # type: ignore[arg-type]  # the names are fields
        expect(not reported or getattr(info, name) > 0, f"{name} is reported as 0")


@case("model.output_limit", "max_output_tokens is not just the context length again.", "MODEL-04")
async def output_limit(ctx: Context) -> None:
    info = await _model_info(ctx)
    if not (info.HasField("max_output_tokens") and info.HasField("max_context_length")):
        return
    smaller = info.max_output_tokens < info.max_context_length
    expect(smaller, f"max_output_tokens {info.max_output_tokens} is no limit of its own")


@case(
    "model.capabilities",
    "A present capability says whether it is supported, and lists real modes.",
    "MODEL-05",
)
async def capabilities(ctx: Context) -> None:
    generation = (await _model_info(ctx)).generation
    for name, mode_list in (
        ("prompt_logprobs", "candidate_selection_modes"),
        ("output_logprobs", "candidate_selection_modes"),
        ("guided_decoding", "modes"),
    ):
        if not generation.HasField(name):  # type: ignore[arg-type]  # the names above are fields
            continue
        capability = getattr(generation, name)
        modes = list(getattr(capability, mode_list))
        expect(
            capability.HasField("supported"), f"{name} is present and does not say whether it is supported"
        )
        expect(0 not in modes, f"{name} lists the mode UNSPECIFIED")
        expect_equal(len(set(modes)), len(modes), f"the number of different modes of {name}")
        if name == "guided_decoding" and capability.supported:
            expect(modes, "guided_decoding is supported and lists no mode")


@case(
    "model.logprob_capabilities",
    "Prompt and output log-probabilities are reported apart; max_top_n, when present, is above zero.",
    "MODEL-06",
)
async def logprob_capabilities(ctx: Context) -> None:
    generation = (await _model_info(ctx)).generation
    for name in ("prompt_logprobs", "output_logprobs"):
        capability = getattr(generation, name)
        modes = capability.candidate_selection_modes
        if capability.supported:
            expect(modes, f"{name} is supported and lists no candidate selection mode", "MODEL-05")
        expect(not capability.HasField("max_top_n") or capability.max_top_n > 0, f"{name}.max_top_n is 0")


@case(
    "model.input_kinds",
    "Support for text and for token ids is reported, and there is one of them.",
    "MODEL-10",
)
async def input_kinds(ctx: Context) -> None:
    info = await _model_info(ctx)
    expect(info.HasField("supports_text_input"), "supports_text_input is absent")
    expect(info.HasField("supports_token_ids_input"), "supports_token_ids_input is absent")
    expect(
        info.supports_text_input or info.supports_token_ids_input,
        "the model takes neither text nor token ids",
    )


@case(
    "model.sequences_reported",
    "An engine that serves several sequences reports max_num_sequences; one that does not rejects two.",
    "MODEL-10",
    "MODEL-07",
    needs=[needs.GENERATES, ~needs.SEVERAL_SEQUENCES],
)
async def sequences_reported(ctx: Context) -> None:
    request = ctx.request(temperature=1.0, sampling=generate_pb2.SamplingParams(num_sequences=2))
    await ctx.refused(ctx.rpc.Generate, request, Code.INVALID_ARGUMENT, names="num_sequences")


@case(
    "model.max_num_sequences",
    "max_num_sequences is served, and one more is rejected by name.",
    "MODEL-09",
    needs=[needs.GENERATES, needs.SEVERAL_SEQUENCES],
)
async def max_num_sequences(ctx: Context) -> None:
    most = ctx.offer.max_sequences
    over = ctx.request(temperature=1.0, sampling=generate_pb2.SamplingParams(num_sequences=most + 1))
    await ctx.refused(ctx.rpc.Generate, over, Code.INVALID_ARGUMENT, names="num_sequences")
    full = ctx.steady(max_tokens=1, temperature=1.0, sampling=generate_pb2.SamplingParams(num_sequences=most))
    stream = ctx.open(full)
    await stream.accepted()
    if most <= MOST_SEQUENCES:
        await stream.rest()
        expect_equal(sorted(stream.outputs), list(range(most)), "the list of output indexes")


@case(
    "model.everything_at_once",
    "One request that uses every advertised scalar option is served.",
    "MODEL-07",
    needs=[needs.GENERATES],
)
async def everything_at_once(ctx: Context) -> None:
    generation = ctx.offer.generation
    request = ctx.request(max_tokens=2)
    if generation.supports_priority:
        request.priority = 1
    if generation.supports_stop_in_output:
        request.stopping.include_stop_in_output = True
    if generation.supports_cache_salt:
        request.kv.cache_salt = "pepper"
    if generation.supports_prefix_cache_bypass:
        request.kv.bypass_prefix_cache = True
    if generation.output_logprobs.supported:
        request.response.return_output_logprobs = True
    await ctx.generate(request)


@case(
    "model.neutral_values",
    "An option that is not advertised may still be sent with the value that asks for nothing.",
    "MODEL-07",
    needs=[needs.GENERATES],
)
async def neutral_values(ctx: Context) -> None:
    request = ctx.request(max_tokens=2)
    request.stopping.include_stop_in_output = False
    request.kv.bypass_prefix_cache = False
    request.response.return_prompt_logprobs = False
    request.response.return_output_logprobs = False
    await ctx.generate(request)


@case(
    "model.text_unadvertised",
    "Text is rejected by an engine that takes only token ids.",
    "MODEL-07",
    needs=[needs.TAKES_PROMPTS, ~needs.TEXT],
)
async def text_unadvertised(ctx: Context) -> None:
    await ctx.refused(ctx.rpc.Generate, ctx.request("Hello"), Code.INVALID_ARGUMENT, names="prompt|text")


@case(
    "model.token_ids_unadvertised",
    "Token ids are rejected by an engine that takes only text.",
    "MODEL-07",
    needs=[needs.TAKES_PROMPTS, ~needs.TOKEN_IDS],
)
async def token_ids_unadvertised(ctx: Context) -> None:
    await ctx.refused(ctx.rpc.Generate, ctx.request([40, 41]), Code.INVALID_ARGUMENT, names="token_ids")


@case(
    "model.priority_unadvertised",
    "priority is rejected by name when it is not advertised.",
    "MODEL-07",
    "GEN-09",
    needs=[needs.TAKES_PROMPTS, ~needs.PRIORITY],
)
async def priority_unadvertised(ctx: Context) -> None:
    await ctx.refused(ctx.rpc.Generate, ctx.request(priority=1), Code.INVALID_ARGUMENT, names="priority")


@case(
    "model.stop_in_output_unadvertised",
    "include_stop_in_output is rejected by name when it is not advertised.",
    "MODEL-07",
    needs=[needs.TAKES_PROMPTS, ~needs.STOP_IN_OUTPUT],
)
async def stop_in_output_unadvertised(ctx: Context) -> None:
    request = ctx.request(stopping=generate_pb2.StoppingOptions(include_stop_in_output=True))
    await ctx.refused(ctx.rpc.Generate, request, Code.INVALID_ARGUMENT, names="include_stop_in_output")


@case(
    "model.cache_salt_unadvertised",
    "cache_salt is rejected by name when it is not advertised.",
    "MODEL-07",
    needs=[needs.TAKES_PROMPTS, ~needs.CACHE_SALT],
)
async def cache_salt_unadvertised(ctx: Context) -> None:
    request = ctx.request(kv=generate_pb2.KvOptions(cache_salt="pepper"))
    await ctx.refused(ctx.rpc.Generate, request, Code.INVALID_ARGUMENT, names="cache_salt")


@case(
    "model.cache_bypass_unadvertised",
    "bypass_prefix_cache is rejected by name when it is not advertised.",
    "MODEL-07",
    needs=[needs.TAKES_PROMPTS, ~needs.CACHE_BYPASS],
)
async def cache_bypass_unadvertised(ctx: Context) -> None:
    request = ctx.request(kv=generate_pb2.KvOptions(bypass_prefix_cache=True))
    await ctx.refused(ctx.rpc.Generate, request, Code.INVALID_ARGUMENT, names="bypass_prefix_cache")


@case(
    "model.prompt_logprobs_unadvertised",
    "Prompt log-probabilities are rejected by name when they are not advertised.",
    "MODEL-07",
    "MODEL-06",
    needs=[needs.TAKES_PROMPTS, ~needs.PROMPT_LOGPROBS],
)
async def prompt_logprobs_unadvertised(ctx: Context) -> None:
    request = ctx.request(response=generate_pb2.ResponseOptions(return_prompt_logprobs=True))
    await ctx.refused(ctx.rpc.Generate, request, Code.INVALID_ARGUMENT, names="prompt_logprobs")


@case(
    "model.output_logprobs_unadvertised",
    "Output log-probabilities are rejected by name when they are not advertised.",
    "MODEL-07",
    "MODEL-06",
    needs=[needs.TAKES_PROMPTS, ~needs.OUTPUT_LOGPROBS],
)
async def output_logprobs_unadvertised(ctx: Context) -> None:
    request = ctx.request(response=generate_pb2.ResponseOptions(return_output_logprobs=True))
    await ctx.refused(ctx.rpc.Generate, request, Code.INVALID_ARGUMENT, names="output_logprobs")


@case(
    "model.media_unadvertised",
    "Media is rejected by name when multimodal input is not advertised.",
    "MODEL-07",
    "MEDIA-02",
    needs=[needs.TAKES_PROMPTS, ~needs.MULTIMODAL],
)
async def media_unadvertised(ctx: Context) -> None:
    item = inputs_pb2.MediaItem(modality=inputs_pb2.MODALITY_IMAGE, raw_bytes=b"\x89PNG\r\n\x1a\n")
    await ctx.refused(ctx.rpc.Generate, ctx.request(media=[item]), Code.INVALID_ARGUMENT, names="media")


GUIDES: dict[int, generate_pb2.GuidedDecoding] = {
    model_pb2.GUIDED_DECODING_MODE_JSON_SCHEMA: generate_pb2.GuidedDecoding(
        json_schema='{"type": "boolean"}'
    ),
    model_pb2.GUIDED_DECODING_MODE_REGEX: generate_pb2.GuidedDecoding(regex="[ab]"),
    model_pb2.GUIDED_DECODING_MODE_EBNF_GRAMMAR: generate_pb2.GuidedDecoding(ebnf_grammar='root ::= "a"'),
    model_pb2.GUIDED_DECODING_MODE_STRUCTURAL_TAG: generate_pb2.GuidedDecoding(
        structural_tag='{"type": "structural_tag", "format": {"type": "any_text"}}'
    ),
    model_pb2.GUIDED_DECODING_MODE_CHOICE: generate_pb2.GuidedDecoding(
        choice=generate_pb2.ChoiceConstraint(choices=["a", "b"])
    ),
    model_pb2.GUIDED_DECODING_MODE_JSON_OBJECT: generate_pb2.GuidedDecoding(
        json_object=generate_pb2.JsonObjectConstraint()
    ),
}


@case(
    "model.guides_unadvertised",
    "Each guided-decoding mode that is not advertised is rejected by name.",
    "MODEL-07",
    needs=[needs.TAKES_PROMPTS],
)
async def guides_unadvertised(ctx: Context) -> None:
    missing = {mode: guide for mode, guide in GUIDES.items() if not ctx.offer.guided(mode)}
    if not missing:
        skip("every guided mode is advertised")
    for guide in missing.values():
        field = guide.WhichOneof("guide") or ""
        request = ctx.request(guided=guide)
        await ctx.refused(ctx.rpc.Generate, request, Code.INVALID_ARGUMENT, names=f"guided|{field}")


@case(
    "model.stable",
    "GetModelInfo answers the same at every asking.",
    "MODEL-03",
)
async def stable(ctx: Context) -> None:
    expect_equal(await _model_info(ctx), ctx.offer.info, "GetModelInfo at a later asking")
    for mode in ctx.offer.generation.guided_decoding.modes:
        expect_in(mode, model_pb2.GuidedDecodingMode.values(), "an advertised guided mode", "MODEL-05")
