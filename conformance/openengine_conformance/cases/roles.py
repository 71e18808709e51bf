# SPDX-License-Identifier: Apache-2.0
"""What each role accepts."""

from __future__ import annotations

from openengine.v1 import discovery_pb2, generate_pb2, kv_pb2
from openengine_conformance import needs
from openengine_conformance.case import case
from openengine_conformance.checks import Code, expect
from openengine_conformance.context import Context


@case(
    "roles.aggregated_generates",
    "An aggregated engine serves a request without a KV session and returns tokens.",
    "ROLE-01",
    needs=[needs.GENERATES],
)
async def aggregated_generates(ctx: Context) -> None:
    stream = await ctx.generate(ctx.request())
    expect(stream.first.ids, "no token came")


@case(
    "roles.session_is_mismatch",
    "A KV session sent to an engine that is not DECODE is refused FAILED_PRECONDITION.",
    "ROLE-01",
    "ROLE-04",
    needs=[needs.TAKES_PROMPTS],
)
async def session_is_mismatch(ctx: Context) -> None:
    endpoint = kv_pb2.KvEndpoint(host="127.0.0.1", port=5000, protocol="tcp")
    session = kv_pb2.KvSessionRef(session_id="elsewhere", transfer_backend="nixl", endpoints=[endpoint])
    request = ctx.request(kv=generate_pb2.KvOptions(session=session))
    await ctx.refused(ctx.rpc.Generate, request, Code.FAILED_PRECONDITION)


@case(
    "roles.prefill_only",
    "A prefill engine ends a request with PrefillReady and sends no token and no GenerationFinished.",
    "ROLE-02",
    needs=[needs.PREFILL],
)
async def prefill_only(ctx: Context) -> None:
    stream = await ctx.generate(ctx.request(max_tokens=1))
    expect(stream.session is not None, "no PrefillReady came")
    expect(not stream.outputs, "tokens or finishes came")


@case(
    "roles.decode_needs_session",
    "A decode engine refuses a request without a KV session FAILED_PRECONDITION.",
    "ROLE-03",
    "ROLE-04",
    needs=[needs.DECODE],
)
async def decode_needs_session(ctx: Context) -> None:
    await ctx.refused(ctx.rpc.Generate, ctx.request(), Code.FAILED_PRECONDITION)


@case(
    "roles.pooling_does_not_generate",
    "A model that serves only embedding, classification or scoring refuses Generate FAILED_PRECONDITION.",
    "ROLE-04",
    "ERR-05",
    needs=[needs.POOLING],
)
async def pooling_does_not_generate(ctx: Context) -> None:
    await ctx.refused(ctx.rpc.Generate, ctx.request(), Code.FAILED_PRECONDITION)
    await ctx.call(ctx.rpc.GetEngineInfo, discovery_pb2.GetEngineInfoRequest())
