"""What Score must answer on every engine: a cross-encoder of pairs, and label tokens on a generating model."""

from __future__ import annotations

import math

import grpc
from transformers import AutoTokenizer

from tests.support.tasks import asking
from tests.support.tasks.asking import (
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
    score_call,
    sigmoid,
    softmax,
)
from tests.support.tasks.cases import DOCUMENTS, INSTRUCTION, LABEL_IDS, QUERY, Reference
from tests.support.wire import Wire

INVALID = grpc.StatusCode.INVALID_ARGUMENT


async def pairs_equal_the_reference(pairs: Wire, reference: Reference) -> None:
    """SCO-05 … SCO-07: a group of many, groups of one, relevance and logits."""
    await asking.serves_only(pairs, "classify", "score")
    logits = [logit for (logit,) in reference["pairs"]]
    together = await patiently(score_call(pairs, QUERY, [DOCUMENTS]))
    apart = await patiently(score_call(pairs, QUERY, [[text] for text in DOCUMENTS]))
    raw = await patiently(score_call(pairs, QUERY, [DOCUMENTS], output_semantics=LOGITS))
    found = together.groups[0].candidates
    assert [list(candidate.scores.shape) for candidate in found] == [[1]] * 3
    values = [candidate.scores.values[0] for candidate in found]
    assert close(values, [sigmoid(logit) for logit in logits])
    assert close(values, [group.candidates[0].scores.values[0] for group in apart.groups], 1e-5)
    assert close([candidate.scores.values[0] for candidate in raw.groups[0].candidates], logits)
    for response, semantics in ((together, RELEVANCE), (apart, RELEVANCE), (raw, LOGITS)):
        stated = (response.semantics, response.normalization, response.granularity)
        assert stated == (semantics, NONE, SEQUENCE)
        assert response.higher_is_better
        assert not response.label_token_ids
    assert together.usage.input_tokens == apart.usage.input_tokens > 0


async def options_that_pairs_do_not_take(pairs: Wire) -> None:
    """SCO-02 … SCO-04, MODEL-07; and pairs that do not fit."""
    for field, options in (
        ("instruction", {"instruction": "Rank."}),
        ("label_token_ids", {"label_token_ids": [1]}),
        ("normalization", {"normalization": SOFTMAX}),
        ("output_semantics", {"output_semantics": PROBABILITIES}),
    ):
        code, details = await refused(score_call(pairs, QUERY, [DOCUMENTS], **options))
        assert (code, details.partition(":")[0]) == (INVALID, f"options.{field}")
    code, details = await refused(score_call(pairs, [1, 2], [DOCUMENTS]))
    assert (code, details.partition(":")[0]) == (INVALID, "groups[0].query.token_ids")
    for long in ("cat " * 600, "x" * 3_000_000):
        code, details = await refused(score_call(pairs, QUERY, [["a"], ["a", long]]))
        assert (code, details.partition(":")[0]) == (INVALID, "groups[1].candidates[1]")


async def a_reranker_renders_its_template(
    reranker: Wire, plain: list[float], instructed: list[float]
) -> None:
    """SCO-04: the operator's template, with the caller's instruction where one is given; logits of the reference."""
    found = (await asking.model_info(reranker)).tasks.score
    assert found.supports_instruction
    assert found.higher_is_better
    for logits, instruction in ((plain, ""), (instructed, INSTRUCTION)):
        response = await patiently(score_call(reranker, QUERY, [DOCUMENTS], instruction=instruction))
        scores = [candidate.scores.values[0] for candidate in response.groups[0].candidates]
        assert close(scores, [sigmoid(logit) for logit in logits], 1e-3)
        assert response.semantics == RELEVANCE
    assert not close([sigmoid(logit) for logit in plain], [sigmoid(logit) for logit in instructed], 1e-2)


async def label_scores_equal_the_reference(labels: Wire, reference: Reference) -> None:
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
            score_call(labels, QUERY, [DOCUMENTS], label_token_ids=LABEL_IDS, **options)
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


async def label_scores_keep_their_order(labels: Wire) -> None:
    """SCO-02, SCO-05, SCO-07: labels turned round, ids for texts, groups apart."""
    tokenizer = AutoTokenizer.from_pretrained(labels.description.model_id)
    ids = [tokenizer.encode(text) for text in (QUERY, *DOCUMENTS)]
    forward = await patiently(score_call(labels, QUERY, [DOCUMENTS], label_token_ids=LABEL_IDS))
    turned = await patiently(
        score_call(labels, ids[0], [[one] for one in ids[1:]], label_token_ids=LABEL_IDS[::-1])
    )
    assert tuple(turned.label_token_ids) == LABEL_IDS[::-1]
    for candidate, group in zip(forward.groups[0].candidates, turned.groups, strict=True):
        for value, due in zip(candidate.scores.values, group.candidates[0].scores.values[::-1], strict=True):
            assert math.isclose(value, due, rel_tol=2e-3)
    one = await patiently(score_call(labels, QUERY, [DOCUMENTS], label_token_ids=[3]))
    assert one.higher_is_better
    assert forward.usage.input_tokens == 3 * len(ids[0]) + sum(map(len, ids[1:]))


async def label_scores_that_are_refused(labels: Wire) -> None:
    """SCO-02, CAP-03, GEN-03; the prompt has room for one more token."""
    info = await asking.model_info(labels)
    limit, longest = info.tasks.score.max_label_token_ids, info.max_context_length
    await patiently(score_call(labels, QUERY, [DOCUMENTS], label_token_ids=range(limit)))
    for ids in ([], [3, 3], range(limit + 1), [10_000_000]):
        code, details = await refused(score_call(labels, QUERY, [DOCUMENTS], label_token_ids=ids))
        assert (code, details.partition(":")[0]) == (INVALID, "options.label_token_ids")
    query = [5] * (longest - 24)
    await patiently(score_call(labels, query, [[[6] * 23]], label_token_ids=[3]))
    code, details = await refused(score_call(labels, query, [["a", [6] * 24]], label_token_ids=[3]))
    assert (code, details.partition(":")[0]) == (INVALID, "groups[0].candidates[1]")
