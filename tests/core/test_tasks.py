"""Embed, Classify and Score over the wire: order, all or nothing, and every way in which a call can end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from typing import Any

import grpc
import pytest

from openengine.v1 import inputs_pb2, lifecycle_pb2, lora_pb2, tasks_pb2
from openengine_adapters.core.errors import EngineDied, EngineFailure, Rejected
from openengine_adapters.engine import Tensor
from tests.core.conftest import SOON_S, Served, serve, until
from tests.core.task_engine import (
    DIMENSION,
    LABELS,
    LOGITS,
    NONE,
    PROBABILITIES,
    RELEVANCE,
    SEQUENCE,
    SOFTMAX,
    SPARSE,
    SUPPORT,
    TOKEN,
    TaskEngine,
)

Code = grpc.StatusCode
TASKS = ["Embed", "Classify", "Score"]


def ids_input(item_id: str, *ids: int) -> tasks_pb2.TaskInput:
    return tasks_pb2.TaskInput(item_id=item_id, token_ids=inputs_pb2.TokenIds(ids=ids or (1, 2)))


def context(request_id: str = "t1", **fields: Any) -> tasks_pb2.TaskRequestContext:
    return tasks_pb2.TaskRequestContext(request_id=request_id, model="fake-model", **fields)


def a_request(task: str, items: int = 3, **fields: Any) -> Any:
    """A valid request of `items` items i0, i1, …; for Score one group with these candidates."""
    inputs = [ids_input(f"i{n}") for n in range(items)]
    options = fields.pop("options", None)
    about = context(**fields)
    if task == "Embed":
        return tasks_pb2.EmbedRequest(context=about, inputs=inputs, options=options)
    if task == "Classify":
        return tasks_pb2.ClassifyRequest(context=about, inputs=inputs, options=options)
    group = tasks_pb2.ScoreGroup(group_id="g", query=ids_input("q"), candidates=inputs)
    return tasks_pb2.ScoreRequest(context=about, groups=[group], options=options)


async def soon(call: Awaitable[Any]) -> Any:
    async with asyncio.timeout(SOON_S):
        return await call


@pytest.fixture
async def tasks() -> AsyncIterator[Served]:
    async with serve(TaskEngine()) as one:
        yield one


def engine_of(served: Served) -> TaskEngine:
    assert isinstance(served.engine, TaskEngine)
    return served.engine


async def start(served: Served, task: str, **fields: Any) -> Any:
    """Start a call whose items wait inside the engine, and return it once the first one is there."""
    engine = engine_of(served)
    engine.gate.clear()
    call = getattr(served.stub, task)(a_request(task, **fields), timeout=fields.pop("timeout", None))
    await until(lambda: bool(engine.inside))
    return call


async def ended(call: Any) -> Code:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await soon(call)
    return caught.value.code()


# --------------------------------------------------------------------------------------------------- responses


async def test_embed_keeps_order_and_counts_tokens(tasks: Served) -> None:
    """TASK-13, TASK-14, EMB-01."""
    inputs = [ids_input("b", 1), ids_input("a", 1, 2, 3)]
    response = await soon(tasks.stub.Embed(tasks_pb2.EmbedRequest(context=context("x"), inputs=inputs)))
    assert response.request_id == "x"
    assert [output.item_id for output in response.outputs] == ["b", "a"]
    assert [output.input_index for output in response.outputs] == [0, 1]
    assert all(output.HasField("input_index") for output in response.outputs)
    assert [list(output.dense.values) for output in response.outputs] == [[1.5] * 4, [3.5] * 4]
    assert {output.granularity for output in response.outputs} == {SEQUENCE}
    assert response.usage.input_tokens == 4
    assert response.usage.cached_input_tokens == 0


async def test_embed_tokens_dimensions_and_sparse(tasks: Served) -> None:
    options = tasks_pb2.EmbedOptions(granularity=TOKEN, dimensions=2)
    (output,) = (await soon(tasks.stub.Embed(a_request("Embed", 1, options=options)))).outputs
    assert list(output.dense.shape) == [2, 2]
    assert list(output.token_ids) == [1, 2]
    options = tasks_pb2.EmbedOptions(encoding=SPARSE)
    (output,) = (await soon(tasks.stub.Embed(a_request("Embed", 1, options=options)))).outputs
    assert (list(output.sparse.shape), list(output.sparse.indices)) == ([DIMENSION], [DIMENSION - 1])


async def test_classify_states_semantics_and_labels(tasks: Served) -> None:
    """CLS-01 … CLS-03."""
    response = await soon(tasks.stub.Classify(a_request("Classify", 2)))
    assert [output.semantics for output in response.outputs] == [PROBABILITIES] * 2
    assert [tuple(output.labels) for output in response.outputs] == [LABELS] * 2
    options = tasks_pb2.ClassifyOptions(output_semantics=LOGITS, granularity=TOKEN)
    (output,) = (await soon(tasks.stub.Classify(a_request("Classify", 1, options=options)))).outputs
    assert output.semantics == LOGITS
    assert list(output.scores.shape) == [2, 3]


async def test_score_keeps_groups_and_candidates(tasks: Served) -> None:
    """SCO-02, SCO-05, SCO-06."""
    groups = [
        tasks_pb2.ScoreGroup(
            group_id=f"g{n}", query=ids_input("q"), candidates=[ids_input("z", 1), ids_input("a", 1, 2)]
        )
        for n in range(2)
    ]
    options = tasks_pb2.ScoreOptions(label_token_ids=[9, 3], normalization=SOFTMAX)
    request = tasks_pb2.ScoreRequest(context=context(), groups=groups, options=options)
    response = await soon(tasks.stub.Score(request))
    assert [(group.group_id, group.group_index) for group in response.groups] == [("g0", 0), ("g1", 1)]
    for group in response.groups:
        assert [(c.candidate_id, c.candidate_index) for c in group.candidates] == [("z", 0), ("a", 1)]
        assert [list(c.scores.shape) for c in group.candidates] == [[2], [2]]
        assert all(c.HasField("candidate_index") for c in group.candidates)
    assert list(response.label_token_ids) == [9, 3]
    assert (response.normalization, response.semantics) == (SOFTMAX, PROBABILITIES)
    assert response.higher_is_better
    assert response.granularity == SEQUENCE
    response = await soon(tasks.stub.Score(a_request("Score")))
    assert (response.normalization, response.semantics) == (NONE, RELEVANCE)


@pytest.mark.parametrize("task", TASKS)
async def test_parts_have_ids_of_one_length(tasks: Served, task: str) -> None:
    """ABORT-04: no part's id begins another's, also across calls."""
    for number in range(2):
        await soon(getattr(tasks.stub, task)(a_request(task, 5, request_id=f"r{number}")))
    seen = [call.id for call in engine_of(tasks).seen]
    assert len(seen) == len(set(seen)) == 10
    assert {len(call_id) for call_id in seen} == {32}


async def test_groups_have_ids_of_their_own(tasks: Served) -> None:
    groups = [
        tasks_pb2.ScoreGroup(group_id=f"g{n}", query=ids_input("q"), candidates=[ids_input("a")])
        for n in range(3)
    ]
    await soon(tasks.stub.Score(tasks_pb2.ScoreRequest(context=context(), groups=groups)))
    assert len({call.id for call in engine_of(tasks).seen}) == 3


async def test_what_the_call_says_reaches_the_engine(tasks: Served) -> None:
    """TASK-10, LORA-07: priority, adapter and trace context; the place names each item."""
    request = a_request(
        "Embed", 2, priority=3, lora_name="adapter", metadata={"traceparent": "00-1", "other": "x"}
    )
    await soon(tasks.stub.Embed(request))
    first, second = sorted(engine_of(tasks).seen, key=lambda call: call.place)
    assert (first.place, second.place) == ("inputs[0]", "inputs[1]")
    assert first.priority == 3
    assert first.lora is not None
    assert first.lora.name == "adapter"
    assert dict(first.trace_headers) == {"traceparent": "00-1"}


async def test_large_batches_enter_the_engine_bit_by_bit() -> None:
    async with serve(TaskEngine(max_running_requests=3)) as served:
        response = await soon(served.stub.Embed(a_request("Embed", 40)))
        assert [output.item_id for output in response.outputs] == [f"i{n}" for n in range(40)]
        assert engine_of(served).most == 6
        await soon(served.stub.Score(a_request("Score")))
        assert engine_of(served).seen[-1].at_once == 6, "of a group's candidates"


async def test_media_of_items_reach_the_engine(tasks: Served) -> None:
    image = inputs_pb2.MediaItem(raw_bytes=b"bytes", uuid="u", mime_type="image/png")
    item = tasks_pb2.TaskInput(item_id="a", multimodal=tasks_pb2.MultimodalTaskInput(media=[image, image]))
    await soon(tasks.stub.Embed(tasks_pb2.EmbedRequest(context=context(), inputs=[item])))
    group = tasks_pb2.ScoreGroup(group_id="g", query=item, candidates=[ids_input("b")])
    await soon(tasks.stub.Score(tasks_pb2.ScoreRequest(context=context(), groups=[group])))
    embed, score = engine_of(tasks).seen
    assert [media.data for media in embed.media["a"]] == [b"bytes"] * 2
    assert embed.media["a"][1].field == "inputs[0].multimodal.media[1].raw_bytes"
    assert list(score.media) == ["a"]
    assert score.media["a"][0].field == "groups[0].query.multimodal.media[0].raw_bytes"


# --------------------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (Rejected(Code.INVALID_ARGUMENT, "too long", field="inputs[1].text"), Code.INVALID_ARGUMENT),
        (Rejected(Code.RESOURCE_EXHAUSTED, "queue full"), Code.RESOURCE_EXHAUSTED),
        (EngineFailure("broke"), Code.INTERNAL),
        (EngineDied(), Code.UNAVAILABLE),
        (RuntimeError("a bug"), Code.INTERNAL),
    ],
)
async def test_one_failing_item_fails_the_call(task: str, failure: Exception, code: Code) -> None:
    """TASK-15, TASK-04: the siblings that wait in the engine are cancelled, nothing is answered."""
    async with serve(TaskEngine()) as served:
        engine = engine_of(served)
        engine.failures["i2"] = failure
        if task != "Score":
            engine.gate.clear()
        assert await ended(getattr(served.stub, task)(a_request(task, 4))) is code
        assert not engine.inside
        assert not len(served.servicer.requests)
        if task != "Score":
            assert len(engine.cancelled) == 3


async def test_an_item_dropped_by_the_engine_fails_the_call(tasks: Served) -> None:
    engine_of(tasks).drops.add("i1")
    assert await ended(tasks.stub.Embed(a_request("Embed"))) is Code.UNAVAILABLE


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(
    ("tensor", "says"),
    [
        (Tensor([4], [1.0, 2.0, float("nan"), 4.0]), "not finite"),
        (Tensor([4], [1.0, 2.0, float("inf"), 4.0]), "not finite"),
        (Tensor([4], [1.0, float("-inf"), float("inf"), 4.0]), "not finite"),
        (Tensor([4], [1.0]), "1 values for shape [4]"),
        (Tensor([], [1.0]), "shape []"),
        (Tensor([1, 4], [1.0] * 4), "shape [1, 4]"),
        (Tensor([0], []), "shape [0]"),
        (Tensor([4], [1.0] * 4, input_tokens=1, cached_input_tokens=2), "2 cached of 1"),
        (Tensor([4], [1.0] * 4, token_ids=[1]), "1 token ids"),
    ],
)
async def test_broken_tensors_are_not_sent(task: str, tensor: Tensor, says: str) -> None:
    """TASK-11, TASK-13, TASK-16: INTERNAL, and the message names the item."""
    async with serve(TaskEngine()) as served:
        engine_of(served).results["i1"] = tensor
        code, details = await served.refused(getattr(served.stub, task)(a_request(task)))
        assert code is Code.INTERNAL
        assert "[1] (item 'i1')" in details
        assert says in details


@pytest.mark.parametrize(
    ("tensor", "says"),
    [
        (Tensor([4], [1.0, 1.0], indices=[1]), "1 indices"),
        (Tensor([4], [1.0, 1.0], indices=[1, 1]), "do not increase"),
        (Tensor([4], [1.0, 1.0], indices=[2, 1]), "do not increase"),
        (Tensor([4], [1.0], indices=[4]), "outside 0 to 3"),
        (Tensor([3], [1.0] * 3), "last dimension must be 4"),
    ],
)
async def test_broken_embeddings_are_not_sent(tasks: Served, tensor: Tensor, says: str) -> None:
    """TASK-12, EMB-05."""
    engine_of(tasks).results["i0"] = tensor
    code, details = await tasks.refused(tasks.stub.Embed(a_request("Embed", 1)))
    assert code is Code.INTERNAL
    assert says in details


async def test_labels_must_fit_the_classes(tasks: Served) -> None:
    engine_of(tasks).results["i0"] = Tensor([2], [0.5, 0.5])
    code, details = await tasks.refused(tasks.stub.Classify(a_request("Classify", 1)))
    assert code is Code.INTERNAL
    assert "3 labels for 2 classes" in details


async def test_output_values_are_limited(tasks: Served) -> None:
    """CAP-03: the limit itself passes, one more does not."""
    options = tasks_pb2.EmbedOptions(granularity=TOKEN)
    request = tasks_pb2.EmbedRequest(context=context(), inputs=[ids_input("a", *range(10))], options=options)
    await soon(tasks.stub.Embed(request))
    request.inputs[0].token_ids.ids.append(1)
    code, details = await tasks.refused(tasks.stub.Embed(request))
    assert code is Code.INVALID_ARGUMENT
    assert details.startswith("inputs[0]: its output has 44 values and 40 are allowed")


# ------------------------------------------------------------------------------------------------ ends outside


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("everything", [False, True])
async def test_abort_ends_a_task(tasks: Served, task: str, everything: bool) -> None:
    """TASK-08, ABORT-03: CANCELLED, the engine is free, and so is the id."""
    call = await start(tasks, task)
    target = {"all_requests": lifecycle_pb2.AllRequests()} if everything else {"request_id": "t1"}
    began = asyncio.get_running_loop().time()
    response = await soon(tasks.stub.Abort(lifecycle_pb2.AbortRequest(**target)))
    assert response.status == lifecycle_pb2.ABORT_STATUS_ABORTED
    assert asyncio.get_running_loop().time() - began < 1
    assert not engine_of(tasks).inside
    assert await ended(call) is Code.CANCELLED
    again = await soon(tasks.stub.Abort(lifecycle_pb2.AbortRequest(request_id="t1")))
    assert again.status == lifecycle_pb2.ABORT_STATUS_ALREADY_FINISHED
    engine_of(tasks).gate.set()
    await soon(getattr(tasks.stub, task)(a_request(task)))


async def test_abort_leaves_other_ids_alone(tasks: Served) -> None:
    """ABORT-04."""
    one = await start(tasks, "Embed", request_id="r1")
    ten = await start(tasks, "Embed", request_id="r10")
    await soon(tasks.stub.Abort(lifecycle_pb2.AbortRequest(request_id="r1")))
    assert await ended(one) is Code.CANCELLED
    engine_of(tasks).gate.set()
    assert (await soon(ten)).request_id == "r10"


@pytest.mark.parametrize("task", TASKS)
async def test_a_client_that_leaves_stops_the_work(tasks: Served, task: str) -> None:
    """TASK-09."""
    call = await start(tasks, task)
    call.cancel()
    await until(lambda: not engine_of(tasks).inside and not len(tasks.servicer.requests))


@pytest.mark.parametrize("task", TASKS)
async def test_an_expired_deadline_stops_the_work(tasks: Served, task: str) -> None:
    """TASK-09."""
    engine = engine_of(tasks)
    engine.gate.clear()
    call = getattr(tasks.stub, task)(a_request(task), timeout=0.3)
    assert await ended(call) is Code.DEADLINE_EXCEEDED
    await until(lambda: not engine.inside and not len(tasks.servicer.requests))


async def test_one_namespace_of_ids(tasks: Served) -> None:
    """TASK-07: whichever RPC holds the id."""
    call = await start(tasks, "Embed", request_id="same")
    for task in TASKS:
        code, details = await tasks.refused(getattr(tasks.stub, task)(a_request(task, request_id="same")))
        assert code is Code.ALREADY_EXISTS
        assert details.startswith("context.request_id")
    code, _ = await tasks.refused(tasks.stub.Generate(tasks.request("same")))
    assert code is Code.ALREADY_EXISTS
    engine_of(tasks).gate.set()
    await soon(call)
    stream = await tasks.accepted(tasks.request("same"))
    code, _ = await tasks.refused(tasks.stub.Score(a_request("Score", request_id="same")))
    assert code is Code.ALREADY_EXISTS
    stream.cancel()


@pytest.mark.parametrize("task", TASKS)
async def test_the_death_of_the_engine_ends_tasks(task: str) -> None:
    """ERR-04."""
    async with serve(TaskEngine()) as served:
        call = await start(served, task)
        served.engine.dead = True
        assert await ended(call) is Code.UNAVAILABLE
        code, _ = await served.refused(getattr(served.stub, task)(a_request(task, request_id="new")))
        assert code is Code.UNAVAILABLE


@pytest.mark.parametrize("task", TASKS)
async def test_drain_counts_and_refuses_tasks(task: str) -> None:
    """DRAIN-01, DRAIN-02, DRAIN-03."""
    async with serve(TaskEngine()) as served:
        call = await start(served, task)
        drain = served.stub.Drain(
            lifecycle_pb2.DrainRequest(
                stop_accepting_new_requests=True, deadline_ms=300, abort_after_deadline=True
            )
        )
        events = aiter(drain)
        assert (await soon(anext(events))).in_flight_requests == 1
        code, _ = await served.refused(getattr(served.stub, task)(a_request(task, request_id="new")))
        assert code is Code.UNAVAILABLE
        assert await ended(call) is Code.CANCELLED
        *_, last = [event async for event in events]
        assert last.state == lifecycle_pb2.DRAIN_STATE_COMPLETE
        assert last.in_flight_requests == 0


async def test_unload_waits_for_a_task_that_uses_the_adapter(tasks: Served) -> None:
    """LORA-09."""
    call = await start(tasks, "Embed", lora_name="adapter")
    unload = lora_pb2.UnloadLoraRequest(lora_name="adapter")
    assert await ended(tasks.stub.UnloadLora(unload, timeout=0.3)) in (
        Code.DEADLINE_EXCEEDED,
        Code.FAILED_PRECONDITION,
    )
    waiting = tasks.stub.UnloadLora(unload)
    engine_of(tasks).gate.set()
    await soon(call)
    await soon(waiting)
    code, _ = await tasks.refused(tasks.stub.Embed(a_request("Embed", lora_name="adapter")))
    assert code is Code.NOT_FOUND


@pytest.mark.parametrize("task", TASKS)
async def test_the_probe_of_a_model_that_does_not_generate(task: str) -> None:
    """HEALTH-02: the smallest request of a task that it serves."""
    support = {name.lower(): SUPPORT if name == task else None for name in TASKS}
    async with serve(TaskEngine(None, generation=None, **support)) as served:
        request = lifecycle_pb2.HealthRequest(include_inference_probe=True)
        engine = engine_of(served)
        for failure, state in (
            (None, lifecycle_pb2.HEALTH_STATE_READY),
            (EngineFailure("broke"), lifecycle_pb2.HEALTH_STATE_NOT_READY),
        ):
            if failure is not None:
                engine.failures.update({"probe": failure, "candidate": failure})
            response = await soon(served.stub.Health(request))
            (check,) = [check for check in response.checks if check.name == "inference_probe"]
            assert check.state == state
        assert len(engine.seen) == 2
