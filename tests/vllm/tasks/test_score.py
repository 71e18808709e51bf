"""Score: a cross-encoder, a reranker with its template, and label tokens on a generating model."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.support.tasks import scoring
from tests.support.tasks.cases import SCORE_TEMPLATE, Reference
from tests.support.wire import Wire
from tests.vllm.tasks.conftest import served

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def pairs(reference: Reference) -> AsyncIterator[Wire]:
    """A tiny BERT that reads query and document together."""
    async with served("tiny-bert-pairs", "--max-model-len", "512") as wire:
        yield wire


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def reranker(reference: Reference) -> AsyncIterator[Wire]:
    """A tiny Qwen3 that answers no or yes, as the Qwen3 rerankers do."""
    overrides = (
        '{"architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": ["no", "yes"], '
        '"is_original_qwen3_reranker": true}'
    )
    flags = ("--runner", "pooling", "--hf-overrides", overrides)
    async with served("tiny-qwen3", *flags, score_template=SCORE_TEMPLATE) as wire:
        yield wire


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def labels(reference: Reference) -> AsyncIterator[Wire]:
    """The tiny Llama as a language model."""
    async with served("tiny-llama") as wire:
        yield wire


async def test_pairs(pairs: Wire, reference: Reference) -> None:
    await scoring.pairs_equal_the_reference(pairs, reference)
    await scoring.options_that_pairs_do_not_take(pairs)
    await pairs.until_idle()


async def test_reranker(reranker: Wire, reference: Reference) -> None:
    await scoring.a_reranker_renders_its_template(
        reranker, reference["rerank"], reference["rerank-instructed"]
    )


async def test_label_tokens(labels: Wire, reference: Reference) -> None:
    await scoring.label_scores_equal_the_reference(labels, reference)
    await scoring.label_scores_keep_their_order(labels)
    await scoring.label_scores_that_are_refused(labels)
    await labels.until_idle()
