"""Score: a cross-encoder, and label tokens on a generating model, against Hugging Face in float32."""

from __future__ import annotations

import pytest

from tests.support import cpu_env
from tests.support.tasks import scoring
from tests.support.tasks.apart import served_apart, until_idle
from tests.support.tasks.cases import Reference

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_pairs(reference: Reference) -> None:
    """Queries with a common beginning, which SGLang would die of if it reused it."""
    async with served_apart("sglang", "tiny-bert-pairs", "--context-length", "512") as pairs:
        await scoring.pairs_equal_the_reference(pairs, reference)
        await scoring.options_that_pairs_do_not_take(pairs)
        await until_idle(pairs)


async def test_label_tokens(reference: Reference) -> None:
    async with served_apart("sglang", cpu_env.TINY_LLAMA) as labels:
        await scoring.label_scores_equal_the_reference(labels, reference)
        await scoring.label_scores_keep_their_order(labels)
        await scoring.label_scores_that_are_refused(labels)
        await until_idle(labels)
