"""Score: a cross-encoder, and label tokens on a generating model, against Hugging Face in float32."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import cpu_env
from tests.support.tasks import scoring
from tests.support.tasks.apart import served_apart, until_idle
from tests.support.tasks.asking import refused, score_call
from tests.support.tasks.cases import DOCUMENTS, QUERY, RERANKER_TEMPLATE, Reference

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


async def test_reranker(reference: Reference, tmp_path: Path) -> None:
    """A language model whose chat template asks for yes or no, as SGLang's own rerank endpoint serves it."""
    template = tmp_path / "rerank.jinja"
    template.write_text(RERANKER_TEMPLATE, encoding="utf-8")
    async with served_apart("sglang", "tiny-qwen3", "--chat-template", str(template)) as reranker:
        plain, instructed = reference["asked"], reference["asked-instructed"]
        await scoring.a_reranker_renders_its_template(reranker, plain, instructed)
        code, details = await refused(score_call(reranker, QUERY, [DOCUMENTS], label_token_ids=[3]))
        assert (code, details.partition(":")[0]) == (scoring.INVALID, "options.label_token_ids")
        long = "cat " * 1200
        code, details = await refused(score_call(reranker, QUERY, [["a", long]]))
        assert (code, details.partition(":")[0]) == (scoring.INVALID, "groups[0].candidates[1]")
        await until_idle(reranker)
