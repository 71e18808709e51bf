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
Choices, Ids = generate_pb2.ChoiceConstraint, inputs_pb2.TokenIds
INVALID = grpc.StatusCode.INVALID_ARGUMENT
PROMPT_WORDS = ["The", " capital", " of", " France", " is"]


async def test_greedy_repeats_and_token_ids_equal_text(tiny: Wire) -> None:
    """SAMP-01, GEN-06."""
    ids = tiny.engine.manager.tokenizer.encode("The capital of France is")
    runs = [await tiny.generate(), await tiny.generate(), await tiny.generate(ids)]
    assert {tuple(run.first.ids) for run in runs} == {tuple(runs[0].first.ids)}


async def test_unseeded_outputs_differ_and_a_seed_is_refused(tiny: Wire) -> None:
    """SAMP-03: without its deterministic mode SGLang would ignore a seed in silence."""
    sampling = Sampling(temperature=1.0, num_sequences=3)
    answer = await tiny.generate(sampling=sampling)
    assert sorted(answer.outputs) == [0, 1, 2]
    assert len({tuple(output.ids) for output in answer.outputs.values()}) == 3
    code, message = await tiny.refused(sampling=Sampling(temperature=1.0, seed=1))
    assert code is INVALID and message.startswith("sampling.seed")


@pytest.mark.parametrize("top_k", [0, -1])
async def test_top_k_zero_and_minus_one_mean_no_limit(tiny: Wire, top_k: int) -> None:
    """SAMP-02: SGLang itself refuses 0."""
    answer = await tiny.generate(sampling=Sampling(temperature=1.5, top_k=top_k))
    greedy = await tiny.generate()
    assert answer.first.ids != greedy.first.ids


@pytest.mark.parametrize("narrow", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}], ids=str)
async def test_sampling_options_reach_the_engine(tiny: Wire, narrow: dict[str, float]) -> None:
    """SAMP-01, MODEL-07: each, at its narrowest, makes sampling greedy."""
    greedy = await tiny.generate()
    answer = await tiny.generate(sampling=Sampling(temperature=1.0, **narrow))  # type: ignore[arg-type]  # by name
    assert answer.first.ids == greedy.first.ids


@pytest.mark.parametrize("penalty", ["frequency_penalty", "presence_penalty", "repetition_penalty"])
async def test_penalties_reach_the_engine(tiny: Wire, penalty: str) -> None:
    """MODEL-07: each changes a greedy output that repeats itself."""
    greedy = await tiny.generate()
    answer = await tiny.generate(sampling=Sampling(temperature=0.0, **{penalty: 2.0}))  # type: ignore[arg-type]  # by name
    assert answer.first.ids != greedy.first.ids


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        (Sampling(temperature=1e-7), "sampling.temperature"),
        (Sampling(temperature=1e300), "sampling.temperature"),
        (Sampling(repetition_penalty=2.5), "sampling.repetition_penalty"),
        (Sampling(temperature=1.0, repetition_penalty=1e-38), "sampling.repetition_penalty"),
    ],
    ids=["would be greedy", "would break guides", "too strong", "would be infinite"],
)
async def test_what_sglang_would_change_or_refuse_is_refused_by_name(
    tiny: Wire, sampling: generate_pb2.SamplingParams, field: str
) -> None:
    """MODEL-07."""
    code, message = await tiny.refused(sampling=sampling)
    assert code is INVALID and message.startswith(field)


@pytest.mark.parametrize("temperature", [1e-6, 1e20])
async def test_the_ends_of_the_temperature_range_are_served(tiny: Wire, temperature: float) -> None:
    """MODEL-07, GEN-10: also under a guide, whose mask is infinite."""
    for guided in (None, Guided(regex="[ab]{8}")):
        answer = await tiny.generate(sampling=Sampling(temperature=temperature), guided=guided, max_tokens=4)
        assert answer.first.ids


async def test_several_greedy_sequences_are_all_the_same(tiny: Wire) -> None:
    """SAMP-05."""
    answer = await tiny.generate(sampling=Sampling(temperature=0.0, num_sequences=2))
    assert answer.outputs[0].ids == answer.outputs[1].ids


async def test_usage_counts_text_prompts_and_every_sequence(tiny: Wire) -> None:
    """STREAM-06, STREAM-07: what the sequences find of each other in the cache is not the caller's saving."""
    prompt = [40 + n for n in range(30)]
    sampling = Sampling(temperature=1.0, num_sequences=3)
    usage = (await tiny.generate(prompt, sampling=sampling, max_tokens=5)).usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (30, 15, 45)
    assert usage.HasField("cached_prompt_tokens") and usage.cached_prompt_tokens == 0
    assert (await tiny.generate(prompt, sampling=sampling, max_tokens=5)).usage.cached_prompt_tokens == 29


async def test_top_n_gives_exactly_the_n_best_and_a_rank_only_where_it_is_known(tiny: Wire) -> None:
    """RESP-03, RESP-04."""
    answer = await tiny.generate(
        sampling=Sampling(temperature=1.0, top_k=6),
        response=Response(return_output_logprobs=True, output_candidates=Select(top_n=3)),
        max_tokens=24,
    )
    unknown = 0
    for token in answer.first.tokens:
        assert token.HasField("logprob") and token.token
        assert [candidate.rank for candidate in token.candidates] == [1, 2, 3]
        logprobs = [candidate.logprob for candidate in token.candidates]
        assert logprobs == sorted(logprobs, reverse=True)
        ranks = {candidate.token_id: candidate.rank for candidate in token.candidates}
        assert (token.rank if token.HasField("rank") else None) == ranks.get(token.token_id)
        unknown += not token.HasField("rank")
    assert unknown


@pytest.mark.parametrize("candidates", [None, Select(top_n=0)], ids=["absent", "zero"])
async def test_no_candidates(tiny: Wire, candidates: generate_pb2.CandidateTokenSelection | None) -> None:
    """RESP-04; RESP-09: greedy records have rank 1."""
    answer = await tiny.generate(response=Response(return_output_logprobs=True, output_candidates=candidates))
    assert len(answer.first.tokens) == 8
    for token in answer.first.tokens:
        assert token.rank == 1 and token.HasField("logprob") and not token.candidates


async def test_explicit_candidates_come_in_the_order_asked_without_false_ranks(tiny: Wire) -> None:
    """RESP-05."""
    greedy = (await tiny.generate()).first.ids[0]
    asked = [7, greedy, 3]
    response = Response(return_output_logprobs=True, output_candidates=Select(token_ids=Ids(ids=asked)))
    for token in (await tiny.generate(response=response)).first.tokens:
        assert token.rank == 1
        assert [candidate.token_id for candidate in token.candidates] == asked
        assert not any(candidate.HasField("rank") for candidate in token.candidates)
        if token.token_id == greedy:
            assert token.candidates[1].logprob == token.logprob


async def test_both_sides_get_exactly_their_own_candidates(tiny: Wire) -> None:
    """RESP-07: SGLang has one selection for both."""
    top, explicit = Select(top_n=2), Select(token_ids=Ids(ids=[9, 5]))
    for prompt, output in ((top, explicit), (explicit, top), (None, top), (Select(top_n=4), top)):
        answer = await tiny.generate(
            response=Response(
                return_prompt_logprobs=True,
                prompt_candidates=prompt,
                return_output_logprobs=True,
                output_candidates=output,
            )
        )
        for selection, tokens in ((prompt, answer.prompt[1:]), (output, answer.first.tokens)):
            for token in tokens:
                if selection is None:
                    assert not token.candidates
                elif selection.WhichOneof("selection") == "top_n":
                    assert [c.rank for c in token.candidates] == list(range(1, selection.top_n + 1))
                else:
                    assert [c.token_id for c in token.candidates] == [9, 5]


async def test_the_whole_vocabulary_and_too_many_candidates_are_refused(tiny: Wire) -> None:
    """RESP-06, GEN-10: the engine would keep all of them in memory."""
    every = Select(all=generate_pb2.AllCandidates())
    for response, field in (
        (Response(return_output_logprobs=True, output_candidates=every), "response.output_candidates.all"),
        (
            Response(return_output_logprobs=True, output_candidates=Select(top_n=129)),
            "response.output_candidates.top_n",
        ),
    ):
        code, message = await tiny.refused(response=response)
        assert code is INVALID and message.startswith(field)


@pytest.mark.parametrize("sequences", [1, 3])
async def test_prompt_logprobs_come_first_and_once(tiny: Wire, sequences: int) -> None:
    """RESP-01."""
    answer = await tiny.generate(
        sampling=Sampling(temperature=1.0, num_sequences=sequences),
        response=Response(return_prompt_logprobs=True, prompt_candidates=Select(top_n=2)),
    )
    first, *others = answer.prompt
    assert not first.HasField("logprob") and not first.HasField("rank") and not first.candidates
    assert [token.token for token in (first, *others)] == PROMPT_WORDS
    for token in others:
        assert token.HasField("logprob")
        assert [candidate.rank for candidate in token.candidates] == [1, 2]
    assert sorted(answer.outputs) == list(range(sequences))
    assert not answer.first.tokens[0].HasField("logprob")


async def test_prompt_logprob_start_skips_and_beyond_the_prompt_is_refused(tiny: Wire) -> None:
    """RESP-02: the first one asked for has its score, which SGLang leaves out."""
    whole = (await tiny.generate(response=Response(return_prompt_logprobs=True))).prompt
    for start in (1, 3, 4):
        response = Response(return_prompt_logprobs=True, prompt_logprob_start=start)
        assert (await tiny.generate(response=response)).prompt == whole[start:]
    code, message = await tiny.refused(response=Response(return_prompt_logprobs=True, prompt_logprob_start=5))
    assert code is INVALID and "response.prompt_logprob_start" in message


async def test_the_last_id_of_the_vocabulary_keeps_its_id_in_the_prompt_output(tiny: Wire) -> None:
    """RESP-01: SGLang reports it as 0. One token alone has no score."""
    last = tiny.description.vocab_size - 1
    answer = await tiny.generate([5, last], response=Response(return_prompt_logprobs=True))
    assert [token.token_id for token in answer.prompt] == [5, last]
    (only,) = (await tiny.generate([last], response=Response(return_prompt_logprobs=True))).prompt
    assert only.token_id == last and not only.HasField("logprob")


SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "n": {"enum": [1, 2]}},
        "required": ["ok", "n"],
        "additionalProperties": False,
    }
)
EBNF = 'root ::= "yes" | "no" digit\ndigit ::= [0-9]\n'
TAG = json.dumps(
    {
        "type": "structural_tag",
        "format": {
            "type": "tag",
            "begin": "<f>",
            "content": {"type": "json_schema", "json_schema": {"enum": ["a", "b"]}},
            "end": "</f>",
        },
    }
)
ODD = ["a.b*c", "-[x]{2}|y", "tab\tand space", "back\\slash/", "^$?+()", "漢字 🦀", "quote\"'", "line\nbreak"]


@pytest.mark.parametrize(
    ("guide", "expected"),
    [
        (Guided(regex=r"[ab]{3}-\d{2}"), r"[ab]{3}-\d{2}"),
        (Guided(ebnf_grammar=EBNF), r"yes|no[0-9]"),
        (Guided(structural_tag=TAG), r'<f>"[ab]"</f>'),
        (Guided(choice=Choices(choices=["red", "green"])), r"red|green"),
        *((Guided(choice=Choices(choices=[odd])), re.escape(odd)) for odd in ODD),
    ],
    ids=lambda value: value.WhichOneof("guide") if isinstance(value, Guided) else "",
)
async def test_every_guide_constrains_the_output(
    tiny: Wire, guide: generate_pb2.GuidedDecoding, expected: str
) -> None:
    """GUIDE-01, STOP-04: a guided output ends by EOS."""
    for temperature in (0.0, 1.0):
        answer = await tiny.generate(guided=guide, sampling=Sampling(temperature=temperature), max_tokens=60)
        assert re.fullmatch(expected, answer.first.text), answer.first.text
        assert answer.first.stop.eos_token_id == 2


async def test_json_guides(tiny: Wire) -> None:
    """GUIDE-01: for every sequence, and the JSON object as far as it goes."""
    several = Sampling(temperature=1.0, num_sequences=3)
    answer = await tiny.generate(guided=Guided(json_schema=SCHEMA), sampling=several, max_tokens=200)
    for output in answer.outputs.values():
        if output.reason == generate_pb2.FINISH_REASON_STOP:
            assert set(json.loads(output.text)) == {"ok", "n"}
        else:
            assert output.text.lstrip().startswith("{")
    answer = await tiny.generate(guided=Guided(json_object=generate_pb2.JsonObjectConstraint()))
    assert answer.first.text.lstrip().startswith("{")


@pytest.mark.parametrize(
    "guide",
    [
        Guided(json_schema="{"),
        Guided(json_schema='{"type": 7}'),
        Guided(json_schema="{}" * 3),
        Guided(json_schema=json.dumps({"type": "string", "minLength": 5, "maxLength": 2})),
        Guided(json_schema='{"items":' * 5000 + "{}" + "}" * 5000),
        Guided(regex="(["),
        Guided(regex="a\0b"),
        Guided(regex="(" * 2_000 + "a" + ")" * 2_000),
        Guided(regex="x*" * 2_049),
        Guided(ebnf_grammar='root ::= "a"' + ' "a"' * 20_000),
        Guided(choice=Choices(choices=[f"choice {number}" for number in range(10_000)])),
        Guided(ebnf_grammar="root ::= ("),
        Guided(ebnf_grammar="root ::= nothing"),
        Guided(structural_tag="{}"),
        Guided(structural_tag="no json"),
        Guided(structural_tag='{"structures": [{}], "triggers": ["<f"]}'),
        Guided(regex=""),
        Guided(choice=Choices()),
        Guided(regex="a", backend="other"),
    ],
    ids=lambda guide: str(guide.WhichOneof("guide")),
)
async def test_a_bad_guide_is_refused_and_the_engine_goes_on(
    tiny: Wire, guide: generate_pb2.GuidedDecoding
) -> None:
    """GUIDE-02, GUIDE-03, ERR-06: a status without an event, though SGLang tells of it in its stream."""
    for sampling in (None, Sampling(temperature=1.0, num_sequences=2)):
        code, message = await tiny.refused(guided=guide, sampling=sampling)
        assert code is INVALID and message.startswith("guided"), message
        assert ".cc:" not in message and ".py" not in message
    assert (await tiny.generate(guided=Guided(regex="[ab]"))).first.text in ("a", "b")
    await tiny.until_idle()


async def test_the_configured_guide_back_end_may_be_named(tiny: Wire) -> None:
    """GUIDE-03."""
    assert (await tiny.generate(guided=Guided(regex="[ab]", backend="xgrammar"))).first.text in ("a", "b")


@pytest.mark.parametrize(
    "sampling",
    [Sampling(temperature=0.0), Sampling(temperature=1.0), Sampling(temperature=1.0, top_p=0.9, top_k=50)],
    ids=["greedy", "sampled", "sampled among the best"],
)
async def test_a_guide_that_leaves_no_token_is_one_engine_error(
    tiny: Wire, sampling: generate_pb2.SamplingParams
) -> None:
    """STREAM-09, ERR-03, GEN-10: min_tokens forbids the end that the guide asks for, which could kill SGLang."""
    stopping = Stopping(max_tokens=8, min_tokens=8)
    answer = await tiny.generate(guided=Guided(regex="ab"), stopping=stopping, sampling=sampling)
    error = answer.responses[-1].error
    assert "min_tokens" in error.message and error.details["field"] == "guided.regex"
    assert answer.usage.completion_tokens
    assert (await tiny.generate()).first.ids


async def test_ignore_eos_with_a_guide_is_refused(tiny: Wire) -> None:
    """MODEL-07: SGLang would add a token that breaks the guide."""
    code, message = await tiny.refused(
        guided=Guided(regex="ab"), stopping=Stopping(max_tokens=8, ignore_eos=True)
    )
    assert code is INVALID and message.startswith("stopping.ignore_eos")


@pytest.mark.parametrize("scored", [False, True])
async def test_cached_tokens_salt_and_bypass(tiny: Wire, scored: bool) -> None:
    """KVOPT-01, KVOPT-02, STREAM-07."""
    prompt = [11 + scored, 12, 13, 14] * 40
    response = Response(return_output_logprobs=scored)
    cached = [
        (await tiny.generate(prompt, kv=kv, response=response)).usage.cached_prompt_tokens
        for kv in (
            Kv(bypass_prefix_cache=True),
            Kv(),
            Kv(bypass_prefix_cache=True),
            Kv(cache_salt="a"),
            Kv(cache_salt="a"),
            Kv(cache_salt="b"),
        )
    ]
    assert cached == [0, 159, 0, 0, 159, 0]


async def test_a_bypass_beside_prompt_logprobs_changes_neither(tiny: Wire) -> None:
    """KVOPT-01 with RESP-02."""
    response = Response(return_prompt_logprobs=True, prompt_logprob_start=3)
    plain = await tiny.generate(response=response)
    bypass = await tiny.generate(response=response, kv=Kv(bypass_prefix_cache=True))
    assert bypass.prompt == plain.prompt and bypass.first.ids == plain.first.ids
    assert bypass.usage.cached_prompt_tokens == 0


async def test_data_parallel_rank(tiny: Wire) -> None:
    """KVOPT-03."""
    assert (await tiny.generate(kv=Kv(data_parallel_rank=0))).first.ids
    code, message = await tiny.refused(kv=Kv(data_parallel_rank=1))
    assert code is INVALID and message.startswith("kv.data_parallel_rank")


@pytest.mark.parametrize(
    "prompt", ["", "x" * 20_000, "x" * 20_000_000], ids=["empty", "too long", "far too long"]
)
async def test_prompts_that_do_not_fit_are_refused(tiny: Wire, prompt: str) -> None:
    """GEN-02, GEN-03, GEN-10: the longest is not even tokenised, which would take gigabytes."""
    code, message = await tiny.refused(prompt)
    assert code is INVALID and message.startswith("prompt"), message


async def test_the_longest_prompt_gets_its_token_and_one_more_is_refused(tiny: Wire) -> None:
    """GEN-03, STOP-01: MODEL-03's context is what a request can really have."""
    longest = tiny.description.max_context_length
    assert longest is not None
    answer = await tiny.generate([5] * (longest - 1), stopping=Stopping(ignore_eos=True))
    assert answer.first.reason == generate_pb2.FINISH_REASON_LENGTH and len(answer.first.ids) == 1
    code, message = await tiny.refused([5] * longest)
    assert code is INVALID and str(longest) in message


async def test_ids_outside_the_vocabulary_are_refused(tiny: Wire) -> None:
    """GEN-03, GEN-10: they would kill SGLang."""
    for token_id in (tiny.description.vocab_size, 2**31, 2**32 - 1):
        code, message = await tiny.refused([1, token_id])
        assert code is INVALID and str(token_id) in message


async def test_a_character_split_over_tokens_comes_whole(tiny: Wire) -> None:
    """STOP-07: emoji are several byte tokens in this vocabulary."""
    answer = await tiny.generate(
        guided=Guided(regex="(🦀|é|漢){4}"), sampling=Sampling(temperature=1.0), max_tokens=60
    )
    assert re.fullmatch("(🦀|é|漢){4}", answer.first.text)
    for response in answer.responses:
        assert "\ufffd" not in response.token.text


@pytest.mark.parametrize("whole", split_prompt.WORDS)
async def test_a_prompt_that_ends_inside_a_character_is_not_repeated(tiny: Wire, whole: str) -> None:
    """STREAM-03: concatenation gives the output, and the output alone."""
    await split_prompt.prove(tiny, whole)
