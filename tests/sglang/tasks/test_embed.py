"""Embed and similarity on a tiny Llama and a tiny BERT, against Hugging Face in float32."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio

from openengine.v1 import tasks_pb2
from tests.sglang.conftest import sglang_engine
from tests.support import cpu_env
from tests.support.tasks import asking, batches
from tests.support.tasks.apart import served_apart
from tests.support.tasks.asking import SEQUENCE, SIMILARITY, TOKEN, close, patiently, refused, unit
from tests.support.tasks.cases import WORDS, Reference
from tests.support.wire import Wire, serving

pytestmark = pytest.mark.asyncio(loop_scope="session")

INVALID = grpc.StatusCode.INVALID_ARGUMENT


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def llama(reference: Reference) -> AsyncIterator[Wire]:
    """A tiny Llama as an embedder: last token, dimensions can be cut, priority."""
    flags = [
        *("--dtype", "float32"),
        "--is-embedding",
        *("--json-model-override-args", '{"is_matryoshka": true}'),
        *("--max-running-requests", "8"),
        "--enable-priority-scheduling",
    ]
    async with serving(sglang_engine(cpu_env.TINY_LLAMA, *flags)) as wire:  # type: ignore[arg-type]  # untyped here
        yield wire


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def bert(reference: Reference) -> AsyncIterator[Wire]:
    """A tiny BERT, whose first token stands for the whole input, and which reads both ways."""
    async with served_apart("sglang", "tiny-bert-embed", "--context-length", "512") as wire:
        yield wire


async def test_capabilities(llama: Wire, bert: Wire) -> None:
    """CAP-01, CAP-02, EMB-05, MODEL-07; a pooling model is never asked to generate, which SGLang would die of."""
    for wire in (llama, bert):
        await asking.serves_only(wire, "embed", "score")
        found = (await asking.model_info(wire)).tasks.embed
        assert list(found.granularities) == [SEQUENCE]
        assert list(found.encodings) == [tasks_pb2.EMBEDDING_ENCODING_DENSE]
        assert found.dimension == 64
        assert not found.supports_normalization
        assert not found.supports_lora
        assert found.supports_priority is (wire is llama)
        assert found.supports_dimension_override is (wire is llama)
        refusals: list[tuple[str, dict[str, Any]]] = [
            ("options.granularity", {"granularity": TOKEN}),
            ("options.normalize", {"normalize": True}),
            ("options.normalize", {"normalize": False}),
        ]
        for field, options in refusals:
            code, details = await refused(asking.embed_call(wire, ["x"], **options))
            assert (code, details.partition(":")[0]) == (INVALID, field)
    code, details = await refused(asking.embed_call(bert, ["x"], dimensions=8))
    assert (code, details.partition(":")[0]) == (INVALID, "options.dimensions")
    code, details = await refused(asking.embed_call(bert, ["x"], {"priority": 1}))
    assert (code, details.partition(":")[0]) == (INVALID, "context.priority")


async def test_vectors_equal_the_reference(llama: Wire, bert: Wire, reference: Reference) -> None:
    """EMB-01, EMB-03, TASK-13, TASK-14: of length 1 always; token ids give the same as their text."""
    for wire, name in ((llama, "llama"), (bert, "bert")):
        expected = reference[name]
        ids = [answer["ids"] for answer in expected]
        by_text = await patiently(asking.embed_call(wire, WORDS))
        by_ids = await patiently(asking.embed_call(wire, ids))
        for text, same, answer in zip(by_text.outputs, by_ids.outputs, expected, strict=True):
            assert text.granularity == SEQUENCE
            assert list(text.dense.shape) == [64]
            assert close(text.dense.values, unit(answer["pooled"]), 1e-3)
            assert close(same.dense.values, text.dense.values, 1e-5)
        assert by_text.usage.input_tokens == by_ids.usage.input_tokens == sum(map(len, ids))


async def test_what_an_encoder_reads_is_whole(bert: Wire) -> None:
    """Neither a cached beginning nor a full step may split an input that is read both ways."""
    common = [10 + number % 20 for number in range(150)]
    batch = [[2, *common, *(20 + (number * step) % 15 for number in range(40)), 3] for step in range(1, 33)]
    together = await patiently(asking.embed_call(bert, batch))
    for position in (0, 7, 20, 31):
        (alone,) = (await patiently(asking.embed_call(bert, batch[position : position + 1]))).outputs
        assert close(together.outputs[position].dense.values, alone.dense.values, 1e-4)


async def test_dimensions_are_cut(llama: Wire, reference: Reference) -> None:
    """EMB-04: the first ones, normalised after the cut; never padded; beside others that are not cut."""
    cut, whole = await asyncio.gather(
        patiently(asking.embed_call(llama, WORDS, dimensions=16)), patiently(asking.embed_call(llama, WORDS))
    )
    for short, full, answer in zip(cut.outputs, whole.outputs, reference["llama"], strict=True):
        assert close(short.dense.values, unit(answer["pooled"][:16]), 1e-3)
        assert close(full.dense.values, unit(answer["pooled"]), 1e-3)
    await patiently(asking.embed_call(llama, WORDS, dimensions=64))
    for size in (0, 65):
        code, details = await refused(asking.embed_call(llama, WORDS, dimensions=size))
        assert (code, details.partition(":")[0]) == (INVALID, "options.dimensions")


async def test_similarity_is_the_cosine(llama: Wire) -> None:
    """SCO-05 … SCO-07: as the vectors say."""
    vectors = [output.dense.values for output in (await patiently(asking.embed_call(llama, WORDS))).outputs]
    response = await patiently(asking.score_call(llama, WORDS[0], [WORDS[1:], WORDS[:1]]))
    first, second = response.groups
    for candidate, vector in zip(first.candidates, vectors[1:], strict=True):
        assert close(candidate.scores.values, [asking.cosine(vectors[0], vector)])
    assert close(second.candidates[0].scores.values, [1.0])
    assert (response.semantics, response.higher_is_better) == (SIMILARITY, True)


async def test_inputs_that_do_not_fit(llama: Wire, bert: Wire) -> None:
    """TASK-03, TASK-15: nothing is cut in silence; the longest that is advertised fits, one token more does not."""
    for wire in (llama, bert):
        longest = (await asking.model_info(wire)).max_context_length
        assert longest > 400
        await patiently(asking.embed_call(wire, [[5] * longest]))
        misfits: list[list[Any]] = [["a", [5] * (longest + 1)], ["a", "cat " * 1200], ["a", "x " * 1_500_000]]
        for batch in misfits:
            code, details = await refused(asking.embed_call(wire, batch))
            assert code is INVALID
            assert details.startswith("inputs[1].")
    await llama.until_idle()


async def test_a_large_batch_is_bounded_and_comes_back_in_order(llama: Wire) -> None:
    """TASK-14: never more in the engine than twice what it runs at once."""
    await batches.bounded_and_in_order(llama, most=16)


async def test_every_early_end_empties_the_engine(llama: Wire) -> None:
    """TASK-08, TASK-09, TASK-15."""
    await batches.every_early_end_empties_the_engine(llama)


async def test_priority_and_trace_are_taken(llama: Wire) -> None:
    """TASK-10, GEN-07."""
    about = {"priority": -(2**31), "metadata": {"traceparent": "00-" + "a" * 32 + "-" + "b" * 16 + "-01"}}
    (output,) = (await patiently(asking.embed_call(llama, ["x"], about))).outputs
    assert math.isclose(math.hypot(*output.dense.values), 1, abs_tol=1e-5)
