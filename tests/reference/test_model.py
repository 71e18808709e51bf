"""The toy model is a real probability model, and its records tell the truth about it."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openengine.v1 import generate_pb2, inputs_pb2
from openengine_adapters.reference import tokenizer
from openengine_adapters.reference.model import ToyModel, log_softmax
from openengine_adapters.reference.sampling import Sampler, Scorer
from tests.reference.harness import PROMPT, ask, running


@given(st.text())
def test_decoding_undoes_encoding(text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_some_tokens_hold_several_characters_and_one_ends_inside_a_character() -> None:
    assert len(tokenizer.encode(" the")) == 1
    assert [tokenizer.token_text(token) for token in tokenizer.encode("☕")] == ["\ufffd", "\ufffd"]


def test_special_tokens_have_a_name_and_no_text() -> None:
    assert tokenizer.token_text(tokenizer.EOS) == "<|endoftext|>"
    assert tokenizer.decode([104, tokenizer.EOS, 105]) == "hi"


@given(st.lists(st.integers(0, 255), max_size=20), st.integers(0, 3))
def test_probabilities_sum_to_one_after_any_prefix(prefix: list[int], seed: int) -> None:
    model = ToyModel(seed)
    state = model.start()
    for token in prefix:
        state = model.advance(state, token)
    logprobs = log_softmax(model.logits(state, prefix[-3:]))
    assert len(logprobs) == tokenizer.VOCAB_SIZE
    assert math.isclose(math.fsum(map(math.exp, logprobs)), 1.0, rel_tol=1e-9)


async def test_the_whole_vocabulary_comes_ranked_and_sums_to_one() -> None:
    everything = generate_pb2.CandidateTokenSelection(all=generate_pb2.AllCandidates())
    async with running() as engine:
        options = generate_pb2.ResponseOptions(return_output_logprobs=True, output_candidates=everything)
        output = (await ask(engine, response=options)).one
    for token, score in zip(output.ids, output.scores, strict=True):
        assert [c.rank for c in score.candidates] == list(range(1, tokenizer.VOCAB_SIZE + 1))
        values = [c.logprob for c in score.candidates]
        assert values == sorted(values, reverse=True)
        assert math.isclose(math.fsum(map(math.exp, values)), 1.0, rel_tol=1e-9)
        # A greedy token is the most likely one.
        assert (score.rank, score.candidates[0].token_id, score.logprob) == (1, token, values[0])


@pytest.mark.parametrize("n", [0, 1, 5])
async def test_top_n_gives_exactly_the_n_best(n: int) -> None:
    options = generate_pb2.ResponseOptions(
        return_output_logprobs=True, output_candidates=generate_pb2.CandidateTokenSelection(top_n=n)
    )
    async with running() as engine:
        output = (await ask(engine, sampling={"seed": 1}, temperature=1.0, response=options)).one
    assert all([c.rank for c in score.candidates] == list(range(1, n + 1)) for score in output.scores)


async def test_named_candidates_come_in_the_order_asked_with_their_true_ranks() -> None:
    names = [200, 97, tokenizer.EOS, 32]
    options = generate_pb2.ResponseOptions(
        return_output_logprobs=True,
        output_candidates=generate_pb2.CandidateTokenSelection(token_ids=inputs_pb2.TokenIds(ids=names)),
    )
    async with running() as engine:
        score = (await ask(engine, response=options)).one.scores[0]
    assert [c.token_id for c in score.candidates] == names
    by_likelihood = sorted(score.candidates, key=lambda c: -c.logprob)
    assert [c.rank for c in by_likelihood] == sorted(c.rank or 0 for c in score.candidates)


async def test_prompt_records_begin_where_asked_and_match_what_generation_would_have_given() -> None:
    options = generate_pb2.ResponseOptions(return_prompt_logprobs=True)
    late = generate_pb2.ResponseOptions(return_prompt_logprobs=True, prompt_logprob_start=5)
    async with running() as engine:
        whole = (await ask(engine, response=options)).prompt
        tail = (await ask(engine, response=late)).prompt
        ids = tokenizer.encode(PROMPT)
        # The record of a prompt's token is that of the same token as the first output.
        candidates = generate_pb2.CandidateTokenSelection(token_ids=inputs_pb2.TokenIds(ids=[ids[7]]))
        scored = generate_pb2.ResponseOptions(return_output_logprobs=True, output_candidates=candidates)
        first = (await ask(engine, ids[:7], max_tokens=1, response=scored)).one.scores[0].candidates[0]
    assert whole is not None
    assert tail is not None
    assert list(whole.token_ids) == ids
    assert whole.scores[0] is None
    assert all(score is not None for score in whole.scores[1:])
    assert (list(tail.token_ids), list(tail.scores)) == (ids[5:], list(whole.scores[5:]))
    record = whole.scores[7]
    assert record is not None
    assert (record.logprob, record.rank) == (first.logprob, first.rank)


# ------------------------------------------------------------------------------------------------- sampling


def _draws(count: int = 200, **params: Any) -> list[int]:
    model = ToyModel()
    logits = model.logits(model.start(), [])
    sampler = Sampler(generate_pb2.SamplingParams(seed=7, **params), 0, [])
    return [sampler.draw(logits) for _ in range(count)]


def _ranks(tokens: list[int]) -> list[int]:
    model = ToyModel()
    logits = model.logits(model.start(), [])
    return [Scorer(None).score(logits, token).rank or 0 for token in tokens]


def test_top_k_keeps_the_k_best() -> None:
    assert set(_ranks(_draws(top_k=3, temperature=2.0))) == {1, 2, 3}


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    model = ToyModel()
    logprobs = sorted(log_softmax(model.logits(model.start(), [])), reverse=True)
    total, size = 0.0, 0
    while total < 0.5:
        total, size = total + math.exp(logprobs[size]), size + 1
    assert max(_ranks(_draws(500, top_p=0.5))) == size


def test_min_p_drops_what_is_too_unlikely_beside_the_best() -> None:
    model = ToyModel()
    logprobs = log_softmax(model.logits(model.start(), []))
    floor = max(logprobs) + math.log(0.3)
    assert all(logprobs[token] >= floor for token in _draws(min_p=0.3))


def test_a_low_temperature_is_close_to_greedy_and_a_high_one_close_to_uniform() -> None:
    assert set(_ranks(_draws(temperature=0.01))) == {1}
    assert len(set(_draws(2000, temperature=1000.0))) > tokenizer.VOCAB_SIZE / 2


def test_sampling_follows_the_probabilities() -> None:
    model = ToyModel()
    logits = model.logits(model.start(), [])
    best = max(range(len(logits)), key=logits.__getitem__)
    share = _draws(4000).count(best) / 4000
    assert math.isclose(share, math.exp(log_softmax(logits)[best]), abs_tol=0.04)


@pytest.mark.parametrize(
    "penalty", [{"frequency_penalty": 2.0}, {"presence_penalty": 2.0}, {"repetition_penalty": 1.5}]
)
def test_penalties_make_repetition_less_likely(penalty: dict[str, float]) -> None:
    assert len(set(_draws(200, **penalty))) > len(set(_draws()))


async def test_a_seed_repeats_its_sequences_and_they_differ_from_each_other() -> None:
    sampling = generate_pb2.SamplingParams(seed=2**64 - 1, num_sequences=4, temperature=1.0)
    async with running() as engine:
        first, again = [await ask(engine, sampling=sampling) for _ in range(2)]
        other = await ask(engine, sampling=generate_pb2.SamplingParams(seed=5, temperature=1.0))
        unseeded = [await ask(engine, temperature=1.0) for _ in range(2)]
    ids = [first.outputs[index].ids for index in range(4)]
    assert ids == [again.outputs[index].ids for index in range(4)]
    assert len({tuple(each) for each in ids}) == 4
    assert other.one.ids != ids[0]
    assert unseeded[0].one.ids != unseeded[1].one.ids


async def test_greedy_sequences_are_all_the_same() -> None:
    async with running() as engine:
        answer = await ask(engine, sampling={"num_sequences": 3, "temperature": 0.0})
    assert len({tuple(output.ids) for output in answer.outputs.values()}) == 1


async def test_text_and_its_token_ids_give_the_same_output() -> None:
    async with running() as engine:
        by_text = await ask(engine, PROMPT)
        by_ids = await ask(engine, tokenizer.encode(PROMPT))
    assert by_text.one.ids == by_ids.one.ids
