"""Score: a cross-encoder, a reranker with its template, and label tokens on a generating model."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator

import grpc
import pytest
import pytest_asyncio

from tests.support.wire import Wire
from tests.vllm.tasks import asking
from tests.vllm.tasks.asking import (
    LOG_PROBABILITIES,
    LOGITS,
    NONE,
    PROBABILITIES,
    RELEVANCE,
    SEQUENCE,
    SOFTMAX,
    close,
    patiently,
    refused,
    sigmoid,
    softmax,
)
from tests.vllm.tasks.cases import (
    DOCUMENTS,
    INSTRUCTION,
    LABEL_IDS,
    QUERY,
    SCORE_TEMPLATE,
    Reference,
)
from tests.vllm.tasks.conftest import served

pytestmark = pytest.mark.asyncio(loop_scope="session")

INVALID = grpc.StatusCode.INVALID_ARGUMENT


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


async def test_pair_scores_equal_the_reference(pairs: Wire, reference: Reference) -> None:
    """SCO-05 … SCO-07: a group of many, groups of one, relevance and logits."""
    await asking.serves_only(pairs, "classify", "score")
    logits = [logit for (logit,) in reference["pairs"]]
    together = await patiently(asking.score_call(pairs, QUERY, [DOCUMENTS]))
    apart = await patiently(asking.score_call(pairs, QUERY, [[text] for text in DOCUMENTS]))
    raw = await patiently(asking.score_call(pairs, QUERY, [DOCUMENTS], output_semantics=LOGITS))
    found = [list(candidate.scores.values) for candidate in together.groups[0].candidates]
    assert [list(candidate.scores.shape) for candidate in together.groups[0].candidates] == [[1]] * 3
    assert close([value for (value,) in found], [sigmoid(logit) for logit in logits])
    assert close(
        [value for (value,) in found], [g.candidates[0].scores.values[0] for g in apart.groups], 1e-5
    )
    assert close([c.scores.values[0] for c in raw.groups[0].candidates], logits)
    for response, semantics in ((together, RELEVANCE), (apart, RELEVANCE), (raw, LOGITS)):
        assert (response.semantics, response.normalization, response.granularity) == (
            semantics,
            NONE,
            SEQUENCE,
        )
        assert response.higher_is_better
        assert not response.label_token_ids
    assert together.usage.input_tokens == apart.usage.input_tokens > 0


async def test_options_that_pairs_do_not_take(pairs: Wire) -> None:
    """SCO-02 … SCO-04, MODEL-07."""
    for field, options in (
        ("instruction", {"instruction": "Rank."}),
        ("label_token_ids", {"label_token_ids": [1]}),
        ("normalization", {"normalization": SOFTMAX}),
        ("output_semantics", {"output_semantics": PROBABILITIES}),
    ):
        code, details = await refused(asking.score_call(pairs, QUERY, [DOCUMENTS], **options))
        assert (code, details.partition(":")[0]) == (INVALID, f"options.{field}")
    code, details = await refused(asking.score_call(pairs, [1, 2], [DOCUMENTS]))
    assert (code, details.partition(":")[0]) == (INVALID, "groups[0].query.token_ids")
    for long in ("cat " * 600, "x" * 3_000_000):
        code, details = await refused(asking.score_call(pairs, QUERY, [["a"], ["a", long]]))
        assert (code, details.partition(":")[0]) == (INVALID, "groups[1].candidates[1]")
    await pairs.until_idle()


async def test_reranker_renders_its_template(reranker: Wire, reference: Reference) -> None:
    """SCO-04: the operator's template, with the caller's instruction where one is given."""
    found = (await asking.model_info(reranker)).tasks.score
    assert found.supports_instruction
    assert found.higher_is_better
    for name, instruction in (("rerank", ""), ("rerank-instructed", INSTRUCTION)):
        response = await patiently(asking.score_call(reranker, QUERY, [DOCUMENTS], instruction=instruction))
        scores = [candidate.scores.values[0] for candidate in response.groups[0].candidates]
        assert close(scores, [sigmoid(logit) for logit in reference[name]], 1e-3)
    assert not close(
        [sigmoid(logit) for logit in reference["rerank"]],
        [sigmoid(logit) for logit in reference["rerank-instructed"]],
        1e-2,
    )


async def test_label_token_scores_equal_the_reference(labels: Wire, reference: Reference) -> None:
    """SCO-02, SCO-03: the next token's probabilities, of the whole vocabulary or of the labels alone."""
    info = await asking.model_info(labels)
    assert info.HasField("generation")
    assert info.tasks.score.supports_label_token_scoring
    assert not info.tasks.embed.supported
    assert not info.tasks.classify.supported
    for options, semantics, normalization in (
        ({}, PROBABILITIES, NONE),
        ({"normalization": NONE}, PROBABILITIES, NONE),
        ({"normalization": SOFTMAX}, PROBABILITIES, SOFTMAX),
        ({"output_semantics": LOG_PROBABILITIES}, LOG_PROBABILITIES, NONE),
    ):
        response = await patiently(
            asking.score_call(labels, QUERY, [DOCUMENTS], label_token_ids=LABEL_IDS, **options)
        )
        assert (response.semantics, response.normalization) == (semantics, normalization)
        assert tuple(response.label_token_ids) == LABEL_IDS
        assert not response.HasField("higher_is_better")
        for candidate, logprobs in zip(response.groups[0].candidates, reference["labels"], strict=True):
            expected = logprobs if semantics == LOG_PROBABILITIES else [math.exp(one) for one in logprobs]
            if normalization == SOFTMAX:
                expected = softmax(logprobs)
                assert math.isclose(sum(candidate.scores.values), 1, abs_tol=1e-5)
            assert list(candidate.scores.shape) == [3]
            # Probabilities here are about 1e-5, so they are compared by their ratio alone.
            for value, due in zip(candidate.scores.values, expected, strict=True):
                assert math.isclose(value, due, rel_tol=2e-3)


async def test_label_scores_keep_the_order_of_ids_and_groups(labels: Wire) -> None:
    """SCO-02, SCO-05, SCO-07: labels turned round, ids for texts, groups apart."""
    tokenizer = labels.engine.llm.get_tokenizer()
    ids = [tokenizer.encode(text) for text in (QUERY, *DOCUMENTS)]
    forward = await patiently(asking.score_call(labels, QUERY, [DOCUMENTS], label_token_ids=LABEL_IDS))
    turned = await patiently(
        asking.score_call(labels, ids[0], [[one] for one in ids[1:]], label_token_ids=LABEL_IDS[::-1])
    )
    assert tuple(turned.label_token_ids) == LABEL_IDS[::-1]
    for candidate, group in zip(forward.groups[0].candidates, turned.groups, strict=True):
        for value, due in zip(candidate.scores.values, group.candidates[0].scores.values[::-1], strict=True):
            assert math.isclose(value, due, rel_tol=2e-3)
    one = await patiently(asking.score_call(labels, QUERY, [DOCUMENTS], label_token_ids=[3]))
    assert one.higher_is_better
    assert forward.usage.input_tokens == 3 * len(ids[0]) + sum(map(len, ids[1:]))


async def test_label_scores_that_are_refused(labels: Wire) -> None:
    """SCO-02, CAP-03, GEN-03."""
    limit = (await asking.model_info(labels)).tasks.score.max_label_token_ids
    await patiently(asking.score_call(labels, QUERY, [DOCUMENTS], label_token_ids=range(limit)))
    for ids in ([], [3, 3], range(limit + 1), [labels.description.vocab_size]):
        code, details = await refused(asking.score_call(labels, QUERY, [DOCUMENTS], label_token_ids=ids))
        assert (code, details.partition(":")[0]) == (INVALID, "options.label_token_ids")
    await patiently(asking.score_call(labels, [5] * 1000, [[[6] * 23]], label_token_ids=[3]))
    code, details = await refused(
        asking.score_call(labels, [5] * 1000, [["a", [6] * 24]], label_token_ids=[3])
    )
    assert (code, details.partition(":")[0]) == (INVALID, "groups[0].candidates[1]")
    await labels.until_idle()
