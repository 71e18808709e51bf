# SPDX-License-Identifier: Apache-2.0
"""GetEngineInfo: who the server says it is."""

from __future__ import annotations

import re

from openengine.v1 import discovery_pb2, kv_pb2, lifecycle_pb2, model_pb2
from openengine_conformance.case import case
from openengine_conformance.checks import expect, expect_equal, expect_in
from openengine_conformance.context import Context

MOVING_NAMES = {"main", "master", "head", "latest", "dev", "develop", "trunk", "nightly", "edge", "stable"}
UNKNOWN_ENUM_VALUE = 99


async def _engine_info(ctx: Context) -> discovery_pb2.EngineInfo:
    return await ctx.call(ctx.rpc.GetEngineInfo, discovery_pb2.GetEngineInfoRequest())


@case("discovery.engine", "The engine names itself and its version.", "DISC-01")
async def engine(ctx: Context) -> None:
    info = await _engine_info(ctx)
    expect(info.engine_name.strip(), "engine_name is empty")
    expect(info.engine_version.strip(), "engine_version is empty")


@case("discovery.revision", "The schema revision and the oldest client revision are both 1.", "DISC-02")
async def revision(ctx: Context) -> None:
    info = await _engine_info(ctx)
    expect_equal(info.schema_revision, 1, "schema_revision")
    expect_equal(info.minimum_client_revision, 1, "minimum_client_revision")


@case("discovery.release", "schema_release names a release, tag or commit, never a moving name.", "DISC-03")
async def release(ctx: Context) -> None:
    name = (await _engine_info(ctx)).schema_release
    expect(name.strip(), "schema_release is empty")
    last = re.split(r"[/:@]", name.strip().lower())[-1]
    expect(last not in MOVING_NAMES, f"schema_release {name!r} is a name that moves")


@case("discovery.role", "The role is set, and is the same at every asking.", "DISC-05")
async def role(ctx: Context) -> None:
    known = [value for value in discovery_pb2.EngineRole.values() if value]
    info = await _engine_info(ctx)
    expect_in(info.role, known, "role")
    expect_equal(info.role, ctx.offer.role, "role at a later asking")


@case("discovery.models", "There is a supported model, and GetModelInfo knows every one.", "DISC-06")
async def models(ctx: Context) -> None:
    info = await _engine_info(ctx)
    expect(info.supported_models, "supported_models is empty")
    for name in info.supported_models:
        await ctx.call(ctx.rpc.GetModelInfo, model_pb2.GetModelInfoRequest(model=name))


@case("discovery.one_model", "There is one supported model, and it is its own model_id.", "DISC-07")
async def one_model(ctx: Context) -> None:
    names = list((await _engine_info(ctx)).supported_models)
    if not ctx.options.model:
        expect_equal(len(names), 1, f"the number of supported models {names}")
    for name in names:
        info = await ctx.call(ctx.rpc.GetModelInfo, model_pb2.GetModelInfoRequest(model=name))
        expect_equal(info.model_id, name, f"model_id of the supported model {name!r}")


@case("discovery.instance", "instance_id is set, stays the same, and GetLoad repeats it.", "DISC-08")
async def instance(ctx: Context) -> None:
    info = await _engine_info(ctx)
    expect(info.instance_id, "instance_id is empty")
    expect_equal(info.instance_id, ctx.offer.engine.instance_id, "instance_id at a later asking")
    expect_equal((await ctx.load()).instance_id, info.instance_id, "LoadInfo.instance_id")


@case("discovery.parallelism", "Reported sizes are at least 1, and a rank lies within its size.", "DISC-09")
async def parallelism(ctx: Context) -> None:
    sizes = (await _engine_info(ctx)).parallelism
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
        if sizes.HasField(name):
            expect(getattr(sizes, name) >= 1, f"{name} is reported as {getattr(sizes, name)}")
    if sizes.HasField("data_parallel_rank") and sizes.HasField("data_parallel_size"):
        rank, size = sizes.data_parallel_rank, sizes.data_parallel_size
        expect(rank < size, f"data_parallel_rank {rank} is not below data_parallel_size {size}")


@case("discovery.connector", "EngineInfo.kv_connector is what GetKvConnectorInfo answers.", "DISC-10")
async def connector(ctx: Context) -> None:
    answer = await ctx.call(ctx.rpc.GetKvConnectorInfo, kv_pb2.GetKvConnectorInfoRequest())
    expect_equal((await _engine_info(ctx)).kv_connector, answer, "EngineInfo.kv_connector")


@case(
    "discovery.unknown_enum", "An enum value that the server doesn't know counts as UNSPECIFIED.", "DISC-12"
)
async def unknown_enum(ctx: Context) -> None:
    unknown = lifecycle_pb2.HealthRequest(role=UNKNOWN_ENUM_VALUE)  # type: ignore[arg-type]  # on purpose
    usual = await ctx.call(ctx.rpc.Health, lifecycle_pb2.HealthRequest())
    answer = await ctx.call(ctx.rpc.Health, unknown)
    expect_equal(answer.state, usual.state, f"the state of a Health call for role {UNKNOWN_ENUM_VALUE}")
    not_ready = [c.name for c in answer.checks if c.state == lifecycle_pb2.HEALTH_STATE_NOT_READY]
    expect("role" not in not_ready, f"role {UNKNOWN_ENUM_VALUE} was taken as another engine's role")
