"""Classify on a sequence classifier and a token classifier, against Hugging Face in float32."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator

import grpc
import pytest
import pytest_asyncio

from scripts.setup.build_task_models import ENTITIES, SENTIMENTS
from tests.support.tasks import asking
from tests.support.tasks.asking import (
    LOG_PROBABILITIES,
    LOGITS,
    PROBABILITIES,
    RELEVANCE,
    REWARD,
    SEQUENCE,
    TOKEN,
    close,
    patiently,
    refused,
    rows,
    softmax,
)
from tests.support.tasks.cases import ENTITY_TEXT, WORDS, Reference
from tests.support.wire import Wire
from tests.vllm.tasks.conftest import served

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def sentiment(reference: Reference) -> AsyncIterator[Wire]:
    """A tiny BERT with three named classes."""
    async with served("tiny-bert-sentiment", "--max-model-len", "512") as wire:
        yield wire


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def entities(reference: Reference) -> AsyncIterator[Wire]:
    """A tiny BERT that names each token's entity."""
    async with served("tiny-bert-entities", "--max-model-len", "512") as wire:
        yield wire


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def judge(reference: Reference) -> AsyncIterator[Wire]:
    """A tiny Qwen2 reward model."""
    async with served("tiny-qwen2-reward") as wire:
        yield wire


async def test_capabilities(sentiment: Wire, entities: Wire) -> None:
    """CAP-01, CAP-02, MODEL-07."""
    for wire, granularities in ((sentiment, [SEQUENCE, TOKEN]), (entities, [TOKEN])):
        await asking.serves_only(wire, "classify")
        found = (await asking.model_info(wire)).tasks.classify
        assert list(found.granularities) == granularities
        assert list(found.semantics) == [PROBABILITIES, LOGITS, LOG_PROBABILITIES]
    code, details = await refused(asking.classify_call(sentiment, ["x"], output_semantics=RELEVANCE))
    assert (code, details.partition(":")[0]) == (grpc.StatusCode.INVALID_ARGUMENT, "options.output_semantics")
    code, details = await refused(asking.classify_call(entities, ["x"], granularity=SEQUENCE))
    assert (code, details.partition(":")[0]) == (grpc.StatusCode.INVALID_ARGUMENT, "options.granularity")


async def test_every_meaning_of_a_sequence(sentiment: Wire, reference: Reference) -> None:
    """CLS-01 … CLS-03: as asked, and probabilities by default."""
    for asked, meant in (
        (0, PROBABILITIES),
        *((one, one) for one in (LOGITS, PROBABILITIES, LOG_PROBABILITIES)),
    ):
        options = {"output_semantics": asked} if asked else {}
        response = await patiently(asking.classify_call(sentiment, WORDS, **options))
        for output, logits in zip(response.outputs, reference["sentiment"], strict=True):
            assert (output.granularity, output.semantics) == (SEQUENCE, meant)
            assert tuple(output.labels) == SENTIMENTS
            assert list(output.scores.shape) == [3]
            expected = logits if meant == LOGITS else softmax(logits)
            if meant == LOG_PROBABILITIES:
                expected = [math.log(probability) for probability in expected]
            assert close(output.scores.values, expected)
            if meant == PROBABILITIES:
                assert math.isclose(sum(output.scores.values), 1, abs_tol=1e-5)


async def test_every_token(entities: Wire, reference: Reference) -> None:
    """CLS-01: one row for each token, with its id; token granularity is the only one, so the default."""
    (logits,) = reference["entities"]
    for semantics in (LOGITS, PROBABILITIES):
        response = await patiently(asking.classify_call(entities, [ENTITY_TEXT], output_semantics=semantics))
        (output,) = response.outputs
        assert output.granularity == TOKEN
        assert tuple(output.labels) == ENTITIES
        assert len(output.token_ids) == len(logits) == response.usage.input_tokens
        for row, expected in zip(rows(output.scores), logits, strict=True):
            assert close(row, expected if semantics == LOGITS else softmax(expected))


async def test_tokens_of_a_sequence_classifier(sentiment: Wire) -> None:
    """Its head on every token; the sequence's own answer is another thing."""
    (output,) = (await patiently(asking.classify_call(sentiment, WORDS[:1], granularity=TOKEN))).outputs
    assert list(output.scores.shape) == [len(output.token_ids), 3]
    for row in rows(output.scores):
        assert math.isclose(sum(row), 1, abs_tol=1e-5)


async def test_a_reward_of_the_whole_and_of_every_token(judge: Wire, reference: Reference) -> None:
    """CLS-01, CLS-02: the reward as the model computes it, by no squashing function; the last token's for the whole."""
    await asking.serves_only(judge, "classify")
    found = (await asking.model_info(judge)).tasks.classify
    assert (list(found.granularities), list(found.semantics)) == ([SEQUENCE, TOKEN], [REWARD])
    whole = await patiently(asking.classify_call(judge, WORDS))
    every = await patiently(asking.classify_call(judge, WORDS, granularity=TOKEN))
    for one, tokens, values in zip(whole.outputs, every.outputs, reference["rewards"], strict=True):
        assert (one.granularity, one.semantics) == (SEQUENCE, REWARD)
        assert list(one.scores.shape) == [1] and not one.labels
        assert close(one.scores.values, values[-1:])
        assert (tokens.granularity, tokens.semantics) == (TOKEN, REWARD)
        assert list(tokens.scores.shape) == [len(tokens.token_ids), 1]
        assert close(tokens.scores.values, values)


async def test_inputs_that_do_not_fit(sentiment: Wire) -> None:
    code, details = await refused(asking.classify_call(sentiment, ["a", "cat " * 600]))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert details.startswith("inputs[1].text")
