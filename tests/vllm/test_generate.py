"""Generate on the real engine: sampling, log-probabilities, guides and KV options, each honoured."""

from __future__ import annotations

import json
import re

import grpc
import pytest

from openengine.v1 import generate_pb2, inputs_pb2
from tests.support import split_prompt
from tests.support.wire import Wire

pytestmark = pytest.mark.asyncio(loop_scope="session")

Sampling, Stopping = generate_pb2.SamplingParams, generate_pb2.StoppingOptions
Response, Select = generate_pb2.ResponseOptions, generate_pb2.CandidateTokenSelection
Guided, Kv = generate_pb2.GuidedDecoding, generate_pb2.KvOptions
INVALID = grpc.StatusCode.INVALID_ARGUMENT


async def test_greedy_repeats_and_token_ids_equal_text(smol: Wire) -> None:
    """SAMP-01, GEN-06."""
    ids = smol.engine.llm.get_tokenizer().encode("The capital of France is")
    runs = [await smol.generate(), await smol.generate(), await smol.generate(ids)]
    assert {tuple(run.first.ids) for run in runs} == {tuple(runs[0].first.ids)}
    assert "Paris" in runs[0].first.text


@pytest.mark.parametrize("seed", [0, 1, 2**63, 2**64 - 1])
async def test_a_seed_repeats_and_makes_sequences_differ(tiny: Wire, seed: int) -> None:
    """SAMP-03, SAMP-04: the whole uint64 range."""
    sampling = Sampling(temperature=1.0, seed=seed, num_sequences=3)
    first, second = [await tiny.generate(sampling=sampling) for _ in range(2)]
    assert [o.ids for _, o in sorted(first.outputs.items())] == [
        o.ids for _, o in sorted(second.outputs.items())
    ]
    assert len({tuple(output.ids) for output in first.outputs.values()}) == 3


async def test_another_seed_and_no_seed_give_other_outputs(tiny: Wire) -> None:
    """SAMP-03."""
    seeds = [Sampling(temperature=1.0, seed=1), Sampling(temperature=1.0, seed=2)]
    unseeded = [Sampling(temperature=1.0), Sampling(temperature=1.0)]
    outputs = {tuple((await tiny.generate(sampling=s)).first.ids) for s in seeds + unseeded}
    assert len(outputs) == 4


async def test_large_seeds_that_agree_in_their_low_bits_give_other_outputs(tiny: Wire) -> None:
    """SAMP-03: never cut short, though PyTorch on a CPU would."""
    seeds = [3, 3 + 2**32, 3 + 2**63, 2**64 - 1]
    outputs = {
        tuple((await tiny.generate(sampling=Sampling(temperature=1.0, seed=s))).first.ids) for s in seeds
    }
    assert len(outputs) == len(seeds)
    several = Sampling(temperature=1.0, seed=2**64 - 1, num_sequences=2)
    assert sorted((await tiny.generate(sampling=several)).outputs) == [0, 1]


@pytest.mark.parametrize("top_k", [0, -1])
async def test_top_k_zero_and_minus_one_mean_no_limit(tiny: Wire, top_k: int) -> None:
    """SAMP-02."""
    unlimited = await tiny.generate(sampling=Sampling(temperature=1.0, seed=7))
    answer = await tiny.generate(sampling=Sampling(temperature=1.0, seed=7, top_k=top_k))
    assert answer.first.ids == unlimited.first.ids


@pytest.mark.parametrize("narrow", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}], ids=str)
async def test_sampling_options_reach_the_engine(tiny: Wire, narrow: dict[str, float]) -> None:
    """SAMP-01, MODEL-07: each, at its narrowest, makes sampling greedy."""
    greedy = await tiny.generate()
    answer = await tiny.generate(sampling=Sampling(temperature=1.0, seed=5, **narrow))  # type: ignore[arg-type]  # by name
    assert answer.first.ids == greedy.first.ids


@pytest.mark.parametrize("penalty", ["frequency_penalty", "presence_penalty", "repetition_penalty"])
async def test_penalties_reach_the_engine(tiny: Wire, penalty: str) -> None:
    """MODEL-07: each changes a greedy output that repeats itself."""
    greedy = await tiny.generate()
    answer = await tiny.generate(sampling=Sampling(temperature=0.0, **{penalty: 2.0}))  # type: ignore[arg-type]  # by name
    assert answer.first.ids != greedy.first.ids


async def test_a_temperature_that_vllm_would_change_is_refused(tiny: Wire) -> None:
    """MODEL-07: honoured exactly or refused by name."""
    for temperature in (0.001, 2.5):
        code, message = await tiny.refused(sampling=Sampling(temperature=temperature))
        assert code is INVALID and message.startswith("sampling.temperature")


async def test_several_greedy_sequences_are_refused(tiny: Wire) -> None:
    """SAMP-05."""
    code, message = await tiny.refused(sampling=Sampling(temperature=0.0, num_sequences=2))
    assert code is INVALID and message.startswith("sampling.num_sequences")


async def test_usage_counts_text_prompts_and_every_sequence(tiny: Wire) -> None:
    """STREAM-06, STREAM-07."""
    answer = await tiny.generate(sampling=Sampling(temperature=1.0, num_sequences=3), max_tokens=5)
    usage = answer.usage
    assert usage.prompt_tokens == 5
    assert usage.completion_tokens == sum(len(output.ids) for output in answer.outputs.values())
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.HasField("cached_prompt_tokens")


async def test_top_n_gives_exactly_the_n_best_also_when_the_token_is_not_among_them(tiny: Wire) -> None:
    """RESP-03, RESP-04."""
    answer = await tiny.generate(
        sampling=Sampling(temperature=2.0, seed=1),
        response=Response(return_output_logprobs=True, output_candidates=Select(top_n=3)),
    )
    outside = 0
    for token in answer.first.tokens:
        assert token.HasField("logprob") and token.HasField("rank") and token.token
        assert [candidate.rank for candidate in token.candidates] == [1, 2, 3]
        logprobs = [candidate.logprob for candidate in token.candidates]
        assert logprobs == sorted(logprobs, reverse=True)
        outside += token.rank > 3
    assert outside


@pytest.mark.parametrize("candidates", [None, Select(top_n=0)], ids=["absent", "zero"])
async def test_no_candidates(tiny: Wire, candidates: generate_pb2.CandidateTokenSelection | None) -> None:
    """RESP-04; RESP-09: greedy records have rank 1, or that of the last of several equals."""
    answer = await tiny.generate(response=Response(return_output_logprobs=True, output_candidates=candidates))
    for token in answer.first.tokens:
        assert token.rank in (1, 2) and token.HasField("logprob") and not token.candidates


async def test_explicit_candidates_come_in_the_order_asked_without_false_ranks(tiny: Wire) -> None:
    """RESP-05: the record keeps its own rank, also when its token is one of those asked for."""
    greedy = (await tiny.generate()).first.ids[0]
    asked = [7, greedy, 3]
    response = Response(
        return_output_logprobs=True, output_candidates=Select(token_ids=inputs_pb2.TokenIds(ids=asked))
    )
    for token in (await tiny.generate(response=response)).first.tokens:
        assert token.rank in (1, 2) or not token.HasField("rank")
        assert [candidate.token_id for candidate in token.candidates] == asked
        assert not any(candidate.HasField("rank") for candidate in token.candidates)
        if token.token_id == greedy:
            assert token.candidates[1].logprob == token.logprob


async def test_all_candidates_are_the_whole_vocabulary(tiny: Wire) -> None:
    """RESP-06: opened by --max-logprobs -1."""
    response = Response(
        return_output_logprobs=True, output_candidates=Select(all=generate_pb2.AllCandidates())
    )
    (token,) = (await tiny.generate(response=response, max_tokens=1)).first.tokens
    assert {c.token_id for c in token.candidates} == set(range(tiny.description.vocab_size))


async def test_what_the_configuration_cannot_do_is_refused(smol: Wire) -> None:
    """RESP-06, MODEL-07: vLLM's default --max-logprobs is 20, and explicit prompt ids need its other runner."""
    every, explicit = Select(all=generate_pb2.AllCandidates()), Select(token_ids=inputs_pb2.TokenIds(ids=[1]))
    for response, field in (
        (Response(return_output_logprobs=True, output_candidates=every), "response.output_candidates.all"),
        (
            Response(return_output_logprobs=True, output_candidates=Select(top_n=21)),
            "response.output_candidates.top_n",
        ),
        (
            Response(return_prompt_logprobs=True, prompt_candidates=explicit),
            "response.prompt_candidates.token_ids",
        ),
    ):
        code, message = await smol.refused(response=response)
        assert code is INVALID and message.startswith(field)


@pytest.mark.parametrize("sequences", [1, 2])
async def test_prompt_logprobs_come_first_and_once(tiny: Wire, sequences: int) -> None:
    """RESP-01, RESP-07: independent of the output's."""
    answer = await tiny.generate(
        sampling=Sampling(temperature=1.0, num_sequences=sequences),
        response=Response(return_prompt_logprobs=True, prompt_candidates=Select(top_n=2)),
    )
    first, *others = answer.prompt
    assert not first.HasField("logprob") and not first.HasField("rank") and not first.candidates
    assert [token.token for token in (first, *others)] == ["The", " capital", " of", " France", " is"]
    for token in others:
        assert token.HasField("logprob") and token.HasField("rank")
        assert [candidate.rank for candidate in token.candidates] == [1, 2]
    assert not answer.first.tokens[0].HasField("logprob")


async def test_prompt_logprob_start_skips_and_beyond_the_prompt_is_refused(tiny: Wire) -> None:
    """RESP-02."""
    answer = await tiny.generate(response=Response(return_prompt_logprobs=True, prompt_logprob_start=3))
    assert [token.token for token in answer.prompt] == [" France", " is"]
    assert all(token.HasField("logprob") for token in answer.prompt)
    code, message = await tiny.refused(response=Response(return_prompt_logprobs=True, prompt_logprob_start=5))
    assert code is INVALID and "response.prompt_logprob_start" in message


SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"n": {"enum": [1, 2]}},
        "required": ["n"],
        "additionalProperties": False,
    }
)
TAG = json.dumps(
    {
        "structures": [{"begin": "<f>", "schema": {"type": "object"}, "end": "</f>"}],
        "triggers": ["<f>"],
    }
)


@pytest.mark.parametrize(
    ("guide", "pattern"),
    [
        (Guided(regex="[0-9]{3}-[a-c]{2}"), r"[0-9]{3}-[a-c]{2}"),
        (Guided(ebnf_grammar='root ::= "yes" | "no"'), r"yes|no"),
        (Guided(choice=generate_pb2.ChoiceConstraint(choices=["red", "green"])), r"red|green"),
    ],
    ids=["regex", "ebnf", "choice"],
)
async def test_each_guide_constrains_the_output(
    tiny: Wire, guide: generate_pb2.GuidedDecoding, pattern: str
) -> None:
    """GUIDE-01, with a random model, so that nothing but the guide shapes the output."""
    for seed in range(3):
        answer = await tiny.generate(
            guided=guide, sampling=Sampling(temperature=1.0, seed=seed), max_tokens=60
        )
        assert re.fullmatch(pattern, answer.first.text), answer.first.text


async def test_a_json_schema_guide(smol: Wire) -> None:
    """GUIDE-01."""
    answer = await smol.generate("n is 2. As JSON: ", guided=Guided(json_schema=SCHEMA), max_tokens=60)
    assert json.loads(answer.first.text)["n"] in (1, 2)


async def test_a_json_object_guide_on_a_model_that_can_write_json(smol: Wire) -> None:
    """GUIDE-01."""
    guide = Guided(json_object=generate_pb2.JsonObjectConstraint())
    answer = await smol.generate("A JSON object with a name: ", guided=guide, max_tokens=120)
    if answer.first.reason == generate_pb2.FINISH_REASON_STOP:
        assert isinstance(json.loads(answer.first.text), dict)
    else:
        assert answer.first.text.lstrip().startswith("{")


async def test_a_structural_tag_constrains_what_follows_its_trigger(smol: Wire) -> None:
    """GUIDE-01: the prompt makes the model begin the tag."""
    answer = await smol.generate(
        "Repeat: <f>{}</f> <f>{}</f> <f>{}</f>", guided=Guided(structural_tag=TAG), max_tokens=40
    )
    for inside in re.findall(r"<f>(.*?)</f>", answer.first.text, re.S):
        assert isinstance(json.loads(inside), dict)


@pytest.mark.parametrize(
    "guide",
    [
        Guided(json_schema="{"),
        Guided(json_schema='{"type": 7}'),
        Guided(regex="(["),
        Guided(ebnf_grammar="root ::= ("),
        Guided(structural_tag="{}"),
        Guided(structural_tag="no json"),
        Guided(regex=""),
        Guided(choice=generate_pb2.ChoiceConstraint()),
        Guided(regex="a", backend="other"),
    ],
    ids=lambda guide: str(guide.WhichOneof("guide")),
)
async def test_a_bad_guide_is_refused_and_the_engine_goes_on(
    tiny: Wire, guide: generate_pb2.GuidedDecoding
) -> None:
    """GUIDE-02, GUIDE-03."""
    code, message = await tiny.refused(guided=guide)
    assert code is INVALID and message.startswith("guided"), message
    assert (await tiny.generate(guided=Guided(regex="[ab]"))).first.text in ("a", "b")


async def test_the_configured_guide_back_end_may_be_named(tiny: Wire) -> None:
    """GUIDE-03."""
    assert (await tiny.generate(guided=Guided(regex="[ab]", backend="auto"))).first.text in ("a", "b")


async def test_cached_tokens_salt_and_bypass(tiny: Wire) -> None:
    """KVOPT-01, KVOPT-02, STREAM-07."""
    prompt = [11, 12, 13, 14] * 40
    cached = [
        (await tiny.generate(prompt, kv=kv)).usage.cached_prompt_tokens
        for kv in (
            Kv(bypass_prefix_cache=True),
            Kv(),
            Kv(bypass_prefix_cache=True),
            Kv(cache_salt="a"),
            Kv(cache_salt="a"),
            Kv(cache_salt="b"),
        )
    ]
    assert cached[0] == 0
    assert cached[1] >= 128
    assert cached[2] == cached[3] == 0
    assert cached[4] >= 128
    assert cached[5] == 0


async def test_data_parallel_rank(tiny: Wire) -> None:
    """KVOPT-03."""
    assert (await tiny.generate(kv=Kv(data_parallel_rank=0))).first.ids
    code, message = await tiny.refused(kv=Kv(data_parallel_rank=1))
    assert code is INVALID and message.startswith("kv.data_parallel_rank")


@pytest.mark.parametrize("prompt", ["", "x" * 20_000], ids=["empty", "too long"])
async def test_prompts_that_do_not_fit_are_refused(tiny: Wire, prompt: str) -> None:
    """GEN-02, GEN-03, GEN-10."""
    code, message = await tiny.refused(prompt)
    assert code is INVALID and message.startswith("prompt"), message


async def test_ids_outside_the_vocabulary_are_refused(tiny: Wire) -> None:
    """GEN-03, GEN-10."""
    for token_id in (tiny.description.vocab_size, 2**32 - 1):
        code, message = await tiny.refused([1, token_id])
        assert code is INVALID and str(token_id) in message


async def test_a_character_split_over_tokens_comes_whole(tiny: Wire) -> None:
    """STOP-07: emoji are several byte tokens in this vocabulary."""
    answer = await tiny.generate(
        guided=Guided(regex="(🦀|é|漢){4}"), sampling=Sampling(temperature=1.0, seed=1), max_tokens=60
    )
    assert re.fullmatch("(🦀|é|漢){4}", answer.first.text)
    for response in answer.responses:
        assert "\ufffd" not in response.token.text


@pytest.mark.parametrize("whole", split_prompt.WORDS)
async def test_a_prompt_that_ends_inside_a_character_is_not_repeated(tiny: Wire, whole: str) -> None:
    """STREAM-03: concatenation gives the output, and the output alone."""
    await split_prompt.prove(tiny, whole)
