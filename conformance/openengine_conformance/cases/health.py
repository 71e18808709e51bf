# SPDX-License-Identifier: Apache-2.0
"""Health in the contract's form and in gRPC's own, and server reflection."""

from __future__ import annotations

import asyncio
import time

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from openengine.v1 import discovery_pb2, lifecycle_pb2
from openengine_conformance import needs
from openengine_conformance.case import case
from openengine_conformance.checks import Code, expect, expect_equal, expect_unique
from openengine_conformance.context import Context

Request = lifecycle_pb2.HealthRequest
READY, NOT_READY = lifecycle_pb2.HEALTH_STATE_READY, lifecycle_pb2.HEALTH_STATE_NOT_READY
SERVICE = "openengine.v1.OpenEngine"
AT_ONCE = 1.0
PROBE_BOUND = 20.0


async def _health(ctx: Context, **fields: object) -> lifecycle_pb2.HealthResponse:
    return await ctx.call(ctx.rpc.Health, Request(**fields))  # type: ignore[arg-type]  # the names are fields


def _check(answer: lifecycle_pb2.HealthResponse, name: str) -> lifecycle_pb2.HealthCheck | None:
    return next((check for check in answer.checks if check.name == name), None)


@case(
    "health.ready",
    "The light check of a serving engine is READY and names its checks.",
    "HEALTH-01",
    "HEALTH-04",
)
async def ready(ctx: Context) -> None:
    answer = await _health(ctx)
    expect_equal(answer.state, READY, "state")
    expect(answer.checks, "no check is listed")
    expect_unique([check.name for check in answer.checks], "the check")
    for check in answer.checks:
        expect(check.name, "a check has no name")
        expect(check.state, f"the state of the check {check.name} is UNSPECIFIED")
    expect(_check(answer, "inference_probe") is None, "a probe was reported that was not asked for")


@case(
    "health.light_under_load",
    "The light check answers at once while requests run.",
    "HEALTH-01",
    needs=[needs.GENERATES],
    exclusive=True,
)
async def light_under_load(ctx: Context) -> None:
    await asyncio.gather(*(ctx.started(ctx.endless()) for _ in range(4)))
    times = []
    for _ in range(5):
        start = time.monotonic()
        answer = await _health(ctx)
        times.append(time.monotonic() - start)
        expect_equal(answer.state, READY, "state under load")
    expect(
        sorted(times)[2] < AT_ONCE, f"the light check took {sorted(times)[2]:.2f} s, or more every other time"
    )


@case(
    "health.probe", "The probe runs an inference within bounds and is listed as inference_probe.", "HEALTH-02"
)
async def probe(ctx: Context) -> None:
    start = time.monotonic()
    answer = await _health(ctx, include_inference_probe=True)
    seconds = time.monotonic() - start
    expect(seconds < PROBE_BOUND, f"the probe took {seconds:.1f} s")
    check = _check(answer, "inference_probe")
    if check is None:
        expect(False, f"no check is called inference_probe: {[c.name for c in answer.checks]}")
    else:
        expect_equal(check.state, READY, f"the probe's state ({check.message})")
    expect_equal(answer.state, READY, "state")


@case(
    "health.probe_for_model",
    "The probe takes every name of the model, and this engine's role.",
    "HEALTH-02",
    "MODEL-02",
)
async def probe_for_model(ctx: Context) -> None:
    for name in ctx.offer.names:
        answer = await _health(ctx, include_inference_probe=True, model=name, role=ctx.offer.role)
        expect_equal(answer.state, READY, f"state for the model {name!r}")


@case("health.probes_at_once", "Many probes at the same time all get an answer.", "HEALTH-02")
async def probes_at_once(ctx: Context) -> None:
    answers = await asyncio.gather(*(_health(ctx, include_inference_probe=True) for _ in range(8)))
    for answer in answers:
        expect_equal(answer.state, READY, "state")
        expect(_check(answer, "inference_probe"), "no check is called inference_probe")


@case(
    "health.probe_leaves_nothing",
    "A probe leaves neither a request nor a KV session behind.",
    "HEALTH-02",
    "PD-04",
    exclusive=True,
)
async def probe_leaves_nothing(ctx: Context) -> None:
    before = (await ctx.load()).active_kv_sessions
    await _health(ctx, include_inference_probe=True)
    await ctx.until(ctx.idle, "a request still runs after the probe", within=2)
    expect_equal((await ctx.load()).active_kv_sessions, before, "active_kv_sessions after the probe", "PD-04")


@case("health.unknown_model", "Health for an unknown model is NOT_FOUND.", "HEALTH-03")
async def unknown_model(ctx: Context) -> None:
    for with_probe in (True, False):
        request = Request(include_inference_probe=with_probe, model="no-such-model")
        await ctx.refused(ctx.rpc.Health, request, Code.NOT_FOUND)


@case(
    "health.other_role",
    "Health for a role that is not the engine's has a role check that is NOT_READY.",
    "HEALTH-03",
)
async def other_role(ctx: Context) -> None:
    for role in discovery_pb2.EngineRole.values():
        answer = await _health(ctx, role=role)
        check = _check(answer, "role")
        if role in (discovery_pb2.ENGINE_ROLE_UNSPECIFIED, ctx.offer.role):
            expect(check is None or check.state == READY, f"the role check for role {role} is not READY")
        elif check is None:
            expect(False, f"there is no role check for role {role}")
        else:
            expect_equal(check.state, NOT_READY, f"the role check for role {role}")


@case("health.grpc_check", "grpc.health.v1 says SERVING for the server and for the service.", "HEALTH-05")
async def grpc_check(ctx: Context) -> None:
    stub = health_pb2_grpc.HealthStub(ctx.connection.channel)
    for service in ("", SERVICE):
        answer = await ctx.call(stub.Check, health_pb2.HealthCheckRequest(service=service))
        expect_equal(answer.status, health_pb2.HealthCheckResponse.SERVING, f"the status of {service!r}")


@case("health.grpc_unknown_service", "grpc.health.v1 does not know a service that is not there.", "HEALTH-05")
async def grpc_unknown_service(ctx: Context) -> None:
    stub = health_pb2_grpc.HealthStub(ctx.connection.channel)
    await ctx.refused(stub.Check, health_pb2.HealthCheckRequest(service="no.such.Service"), Code.NOT_FOUND)


@case("health.grpc_watch", "grpc.health.v1 Watch says SERVING at once, and stays open.", "HEALTH-05")
async def grpc_watch(ctx: Context) -> None:
    stub = health_pb2_grpc.HealthStub(ctx.connection.channel)
    for service in ("", SERVICE):
        watch = stub.Watch(
            health_pb2.HealthCheckRequest(service=service), timeout=30, metadata=ctx.connection.metadata
        )
        async with asyncio.timeout(5):
            first = await watch.read()
        watch.cancel()
        expect(first is not grpc.aio.EOF, f"Watch of {service!r} ended without a status")
        expect_equal(first.status, health_pb2.HealthCheckResponse.SERVING, f"the first status of {service!r}")


@case("health.reflection", "Server reflection lists the service and describes it.", "HEALTH-05")
async def reflection(ctx: Context) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(ctx.connection.channel)
    request = reflection_pb2.ServerReflectionRequest
    questions = [request(list_services=""), request(file_containing_symbol=SERVICE)]
    call = stub.ServerReflectionInfo(iter(questions), timeout=10, metadata=ctx.connection.metadata)
    answers = [answer async for answer in call]
    services = [service.name for service in answers[0].list_services_response.service]
    expect(SERVICE in services, f"reflection lists {services}")
    expect(
        answers[1].file_descriptor_response.file_descriptor_proto, "reflection does not describe the service"
    )
