"""Classify on a BERT with named classes and on a Llama, against Hugging Face in float32."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator

import grpc
import pytest
import pytest_asyncio

from scripts.setup.build_task_models import SENTIMENTS
from tests.support.tasks import asking
from tests.support.tasks.apart import served_apart
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
    softmax,
)
from tests.support.tasks.cases import WORDS, Reference
from tests.support.wire import Wire

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def sentiment(reference: Reference) -> AsyncIterator[Wire]:
    """A tiny BERT with three named classes."""
    async with served_apart("sglang", "tiny-bert-sentiment", "--context-length", "512") as wire:
        yield wire


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def classes(reference: Reference) -> AsyncIterator[Wire]:
    """A tiny Llama with three classes."""
    async with served_apart("sglang", "tiny-llama-classifier") as wire:
        yield wire


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def judge(reference: Reference) -> AsyncIterator[Wire]:
    """A tiny Qwen2 reward model."""
    async with served_apart("sglang", "tiny-qwen2-reward") as wire:
        yield wire


async def test_capabilities(sentiment: Wire, classes: Wire) -> None:
    """CAP-01, CAP-02, MODEL-07."""
    for wire in (sentiment, classes):
        await asking.serves_only(wire, "classify")
        found = (await asking.model_info(wire)).tasks.classify
        assert list(found.granularities) == [SEQUENCE]
        assert list(found.semantics) == [PROBABILITIES, LOGITS, LOG_PROBABILITIES]
        for field, options in (
            ("output_semantics", {"output_semantics": RELEVANCE}),
            ("granularity", {"granularity": TOKEN}),
        ):
            code, details = await refused(asking.classify_call(wire, ["x"], **options))
            assert (code, details.partition(":")[0]) == (grpc.StatusCode.INVALID_ARGUMENT, f"options.{field}")


async def test_every_meaning(sentiment: Wire, classes: Wire, reference: Reference) -> None:
    """CLS-01 … CLS-03: as asked, and probabilities by default; labels from the model's own map."""
    meanings = ((0, PROBABILITIES), *((one, one) for one in (LOGITS, PROBABILITIES, LOG_PROBABILITIES)))
    unnamed = ("LABEL_0", "LABEL_1", "LABEL_2")
    for wire, name, labels in ((sentiment, "sentiment", SENTIMENTS), (classes, "classes", unnamed)):
        for asked, meant in meanings:
            options = {"output_semantics": asked} if asked else {}
            response = await patiently(asking.classify_call(wire, WORDS, **options))
            for output, logits in zip(response.outputs, reference[name], strict=True):
                assert (output.granularity, output.semantics) == (SEQUENCE, meant)
                assert tuple(output.labels) == labels
                assert list(output.scores.shape) == [3]
                expected = logits if meant == LOGITS else softmax(logits)
                if meant == LOG_PROBABILITIES:
                    expected = [math.log(probability) for probability in expected]
                assert close(output.scores.values, expected, 1e-3)
                if meant == PROBABILITIES:
                    assert math.isclose(sum(output.scores.values), 1, abs_tol=1e-5)


async def test_a_reward(judge: Wire, reference: Reference) -> None:
    """CLS-02: the reward as the model computes it, by no squashing function, and nothing else by that name."""
    await asking.serves_only(judge, "classify")
    found = (await asking.model_info(judge)).tasks.classify
    assert (list(found.granularities), list(found.semantics)) == ([SEQUENCE], [REWARD])
    response = await patiently(asking.classify_call(judge, WORDS))
    for output, values in zip(response.outputs, reference["rewards"], strict=True):
        assert (output.granularity, output.semantics) == (SEQUENCE, REWARD)
        assert list(output.scores.shape) == [1] and not output.labels
        assert close(output.scores.values, values[-1:], 1e-3)


async def test_inputs_that_do_not_fit(sentiment: Wire) -> None:
    code, details = await refused(asking.classify_call(sentiment, ["a", "cat " * 600]))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert details.startswith("inputs[1].text")
