"""Embed on a real embedding model and on a tiny Llama, against Hugging Face in float32."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio

from openengine.v1 import tasks_pb2
from openengine_adapters.engine import Lora
from tests.support import cpu_env
from tests.support.tasks import asking, batches
from tests.support.tasks.asking import SEQUENCE, SIMILARITY, TOKEN, close, patiently, refused, rows, unit
from tests.support.tasks.cases import ADAPTER, MINILM, SENTENCES, WORDS, Reference, model
from tests.support.wire import Wire
from tests.vllm.tasks.conftest import served

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def minilm(reference: Reference) -> AsyncIterator[Wire]:
    """A real sentence embedder: BERT, mean pooling, normalised by default."""
    async with served(MINILM, "--max-model-len", "256") as wire:
        yield wire


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def llama(reference: Reference) -> AsyncIterator[Wire]:
    """A tiny Llama as an embedder: last token, dimensions can be cut, priority, an adapter."""
    flags = ("--runner", "pooling", "--convert", "embed", "--scheduling-policy", "priority", "--enable-lora")
    overrides = ("--hf-overrides", '{"is_matryoshka": true}')
    adapter = Lora(1, "adapter", str(model(ADAPTER)))
    async with served(cpu_env.TINY_LLAMA, *flags, *overrides, loras=[adapter]) as wire:
        yield wire


async def test_capabilities(minilm: Wire, llama: Wire) -> None:
    """CAP-01, CAP-02, EMB-05, MODEL-07."""
    for wire, dimension in ((minilm, 384), (llama, 64)):
        await asking.serves_only(wire, "embed", "score")
        found = (await asking.model_info(wire)).tasks.embed
        assert list(found.granularities) == [SEQUENCE, TOKEN]
        assert list(found.encodings) == [tasks_pb2.EMBEDDING_ENCODING_DENSE]
        assert found.dimension == dimension
        assert found.supports_normalization
        assert found.supports_lora is (wire is llama)
        assert found.supports_priority is (wire is llama)
        assert found.supports_dimension_override is (wire is llama)
    code, details = await refused(asking.embed_call(minilm, ["x"], dimensions=8))
    assert (code, details.partition(":")[0]) == (grpc.StatusCode.INVALID_ARGUMENT, "options.dimensions")
    code, details = await refused(asking.embed_call(minilm, ["x"], {"priority": 1}))
    assert (code, details.partition(":")[0]) == (grpc.StatusCode.INVALID_ARGUMENT, "context.priority")


async def test_sentence_vectors_equal_the_reference(minilm: Wire, reference: Reference) -> None:
    """EMB-01 … EMB-03, TASK-13, TASK-14."""
    expected = reference["minilm"]
    by_default = await patiently(asking.embed_call(minilm, SENTENCES))
    normalized = await patiently(asking.embed_call(minilm, SENTENCES, normalize=True))
    raw = await patiently(asking.embed_call(minilm, SENTENCES, normalize=False))
    for index, answer in enumerate(expected):
        assert by_default.outputs[index].granularity == SEQUENCE
        for response, vector in ((by_default, unit(answer["pooled"])), (raw, answer["pooled"])):
            assert list(response.outputs[index].dense.shape) == [384]
            assert close(response.outputs[index].dense.values, vector)
        assert math.isclose(math.hypot(*normalized.outputs[index].dense.values), 1, abs_tol=1e-5)
    assert raw.usage.input_tokens == sum(len(answer["ids"]) for answer in expected)


async def test_similar_sentences_are_nearer(minilm: Wire) -> None:
    """The point of an embedding; and Score says the same as the vectors do (SCO-05, SCO-06)."""
    vectors = [
        output.dense.values for output in (await patiently(asking.embed_call(minilm, SENTENCES))).outputs
    ]
    near = [asking.cosine(vectors[0], vectors[1]), asking.cosine(vectors[2], vectors[3])]
    far = [asking.cosine(vectors[a], vectors[b]) for a in (0, 1) for b in (2, 3, 4)]
    assert min(near) > 0.4
    assert max(far) < 0.2
    response = await patiently(asking.score_call(minilm, SENTENCES[0], [SENTENCES[1:], SENTENCES[:1]]))
    first, second = response.groups
    for candidate, vector in zip(first.candidates, vectors[1:], strict=True):
        assert close(candidate.scores.values, [asking.cosine(vectors[0], vector)])
    assert close(second.candidates[0].scores.values, [1.0])
    assert (response.semantics, response.higher_is_better) == (SIMILARITY, True)
    tokens = (await patiently(asking.embed_call(minilm, [SENTENCES[0], *SENTENCES]))).usage.input_tokens
    alone = await patiently(asking.score_call(minilm, SENTENCES[0], [SENTENCES]))
    assert alone.usage.input_tokens == tokens


async def test_token_vectors_equal_the_reference(minilm: Wire, llama: Wire, reference: Reference) -> None:
    """EMB-01: one row for each token, with its id."""
    for wire, texts, name in ((minilm, SENTENCES, "minilm"), (llama, WORDS, "llama")):
        response = await patiently(asking.embed_call(wire, texts, granularity=TOKEN, normalize=False))
        for output, answer in zip(response.outputs, reference[name], strict=True):
            assert output.granularity == TOKEN
            assert list(output.token_ids) == answer["ids"]
            for row, vector in zip(rows(output.dense), answer["tokens"], strict=True):
                assert close(row, vector, 1e-3)


async def test_llama_vectors_texts_and_ids(llama: Wire, reference: Reference) -> None:
    """The last token's vector; token ids give the same as their text."""
    expected = reference["llama"]
    by_text = await patiently(asking.embed_call(llama, WORDS, normalize=False))
    ids = [answer["ids"] for answer in expected]
    by_ids = await patiently(asking.embed_call(llama, ids, normalize=False))
    for text, same, answer in zip(by_text.outputs, by_ids.outputs, expected, strict=True):
        assert close(text.dense.values, answer["pooled"], 1e-3)
        assert close(same.dense.values, text.dense.values, 1e-5)


async def test_dimensions_are_cut(llama: Wire, reference: Reference) -> None:
    """EMB-04: the first ones, normalised after the cut; never padded."""
    for granularity in (SEQUENCE, TOKEN):
        response = await patiently(
            asking.embed_call(llama, WORDS, dimensions=16, normalize=True, granularity=granularity)
        )
        for output, answer in zip(response.outputs, reference["llama"], strict=True):
            assert output.dense.shape[-1] == 16
            found = rows(output.dense)[-1] if granularity == TOKEN else list(output.dense.values)
            assert close(found, unit(answer["pooled"][:16]), 1e-3)
    await patiently(asking.embed_call(llama, WORDS, dimensions=64))
    code, _ = await refused(asking.embed_call(llama, WORDS, dimensions=65))
    assert code is grpc.StatusCode.INVALID_ARGUMENT


async def test_an_adapter_changes_the_vectors(llama: Wire, reference: Reference) -> None:
    """TASK-10, LORA-07: PEFT's numbers; an adapter that is not there is NOT_FOUND."""
    about = {"lora_name": "adapter"}
    response = await patiently(asking.embed_call(llama, WORDS, about, normalize=False))
    plain = await patiently(asking.embed_call(llama, WORDS, normalize=False))
    for output, without, vector in zip(response.outputs, plain.outputs, reference["adapted"], strict=True):
        assert close(output.dense.values, vector, 1e-3)
        assert not close(output.dense.values, without.dense.values, 1e-2)
    code, _ = await refused(asking.embed_call(llama, WORDS, {"lora_name": "other"}))
    assert code is grpc.StatusCode.NOT_FOUND


async def test_inputs_that_do_not_fit(llama: Wire, minilm: Wire) -> None:
    """TASK-03, TASK-15: nothing is cut in silence, and the refusal names the item."""
    await patiently(asking.embed_call(llama, [[5] * 1024]))
    batches: tuple[tuple[Wire, list[Any]], ...] = (
        (llama, ["a", [5] * 1025]),
        (llama, ["a", "cat " * 1200]),
        (llama, ["a", "x" * 3_000_000]),
        (minilm, ["a", "cat " * 300]),
    )
    for wire, batch in batches:
        code, details = await refused(asking.embed_call(wire, batch))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert details.startswith("inputs[1].")
        await wire.until_idle()


async def test_a_large_batch_is_bounded_and_comes_back_in_order(llama: Wire) -> None:
    """TASK-14: never more in the engine than twice what it runs at once."""
    await batches.bounded_and_in_order(llama, most=128)


async def test_every_early_end_empties_the_engine(llama: Wire) -> None:
    """TASK-08, TASK-09, TASK-15."""
    await batches.every_early_end_empties_the_engine(llama)


async def test_priority_and_trace_are_taken(llama: Wire) -> None:
    """TASK-10, GEN-07."""
    about = {"priority": -(2**31), "metadata": {"traceparent": "00-" + "a" * 32 + "-" + "b" * 16 + "-01"}}
    await patiently(asking.embed_call(llama, WORDS, about))
