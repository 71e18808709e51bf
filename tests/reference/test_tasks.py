"""Embeddings, classes and scores: deterministic, of the promised shape, and scheduled like everything else."""

from __future__ import annotations

import asyncio
import itertools
import math
import pathlib
from typing import Any

import pytest

from openengine.v1 import errors_pb2, inputs_pb2, tasks_pb2
from openengine_adapters.core.errors import EngineFailure, Rejected
from openengine_adapters.engine import Classification, GroupScores, Lora, Media, TaskCall, Tensor
from openengine_adapters.reference import tasks, tokenizer
from openengine_adapters.reference.engine import ReferenceEngine
from tests.reference.harness import running, until, write_adapter
from tests.reference.test_lora_media import png

SEQUENCE, TOKEN = tasks_pb2.TASK_OUTPUT_GRANULARITY_SEQUENCE, tasks_pb2.TASK_OUTPUT_GRANULARITY_TOKEN
SPARSE = tasks_pb2.EMBEDDING_ENCODING_SPARSE
SOFTMAX, NONE = tasks_pb2.SCORE_NORMALIZATION_SOFTMAX, tasks_pb2.SCORE_NORMALIZATION_NONE

_numbers = itertools.count(1)


def _call(**fields: Any) -> TaskCall:
    return TaskCall(id=f"{next(_numbers):032x}", place=fields.pop("place", "inputs[0]"), **fields)


def _text(text: str, item_id: str = "i") -> tasks_pb2.TaskInput:
    return tasks_pb2.TaskInput(item_id=item_id, text=text)


async def _embed(engine: ReferenceEngine, text: str = "a small boat", **options: Any) -> Tensor:
    options = {"granularity": SEQUENCE, **options}
    return await engine.embed(_call(), _text(text), tasks_pb2.EmbedOptions(**options))


def _cosine(one: Tensor, other: Tensor) -> float:
    return math.fsum(a * b for a, b in zip(one.values, other.values, strict=True))


# ---------------------------------------------------------------------------------------------------- embed


async def test_an_embedding_is_a_unit_vector_and_the_same_every_time() -> None:
    async with running() as engine:
        first, again = await _embed(engine), await _embed(engine)
    assert list(first.shape) == [tasks.DIMENSION]
    assert first.values == again.values
    assert math.isclose(_cosine(first, first), 1.0, rel_tol=1e-9)


async def test_texts_that_share_words_are_closer_than_others() -> None:
    async with running() as engine:
        boat, boats, other = [
            await _embed(engine, text) for text in ("the red boat", "the red boats", "12345 !?")
        ]
    assert _cosine(boat, boats) > 0.9 > _cosine(boat, other)


async def test_a_raw_vector_is_the_unit_one_times_its_length() -> None:
    async with running() as engine:
        unit, raw = await _embed(engine), await _embed(engine, normalize=False)
    norm = math.sqrt(_cosine(raw, raw))
    assert not math.isclose(norm, 1.0)
    assert all(math.isclose(a * norm, b, abs_tol=1e-12) for a, b in zip(unit.values, raw.values, strict=True))


async def test_fewer_dimensions_are_the_first_ones() -> None:
    async with running() as engine:
        short = await _embed(engine, dimensions=5, normalize=False)
        whole = await _embed(engine, normalize=False)
        unit = await _embed(engine, dimensions=5)
    assert (list(short.shape), short.values) == ([5], whole.values[:5])
    assert math.isclose(_cosine(unit, unit), 1.0, rel_tol=1e-9)


async def test_token_embeddings_have_a_row_for_each_token() -> None:
    async with running() as engine:
        tensor = await _embed(engine, granularity=TOKEN)
    ids = tokenizer.encode("a small boat")
    assert list(tensor.shape) == [len(ids), tasks.DIMENSION]
    assert list(tensor.token_ids) == ids
    assert tensor.input_tokens == len(ids)


@pytest.mark.parametrize("granularity", [SEQUENCE, TOKEN])
async def test_the_sparse_encoding_leaves_out_the_zeros_and_nothing_else(granularity: Any) -> None:
    async with running() as engine:
        dense = await _embed(engine, granularity=granularity)
        sparse = await _embed(engine, granularity=granularity, encoding=SPARSE)
    assert sparse.indices is not None
    assert list(sparse.shape) == list(dense.shape)
    assert 0 < len(sparse.values) < len(dense.values)
    rebuilt = [0.0] * len(dense.values)
    for index, value in zip(sparse.indices, sparse.values, strict=True):
        rebuilt[index] = value
    assert rebuilt == dense.values


async def test_media_and_adapters_change_an_embedding(tmp_path: pathlib.Path) -> None:
    lora = Lora(1, "a", str(write_adapter(tmp_path / "a")))
    both = tasks_pb2.MultimodalTaskInput(text="a small boat", media=[inputs_pb2.MediaItem(raw_bytes=png(0))])
    item = tasks_pb2.TaskInput(item_id="i", multimodal=both)
    media = {"i": [Media(inputs_pb2.MODALITY_IMAGE, png(0), "inputs[0].multimodal.media[0].raw_bytes")]}
    options = tasks_pb2.EmbedOptions(granularity=SEQUENCE)
    async with running() as engine:
        await engine.load_lora(lora)
        plain = await _embed(engine)
        with_image = await engine.embed(_call(media=media), item, options)
        with_lora = await engine.embed(_call(lora=lora), _text("a small boat"), options)
    assert with_image.input_tokens == plain.input_tokens + 1
    assert len({tuple(t.values) for t in (plain, with_image, with_lora)}) == 3


async def test_a_repeated_text_is_cached() -> None:
    async with running() as engine:
        text = "x1y2z3" * 10
        cached = [(await _embed(engine, text)).cached_input_tokens for _ in range(2)]
    assert cached == [0, 48]


async def test_an_input_longer_than_the_context_is_refused_by_place() -> None:
    async with running(max_context=64) as engine:
        with pytest.raises(Rejected) as refused:
            await _embed(engine, "x" * 65)
    assert refused.value.field == "inputs[0]"


# ------------------------------------------------------------------------------------------------- classify


async def _classify(engine: ReferenceEngine, **options: Any) -> Classification:
    options = {"granularity": SEQUENCE, **options}
    return await engine.classify(_call(), _text("a small boat"), tasks_pb2.ClassifyOptions(**options))


async def test_classes_come_as_probabilities_unless_asked_otherwise() -> None:
    async with running() as engine:
        default = await _classify(engine)
        logits = await _classify(engine, output_semantics=tasks_pb2.TASK_VALUE_SEMANTICS_LOGITS)
        logs = await _classify(engine, output_semantics=tasks_pb2.TASK_VALUE_SEMANTICS_LOG_PROBABILITIES)
    assert default.semantics == tasks_pb2.TASK_VALUE_SEMANTICS_PROBABILITIES
    assert tuple(default.labels) == tasks.LABELS
    assert math.isclose(math.fsum(default.scores.values), 1.0)
    total = math.fsum(math.exp(value) for value in logits.scores.values)
    for probability, logit, log in zip(
        default.scores.values, logits.scores.values, logs.scores.values, strict=True
    ):
        assert math.isclose(probability, math.exp(logit) / total)
        assert math.isclose(math.log(probability), log)


async def test_token_classes_have_a_row_for_each_token() -> None:
    async with running() as engine:
        found = await _classify(engine, granularity=TOKEN)
    rows, columns = found.scores.shape
    assert (rows, columns) == (len(tokenizer.encode("a small boat")), 3)
    assert all(math.isclose(math.fsum(found.scores.values[at : at + 3]), 1.0) for at in range(0, rows * 3, 3))


# ---------------------------------------------------------------------------------------------------- score


def _group(*candidates: str, query: str = "a boat on the river") -> tasks_pb2.ScoreGroup:
    return tasks_pb2.ScoreGroup(
        group_id="g",
        query=_text(query, "q"),
        candidates=[_text(text, f"c{number}") for number, text in enumerate(candidates)],
    )


async def _score(engine: ReferenceEngine, group: tasks_pb2.ScoreGroup, **options: Any) -> GroupScores:
    options = {"granularity": SEQUENCE, **options}
    return await engine.score(_call(place="groups[0]"), group, tasks_pb2.ScoreOptions(**options))


async def test_what_fits_the_query_scores_higher() -> None:
    async with running() as engine:
        scores = await _score(engine, _group("1234 5678", "a boat on a river"))
    far, near = [tensor.values[0] for tensor in scores.candidates]
    assert [list(tensor.shape) for tensor in scores.candidates] == [[1], [1]]
    assert 0 < far < near < 1
    assert scores.higher_is_better
    assert scores.normalization == NONE


async def test_a_batch_gives_the_numbers_of_single_calls() -> None:
    texts = ("rain", "a boat", "the coast")
    async with running() as engine:
        together = await _score(engine, _group(*texts))
        alone = [await _score(engine, _group(text)) for text in texts]
    assert [t.values for t in together.candidates] == [s.candidates[0].values for s in alone]


async def test_an_instruction_changes_the_scores() -> None:
    async with running() as engine:
        plain = await _score(engine, _group("rain"))
        told = await _score(engine, _group("rain"), instruction="Prefer what is wet")
    assert plain.candidates[0].values != told.candidates[0].values


async def test_labels_are_normalised_over_themselves_or_scored_as_they_are() -> None:
    labels = [121, 110, 32]
    async with running() as engine:
        soft = await _score(engine, _group("rain"), label_token_ids=labels)
        raw = await _score(engine, _group("rain"), label_token_ids=labels, normalization=NONE)
        turned = await _score(engine, _group("rain"), label_token_ids=labels[::-1])
    assert (soft.normalization, raw.normalization) == (SOFTMAX, NONE)
    assert math.isclose(math.fsum(soft.candidates[0].values), 1.0)
    total = math.fsum(raw.candidates[0].values)
    assert total < 1
    for one, other in zip(soft.candidates[0].values, raw.candidates[0].values, strict=True):
        assert math.isclose(one, other / total)
    assert turned.candidates[0].values == soft.candidates[0].values[::-1]


async def test_token_scores_have_a_row_for_each_token_of_the_candidate() -> None:
    async with running() as engine:
        scores = await _score(engine, _group("rain"), granularity=TOKEN)
    ids = tokenizer.encode("rain")
    assert (list(scores.candidates[0].shape), list(scores.candidates[0].token_ids)) == ([len(ids), 1], ids)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"normalization": SOFTMAX}, "options.normalization"),
        ({"output_semantics": tasks_pb2.TASK_VALUE_SEMANTICS_LOGITS}, "options.output_semantics"),
        ({"label_token_ids": [1], "granularity": TOKEN}, "options.granularity"),
        (
            {"label_token_ids": [1], "output_semantics": tasks_pb2.TASK_VALUE_SEMANTICS_RELEVANCE},
            "options.output_semantics",
        ),
    ],
)
async def test_what_does_not_go_together_is_refused_by_name(options: dict[str, Any], field: str) -> None:
    async with running() as engine:
        with pytest.raises(Rejected) as refused:
            await _score(engine, _group("rain"), **options)
        assert refused.value.field == field


# ----------------------------------------------------------------------------------------------- scheduling


async def test_tasks_wait_in_the_same_queue_by_priority() -> None:
    order: list[int] = []
    async with running(max_running=1, latency=0.02) as engine:

        async def one(priority: int) -> None:
            await engine.embed(
                _call(priority=priority), _text("x"), tasks_pb2.EmbedOptions(granularity=SEQUENCE)
            )
            order.append(priority)

        async with asyncio.TaskGroup() as group:
            for priority in (0, 1, 9, 4):
                group.create_task(one(priority))
    assert order in ([9, 4, 1, 0], [0, 9, 4, 1])  # the first may have had the slot before the others came


async def test_a_cancelled_task_frees_its_place_and_an_aborted_one_ends_as_cancelled() -> None:
    async with running(latency=5.0) as engine:
        made = _call()
        options = tasks_pb2.EmbedOptions(granularity=SEQUENCE)
        aborted = asyncio.create_task(engine.embed(made, _text("x"), options))
        cancelled = asyncio.create_task(engine.embed(_call(), _text("y"), options))
        await until(lambda: engine.unfinished() == 2)
        cancelled.cancel()
        await until(lambda: engine.unfinished() == 1)
        await engine.abort(made.id)
        with pytest.raises(EngineFailure) as failure:
            await aborted
        assert failure.value.code == errors_pb2.ERROR_CODE_CANCELLED
        assert engine.unfinished() == 0
        assert cancelled.done()
