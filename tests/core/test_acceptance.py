"""Acceptance, and the one transport of each failure."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

import grpc
import pytest

from openengine.v1 import errors_pb2, generate_pb2, lifecycle_pb2, tasks_pb2
from openengine_adapters.core.errors import EngineDied, EngineFailure, invalid
from openengine_adapters.core.servicer import MOST_METADATA
from openengine_adapters.core.watchdog import Limits
from openengine_adapters.engine import Delta, Finish, FinishKind, GenerateCall, Step
from tests.core.conftest import SOON_S, Served, serve, until
from tests.core.fake_engine import FakeEngine, length_finish, token


class RankedEngine(FakeEngine):
    """Rank 0 makes a step whenever somebody looks; ranks that hang make none."""

    def __init__(self) -> None:
        super().__init__()
        self.looks = 0
        self.hung: dict[int, int] = {}

    def steps(self) -> int:
        self.looks += 1
        return self.looks

    def ranks_at_work(self) -> Mapping[int, int]:
        return {0: self.looks, **self.hung}


async def test_initial_metadata_comes_at_acceptance_before_the_first_token(served: Served) -> None:
    """GEN-08: a queued request is seen as accepted."""
    call = await served.accepted(served.request())
    assert len(served.servicer.requests) == 1
    call.cancel()


async def test_no_metadata_before_the_engine_has_admitted_the_request(served: Served) -> None:
    """GEN-08, the other half."""
    served.engine.gate.clear()
    call = served.stub.Generate(served.request())
    headers = asyncio.ensure_future(call.initial_metadata())
    await until(lambda: bool(served.engine.calls))
    assert not headers.done()
    served.engine.gate.set()
    async with asyncio.timeout(SOON_S):
        await headers
    call.cancel()


async def test_a_refusal_by_the_engine_is_a_status_and_frees_the_id(served: Served) -> None:
    """ERR-01, GEN-04."""
    served.engine.refuse = invalid("guided.regex", "does not compile")
    code, message = await served.refused(served.stub.Generate(served.request()))
    assert (code, message) == (grpc.StatusCode.INVALID_ARGUMENT, "guided.regex: does not compile")
    assert len(served.servicer.requests) == 0


async def test_a_failure_after_acceptance_is_one_engine_error_and_status_ok(served: Served) -> None:
    """ERR-01, STREAM-05, STREAM-06."""
    served.engine.script = lambda _: [token(97), EngineFailure("boom", retryable=True, retry_after_ms=5)]
    responses = await served.collect(served.request())
    assert [r.WhichOneof("event") for r in responses] == ["token", "error"]
    assert responses[-1].error.retryable and responses[-1].error.retry_after_ms == 5
    assert responses[-1].usage.completion_tokens == 1


async def test_a_late_refusal_is_an_engine_error_with_its_details(served: Served) -> None:
    """ERR-01, ERR-03: the engine found out only after acceptance."""
    served.engine.script = lambda _: [invalid("guided.regex", "too big", limit=5, value=9)]
    (response,) = await served.collect(served.request())
    assert response.error.code == errors_pb2.ERROR_CODE_INVALID_ARGUMENT
    assert dict(response.error.details) == {
        "field": "guided.regex",
        "reason": "too big",
        "limit": 5,
        "value": 9,
    }


async def test_an_unexpected_exception_shows_an_id_and_nothing_else(served: Served) -> None:
    """ERR-06."""
    served.engine.refuse = RuntimeError("secret /path prompt")
    code, message = await served.refused(served.stub.Generate(served.request()))
    assert code is grpc.StatusCode.INTERNAL
    assert "secret" not in message and "id" in message


async def test_an_unexpected_exception_after_acceptance_is_an_engine_error_with_an_id(served: Served) -> None:
    """ERR-01, ERR-06: what was generated stays counted, and the status is OK."""
    served.engine.script = lambda _: [token(97), RuntimeError("secret /path prompt")]
    responses = await served.collect(served.request())
    assert [r.WhichOneof("event") for r in responses] == ["token", "error"]
    error = responses[-1].error
    assert error.code == errors_pb2.ERROR_CODE_INTERNAL
    assert "secret" not in error.message and "id" in error.message
    assert responses[-1].usage.completion_tokens == 1


@pytest.mark.parametrize("task", [False, True])
async def test_a_refusal_is_logged_with_its_id_and_what_the_caller_sent_for_logs(
    served: Served, caplog: pytest.LogCaptureFixture, task: bool
) -> None:
    """GEN-07: trace context goes to the engine's tracing, all else to the log, bounded; tasks have a context."""
    metadata = {"tenant": "blue", "traceparent": "00-x", "zeal": "z" * 1000}
    context = tasks_pb2.TaskRequestContext(request_id="r1", model="other", metadata=metadata)
    with caplog.at_level(logging.INFO, logger="openengine_adapters"):
        await served.refused(
            served.stub.Embed(tasks_pb2.EmbedRequest(context=context))
            if task
            else served.stub.Generate(served.request(model="other", metadata=metadata))
        )
    (record,) = [record for record in caplog.records if record.message == "rejected"]
    fields = vars(record)
    assert fields["request_id"] == "r1"
    assert fields["metadata"].startswith("tenant=blue zeal=zzz") and len(fields["metadata"]) == MOST_METADATA


async def test_retry_after_is_sent_only_with_retryable() -> None:
    """ERR-02."""
    assert not EngineFailure("x", retry_after_ms=5).to_proto().HasField("retry_after_ms")


async def test_an_id_in_flight_is_refused_and_free_again_after_its_end(served: Served) -> None:
    """GEN-04."""
    call = await served.accepted(served.request())
    code, message = await served.refused(served.stub.Generate(served.request()))
    assert code is grpc.StatusCode.ALREADY_EXISTS and "request_id" in message
    await served.stub.Abort(lifecycle_pb2.AbortRequest(request_id="r1"))
    again = await served.accepted(served.request())
    again.cancel()
    call.cancel()


async def test_client_cancellation_frees_the_engine(served: Served) -> None:
    """STREAM-11."""
    call = await served.accepted(served.request())
    await until(lambda: len(served.engine.started) == 1)
    call.cancel()
    await until(lambda: len(served.engine.closed) == 1 and len(served.servicer.requests) == 0)


async def test_an_expired_deadline_frees_the_engine(served: Served) -> None:
    """STREAM-11."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in served.stub.Generate(served.request(), timeout=1):
            pass
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await until(lambda: len(served.engine.closed) == 1 and len(served.servicer.requests) == 0)


async def test_trace_context_reaches_the_engine(served: Served) -> None:
    """GEN-07: from the request's metadata, else from gRPC's."""
    served.engine.script = lambda _: [length_finish()]
    request = served.request(metadata={"traceparent": "body", "other": "x"})
    async for _ in served.stub.Generate(
        request, metadata=(("traceparent", "header"), ("tracestate", "state"))
    ):
        pass
    assert served.engine.calls[-1].trace_headers == {"traceparent": "body", "tracestate": "state"}


async def test_a_reader_that_stops_loses_its_request() -> None:
    """STREAM-10: its id and slot are free, and when it reads again its stream ends properly (ERR-01)."""
    engine = FakeEngine()
    big = Step([*token(97).deltas], prompt_tokens=3)
    big.deltas[0].text = "x" * 100_000
    engine.script = lambda _: [big] * 2000
    async with serve(engine, Limits(stall_s=0.3, period_s=0.02)) as served:
        call = await served.accepted(served.request())
        await until(lambda: len(served.engine.closed) == 1 and len(served.servicer.requests) == 0)
        again = await served.accepted(served.request())
        again.cancel()
        async with asyncio.timeout(SOON_S):
            responses = [response async for response in call]
        assert responses[-1].error.code == errors_pb2.ERROR_CODE_OVERLOADED
        assert responses[-1].error.retryable and responses[-1].HasField("usage")
        assert await call.code() is grpc.StatusCode.OK


async def test_engine_death_ends_every_stream_with_a_retryable_error() -> None:
    """ERR-04, HEALTH-04."""
    async with serve(FakeEngine()) as served:
        calls = [await served.accepted(served.request(f"r{i}")) for i in range(5)]
        served.engine.dead = True
        for call in calls:
            async with asyncio.timeout(2.0):
                responses = [response async for response in call]
            assert [r.WhichOneof("event") for r in responses] == ["error"]
            assert responses[0].error.code == errors_pb2.ERROR_CODE_INTERNAL and responses[0].error.retryable
        code, _ = await served.refused(served.stub.Generate(served.request("late")))
        assert code is grpc.StatusCode.UNAVAILABLE
        health = await served.stub.Health(lifecycle_pb2.HealthRequest())
        assert health.state == lifecycle_pb2.HEALTH_STATE_NOT_READY


async def test_an_engine_that_dies_while_it_admits_is_unavailable(served: Served) -> None:
    """ERR-04: nothing was accepted yet."""
    served.engine.refuse = EngineDied()
    code, _ = await served.refused(served.stub.Generate(served.request()))
    assert code is grpc.StatusCode.UNAVAILABLE


async def test_the_first_request_that_sees_a_death_tells_everybody() -> None:
    """ERR-04, HEALTH-04: whoever was told of it finds no READY server, however seldom the watchdog looks."""
    async with serve(FakeEngine(), Limits(period_s=600)) as served:
        other = await served.accepted(served.request("other"))
        served.engine.script = lambda _: [token(97), EngineDied()]
        assert (await served.collect(served.request("first")))[-1].error.retryable
        health = await served.stub.Health(lifecycle_pb2.HealthRequest())
        assert health.state == lifecycle_pb2.HEALTH_STATE_NOT_READY
        async with asyncio.timeout(SOON_S):
            responses = [response async for response in other]
        assert responses[-1].error.retryable


@pytest.mark.parametrize("dead", [True, False], ids=["dies", "gives_up"])
async def test_a_cancellation_that_nobody_asked_for_is_a_failure(dead: bool) -> None:
    """STREAM-09, ERR-04: an engine that goes down cancels its requests first; what came with that is still sent."""
    async with serve(FakeEngine(), Limits(period_s=600)) as served:

        def go_down(_call: GenerateCall) -> list[Step]:
            served.engine.dead = dead
            return [token(97), Step([Delta(0, [98], "b", finish=Finish(FinishKind.CANCELLED))])]

        served.engine.script = go_down
        *tokens, last = await served.collect(served.request())
        assert "".join(response.token.text for response in tokens) == "ab"
        assert (last.error.code, last.error.retryable) == (errors_pb2.ERROR_CODE_INTERNAL, True)
        assert last.usage.completion_tokens == 2
        health = await served.stub.Health(lifecycle_pb2.HealthRequest())
        assert (health.state == lifecycle_pb2.HEALTH_STATE_NOT_READY) is dead


async def test_a_hung_engine_counts_as_dead() -> None:
    """ERR-07: no step for a set time, while requests are unfinished."""
    async with serve(FakeEngine(), Limits(hang_s=0.2, period_s=0.02)) as served:
        responses = await served.collect(served.request())
        assert responses[-1].error.retryable
        health = await served.stub.Health(lifecycle_pb2.HealthRequest())
        assert health.state == lifecycle_pb2.HEALTH_STATE_NOT_READY


async def test_a_hung_rank_counts_as_death_although_others_make_steps() -> None:
    """ERR-07: only a rank that has something to do can hang."""
    engine = RankedEngine()
    async with serve(engine, Limits(hang_s=0.3, period_s=0.02)) as served:
        call = await served.accepted(served.request())
        await until(lambda: engine.looks > 40)
        assert not served.servicer.lifecycle.died
        engine.hung = {1: 7}
        async with asyncio.timeout(SOON_S):
            responses = [response async for response in call]
        assert responses[-1].error.message.startswith("rank 1 of the engine made no step")


async def test_an_idle_engine_is_not_hung() -> None:
    """ERR-07, the other half."""
    async with serve(FakeEngine(), Limits(hang_s=0.05, period_s=0.01)) as served:
        engine = served.engine
        engine.script = lambda _: [length_finish()]
        for number in range(10):
            await served.collect(served.request(f"r{number}"))
            await asyncio.sleep(0.02)
        assert served.servicer.lifecycle.died is None


@pytest.mark.parametrize("deaf", [False, True])
async def test_abort_ends_every_output_as_cancelled_and_frees_the_id(deaf: bool) -> None:
    """ABORT-02, ABORT-05, GEN-04; an engine that does not answer must not hold the id."""
    async with serve(FakeEngine()) as served:
        served.engine.deaf = deaf
        sampling = generate_pb2.SamplingParams(num_sequences=3, temperature=1)
        call = await served.accepted(served.request(sampling=sampling))
        answer = await served.stub.Abort(lifecycle_pb2.AbortRequest(request_id="r1"))
        assert answer.status == lifecycle_pb2.ABORT_STATUS_ABORTED
        assert len(served.servicer.requests) == 0
        async with asyncio.timeout(SOON_S):
            responses = [response async for response in call]
        assert [r.finished.output_index for r in responses] == [0, 1, 2]
        assert {r.finished.reason for r in responses} == {generate_pb2.FINISH_REASON_CANCELLED}
        assert responses[-1].HasField("usage")


async def test_abort_knows_finished_from_unknown(served: Served) -> None:
    """ABORT-01."""
    served.engine.script = lambda _: [length_finish()]
    await served.collect(served.request("done"))
    for _ in range(2):
        answer = await served.stub.Abort(lifecycle_pb2.AbortRequest(request_id="done"))
        assert answer.status == lifecycle_pb2.ABORT_STATUS_ALREADY_FINISHED
    code, _ = await served.refused(served.stub.Abort(lifecycle_pb2.AbortRequest(request_id="never")))
    assert code is grpc.StatusCode.NOT_FOUND
    code, _ = await served.refused(served.stub.Abort(lifecycle_pb2.AbortRequest()))
    assert code is grpc.StatusCode.INVALID_ARGUMENT


async def test_abort_all_and_ids_compared_whole(served: Served) -> None:
    """ABORT-03, ABORT-04."""
    calls = {name: await served.accepted(served.request(name)) for name in ("r1", "r10", "r100")}
    await served.stub.Abort(lifecycle_pb2.AbortRequest(request_id="r1"))
    assert {r.request_id for r in served.servicer.requests} == {"r10", "r100"}
    await served.stub.Abort(lifecycle_pb2.AbortRequest(all_requests=lifecycle_pb2.AllRequests()))
    assert len(served.servicer.requests) == 0
    for call in calls.values():
        async with asyncio.timeout(SOON_S):
            assert [r async for r in call][-1].finished.reason == generate_pb2.FINISH_REASON_CANCELLED


async def test_a_request_aborted_while_it_is_admitted_never_starts(served: Served) -> None:
    """ABORT-02 in the moment before acceptance."""
    served.engine.gate.clear()
    call = served.stub.Generate(served.request())
    await until(lambda: bool(served.engine.calls))
    abort = asyncio.ensure_future(served.stub.Abort(lifecycle_pb2.AbortRequest(request_id="r1")))
    await until(lambda: next(iter(served.servicer.requests)).aborted)
    served.engine.gate.set()
    assert (await abort).status == lifecycle_pb2.ABORT_STATUS_ABORTED
    code, _ = await served.refused(call)
    assert code is grpc.StatusCode.CANCELLED
    assert len(served.engine.running) == 0


async def test_arbitrary_bytes_do_not_reach_the_engine(served: Served) -> None:
    """ERR-05."""
    async with grpc.aio.insecure_channel(served.target) as channel:
        raw: Any = channel.unary_stream("/openengine.v1.OpenEngine/Generate")
        for junk in (b"\xff" * 50, b"", b"\x0a\xff\xff\xff\xff\x0f", bytes(range(256))):
            with pytest.raises(grpc.aio.AioRpcError):
                async for _ in raw(junk):
                    pass
    assert served.engine.calls == [] and len(served.servicer.requests) == 0
    assert (await served.stub.Health(lifecycle_pb2.HealthRequest())).state == lifecycle_pb2.HEALTH_STATE_READY
