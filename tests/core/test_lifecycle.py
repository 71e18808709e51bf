"""Health, load, discovery and drain, through the wire."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from openengine.v1 import (
    discovery_pb2,
    errors_pb2,
    inputs_pb2,
    kv_pb2,
    lifecycle_pb2,
    model_pb2,
    observability_pb2,
    tasks_pb2,
)
from openengine_adapters.core.capabilities import check_schema_release, model_info
from openengine_adapters.core.watchdog import Limits
from openengine_adapters.engine import TaskSupport
from openengine_adapters.server import SERVICE
from tests.core.conftest import SOON_S, Served, serve, until
from tests.core.fake_engine import FakeEngine, description, length_finish, token

Health, Drain = lifecycle_pb2.HealthRequest, lifecycle_pb2.DrainRequest


async def test_while_the_engine_starts_only_health_answers() -> None:
    """DISC-13, HEALTH-04, HEALTH-05."""
    async with serve(FakeEngine(), opened=False) as served:
        assert (await served.stub.Health(Health())).state == lifecycle_pb2.HEALTH_STATE_STARTING
        async with grpc.aio.insecure_channel(served.target) as channel:
            status = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert status.status == health_pb2.HealthCheckResponse.NOT_SERVING
        for call in (
            served.stub.GetEngineInfo(discovery_pb2.GetEngineInfoRequest()),
            served.stub.GetModelInfo(model_pb2.GetModelInfoRequest(model="fake-model")),
            served.stub.GetLoad(observability_pb2.GetLoadRequest()),
            served.stub.GetKvConnectorInfo(kv_pb2.GetKvConnectorInfoRequest()),
            served.stub.Abort(lifecycle_pb2.AbortRequest(request_id="x")),
            served.stub.Generate(served.request()),
            served.stub.Drain(Drain()),
        ):
            code, message = await served.refused(call)
            assert code is grpc.StatusCode.UNAVAILABLE and "starting" in message


async def test_grpc_health_follows_and_reflection_is_on(served: Served) -> None:
    """HEALTH-05."""
    async with grpc.aio.insecure_channel(served.target) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("", SERVICE):
            answer = await health.Check(health_pb2.HealthCheckRequest(service=name))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        names = {service.name async for r in call for service in r.list_services_response.service}
    assert {SERVICE, "grpc.health.v1.Health"} <= names


async def test_health_checks_by_name_model_and_role(served: Served) -> None:
    """HEALTH-01, HEALTH-03, DISC-12."""
    answer = await served.stub.Health(Health(role=discovery_pb2.ENGINE_ROLE_DECODE))
    checks = {check.name: check.state for check in answer.checks}
    assert checks["role"] == lifecycle_pb2.HEALTH_STATE_NOT_READY
    assert {"grpc", "scheduler", "model"} <= set(checks)
    code, _ = await served.refused(served.stub.Health(Health(model="other")))
    assert code is grpc.StatusCode.NOT_FOUND
    unknown: Any = 77  # a role of a later revision
    answer = await served.stub.Health(Health(role=unknown))
    assert answer.state == lifecycle_pb2.HEALTH_STATE_READY


async def test_concurrent_probes_share_one_inference(served: Served) -> None:
    """HEALTH-02."""
    served.engine.script = lambda _: [token(97), length_finish()]
    served.engine.gate.clear()
    probes = [
        asyncio.ensure_future(served.stub.Health(Health(include_inference_probe=True))) for _ in range(5)
    ]
    await until(lambda: bool(served.engine.calls))
    light = await served.stub.Health(Health())
    assert "inference_probe" not in {check.name for check in light.checks}
    served.engine.gate.set()
    for probe in probes:
        checks = {check.name: check.state for check in (await probe).checks}
        assert checks["inference_probe"] == lifecycle_pb2.HEALTH_STATE_READY
    assert len(served.engine.calls) == 1
    await until(lambda: not served.engine.running)


async def test_probes_one_after_the_other_and_at_once_are_all_answered(served: Served) -> None:
    """HEALTH-02: who comes just when a probe ends starts the next, and disturbs nobody."""
    served.engine.script = lambda _: [token(97), length_finish()]

    async def ask() -> None:
        for _ in range(20):
            answer = await served.stub.Health(Health(include_inference_probe=True))
            assert answer.state == lifecycle_pb2.HEALTH_STATE_READY

    await asyncio.gather(*(ask() for _ in range(5)))


async def test_a_probe_that_outlasts_its_caller_is_answered_in_time(served: Served) -> None:
    """HEALTH-02: "not ready" before the caller's deadline, and the probe goes on for the others."""
    served.engine.script = lambda _: [token(97), length_finish()]
    served.engine.gate.clear()
    probe = Health(include_inference_probe=True)
    patient = asyncio.ensure_future(served.stub.Health(probe))
    hasty = await served.stub.Health(probe, timeout=2)
    (check,) = [check for check in hasty.checks if check.name == "inference_probe"]
    assert check.state == hasty.state == lifecycle_pb2.HEALTH_STATE_NOT_READY
    assert check.message.startswith("no answer within")
    served.engine.gate.set()
    assert (await patient).state == lifecycle_pb2.HEALTH_STATE_READY
    assert len(served.engine.calls) == 1


async def test_a_pooling_model_describes_what_its_tasks_take() -> None:
    """MODEL-07, MODEL-10."""
    image, whole = inputs_pb2.MODALITY_IMAGE, (tasks_pb2.TASK_OUTPUT_GRANULARITY_SEQUENCE,)
    ids = TaskSupport(input_types=(tasks_pb2.TASK_INPUT_TYPE_TOKEN_IDS,), granularities=whole)
    sees = TaskSupport(
        input_types=(tasks_pb2.TASK_INPUT_TYPE_TEXT, tasks_pb2.TASK_INPUT_TYPE_MULTIMODAL),
        granularities=whole,
        modalities=(image,),
    )
    for support, expected in ((ids, (False, True, False)), (sees, (True, False, True))):
        info = model_info(description(generation=None, embed=support))
        found = (info.supports_text_input, info.supports_token_ids_input, info.supports_multimodal)
        assert found == expected


async def test_a_look_that_fails_does_not_blind_the_watchdog() -> None:
    """ERR-04: whatever the engine's innards raise, its death is still seen afterwards."""
    async with serve(FakeEngine(), Limits(period_s=0.01)) as served:
        looked = asyncio.Event()

        def unfinished() -> int:
            looked.set()
            raise RuntimeError("an attribute that the next version has not")

        served.engine.unfinished = unfinished  # type: ignore[method-assign]  # of this one engine
        async with asyncio.timeout(SOON_S):
            await looked.wait()
        served.engine.dead = True
        await until(lambda: served.servicer.lifecycle.died is not None)


async def test_discovery_answers_the_contracts_identity(served: Served) -> None:
    """DISC-01 … DISC-10, MODEL-01, MODEL-02, KVC-01."""
    info = await served.stub.GetEngineInfo(discovery_pb2.GetEngineInfoRequest())
    assert (info.schema_revision, info.minimum_client_revision) == (1, 1)
    assert info.role == discovery_pb2.ENGINE_ROLE_AGGREGATED
    assert list(info.supported_models) == ["fake-model"]
    assert info.kv_connector.HasField("enabled") and not info.kv_connector.enabled
    assert info.kv_connector == await served.stub.GetKvConnectorInfo(kv_pb2.GetKvConnectorInfoRequest())
    load = await served.stub.GetLoad(observability_pb2.GetLoadRequest())
    assert load.instance_id == info.instance_id != ""
    for name in ("fake-model", "fake", "alias"):
        model = await served.stub.GetModelInfo(model_pb2.GetModelInfoRequest(model=name))
        assert model.model_id == "fake-model"
    assert not model.HasField("max_output_tokens")
    code, _ = await served.refused(served.stub.GetModelInfo(model_pb2.GetModelInfoRequest()))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    code, _ = await served.refused(served.stub.GetModelInfo(model_pb2.GetModelInfoRequest(model="x")))
    assert code is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("name", ["main", "MASTER", "HEAD", "latest", "dev", "", " ", "origin/main"])
def test_a_moving_schema_release_is_refused(name: str) -> None:
    """DISC-03, DISC-04."""
    with pytest.raises(ValueError, match="moving"):
        check_schema_release(name)


async def test_load_counts_running_requests_per_rank_and_in_total(served: Served) -> None:
    """LOAD-01, LOAD-02."""
    calls = [await served.accepted(served.request(f"r{i}")) for i in range(3)]
    load = await served.stub.GetLoad(observability_pb2.GetLoadRequest(include_per_rank=True))
    assert load.running_requests == 3 == load.ranks[0].running_requests
    assert not load.HasField("used_kv_blocks")
    assert not (await served.stub.GetLoad(observability_pb2.GetLoadRequest())).ranks
    for call in calls:
        call.cancel()


async def drained(served: Served, request: lifecycle_pb2.DrainRequest) -> list[lifecycle_pb2.DrainResponse]:
    async with asyncio.timeout(SOON_S):
        return [event async for event in served.stub.Drain(request)]


def states(events: list[lifecycle_pb2.DrainResponse]) -> list[int]:
    return [event.state for event in events]


async def test_a_drain_waits_with_true_counts_and_lets_nothing_new_in(served: Served) -> None:
    """DRAIN-01, DRAIN-02, GEN-05, HEALTH-04."""
    call = await served.accepted(served.request())
    drain = served.stub.Drain(Drain(stop_accepting_new_requests=True))
    started = await anext(aiter(drain))
    assert (started.state, started.in_flight_requests) == (lifecycle_pb2.DRAIN_STATE_STARTED, 1)
    code, _ = await served.refused(served.stub.Generate(served.request("late")))
    assert code is grpc.StatusCode.UNAVAILABLE
    assert (await served.stub.Health(Health())).state == lifecycle_pb2.HEALTH_STATE_DRAINING
    progress = await anext(aiter(drain))
    assert progress.state == lifecycle_pb2.DRAIN_STATE_IN_PROGRESS and progress.in_flight_requests == 1
    call.cancel()
    rest = [event async for event in drain]
    assert rest[-1].state == lifecycle_pb2.DRAIN_STATE_COMPLETE
    assert rest[-1].HasField("in_flight_requests") and rest[-1].in_flight_requests == 0
    assert rest[-1].HasField("open_kv_sessions")


async def test_a_drain_that_keeps_accepting_waits_for_what_was_there(served: Served) -> None:
    """DRAIN-02."""
    call = await served.accepted(served.request())
    drain = served.stub.Drain(Drain())
    await anext(aiter(drain))
    late = await served.accepted(served.request("late"))
    call.cancel()
    events = [event async for event in drain]
    assert events[-1].state == lifecycle_pb2.DRAIN_STATE_COMPLETE
    assert (await served.stub.Health(Health())).state == lifecycle_pb2.HEALTH_STATE_READY
    late.cancel()


@pytest.mark.parametrize("deadline_ms", [0, 300])
async def test_at_its_deadline_a_drain_fails_or_aborts(deadline_ms: int) -> None:
    """DRAIN-03: zero is immediate."""
    async with serve(FakeEngine()) as served:
        call = await served.accepted(served.request())
        events = await drained(served, Drain(deadline_ms=deadline_ms))
        assert events[-1].WhichOneof("event") == "error"
        assert len(served.servicer.requests) == 1
        events = await drained(served, Drain(deadline_ms=deadline_ms, abort_after_deadline=True))
        assert events[-1].state == lifecycle_pb2.DRAIN_STATE_COMPLETE
        assert len(served.servicer.requests) == 0
        call.cancel()


async def test_concurrent_drains_both_end_and_a_cancelled_one_keeps_draining(served: Served) -> None:
    """DRAIN-04."""
    call = await served.accepted(served.request())
    first, second, third = (served.stub.Drain(Drain(stop_accepting_new_requests=True)) for _ in range(3))
    for drain in (first, second, third):
        await anext(aiter(drain))
    third.cancel()
    call.cancel()
    for drain in (first, second):
        events = [event async for event in drain]
        assert events[-1].state == lifecycle_pb2.DRAIN_STATE_COMPLETE
    code, _ = await served.refused(served.stub.Generate(served.request("late")))
    assert code is grpc.StatusCode.UNAVAILABLE


async def test_a_drain_ends_with_the_engines_death() -> None:
    """ERR-04: what it waited for is lost, which COMPLETE would not say."""
    async with serve(FakeEngine(), Limits(period_s=0.02)) as served:
        call = await served.accepted(served.request())
        drain = served.stub.Drain(Drain(stop_accepting_new_requests=True))
        await anext(aiter(drain))
        served.engine.dead = True
        async with asyncio.timeout(SOON_S):
            last = [event async for event in drain][-1]
        assert (last.error.code, last.error.retryable) == (errors_pb2.ERROR_CODE_INTERNAL, True)
        assert await drain.code() is grpc.StatusCode.OK
        call.cancel()


async def test_a_drain_waits_for_sessions_and_says_so(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DRAIN-01: a session that nobody has fetched yet is work that remains; its engine's death ends the wait."""
    monkeypatch.setattr(served.servicer.drains, "_open_sessions", lambda: 1)
    drain = served.stub.Drain(Drain(stop_accepting_new_requests=True))
    events = aiter(drain)
    async with asyncio.timeout(SOON_S):
        assert (await anext(events)).state == lifecycle_pb2.DRAIN_STATE_STARTED
        waiting = await anext(events)
        assert waiting.state == lifecycle_pb2.DRAIN_STATE_IN_PROGRESS
        assert (waiting.in_flight_requests, waiting.open_kv_sessions) == (0, 1)
        served.engine.dead = True
        assert [event async for event in events][-1].HasField("error")
