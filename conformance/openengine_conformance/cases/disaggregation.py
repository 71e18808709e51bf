# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode: the session that is handed over. The target is the prefill server, `--peer` the decode one."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from google.protobuf import struct_pb2

from openengine.v1 import errors_pb2, generate_pb2, kv_pb2, lifecycle_pb2
from openengine_conformance import needs
from openengine_conformance.case import case
from openengine_conformance.cases.kv_sources import is_wildcard
from openengine_conformance.checks import Code, expect, expect_equal, expect_in, fail, skip
from openengine_conformance.connection import Connection
from openengine_conformance.context import Context
from openengine_conformance.offer import Offer
from openengine_conformance.stream import Stream

Session = kv_pb2.KvSessionRef
CANCELLED = errors_pb2.ERROR_CODE_CANCELLED
GONE = (errors_pb2.ERROR_CODE_KV_SESSION_NOT_FOUND, errors_pb2.ERROR_CODE_KV_TRANSFER_FAILED)
REFUSALS = (Code.INVALID_ARGUMENT, Code.NOT_FOUND, Code.FAILED_PRECONDITION)
EXACT_INTEGERS = 2**53
TOKENS = 16


async def _connector(ctx: Context) -> kv_pb2.KvConnectorInfo:
    return await ctx.call(ctx.rpc.GetKvConnectorInfo, kv_pb2.GetKvConnectorInfoRequest())


async def _prefill(ctx: Context, prompt: str | list[int]) -> kv_pb2.KvSessionRef:
    """Prefill a prompt and return its session."""
    session = (await ctx.generate(ctx.request(prompt, max_tokens=1))).session
    if session is None:
        fail("the prefill ended without PrefillReady", "ROLE-02")
    return session


@dataclass
class _Decoder:
    ctx: Context
    connection: Connection
    offer: Offer

    def open(self, prompt: str | list[int], session: kv_pb2.KvSessionRef, **kv: int) -> Stream:
        """Send a request with a session to the decode server."""
        options = generate_pb2.KvOptions(session=session, **kv)  # type: ignore[arg-type]  # the names are fields
        request = self.ctx.steady(prompt, max_tokens=TOKENS, kv=options)
        request.model = self.offer.model
        return self.ctx.open(request, via=self.connection, offer=self.offer)


@contextlib.asynccontextmanager
async def _decoder(ctx: Context) -> AsyncIterator[_Decoder]:
    async with ctx.connect(ctx.options.peer) as connection:
        offer = await connection.discover("")
        if offer.role_name != "DECODE":
            skip(f"the role of --peer {ctx.options.peer} is {offer.role_name}")
        yield _Decoder(ctx, connection, offer)


@case(
    "disaggregation.connector_answers",
    "GetKvConnectorInfo answers on every role, and says whether there is a connector.",
    "KVC-01",
)
async def connector_answers(ctx: Context) -> None:
    info = await _connector(ctx)
    expect(info.HasField("enabled"), "enabled is absent")
    if ctx.offer.role_name in ("PREFILL", "DECODE"):
        expect(info.enabled, f"a {ctx.offer.role_name} engine reports no connector")


@case(
    "disaggregation.connector_complete",
    "A PREFILL or DECODE engine reports backend, protocols, clean-up, drain and its direction.",
    "KVC-02",
    needs=[needs.DISAGGREGATED],
)
async def connector_complete(ctx: Context) -> None:
    info = await _connector(ctx)
    expect(info.transfer_backend, "transfer_backend is empty")
    expect(info.supported_protocols, "supported_protocols is empty")
    direction = "supports_remote_prefill" if ctx.offer.role_name == "PREFILL" else "supports_decode_pull"
    for name in ("supports_abort_cleanup", "supports_drain", direction):
        expect(info.HasField(name), f"{name} is absent")  # type: ignore[arg-type]  # the names are fields


@case(
    "disaggregation.session",
    "PrefillReady carries a session: an id, the connector's backend, the rank, and parameters of exact types.",
    "PD-01",
    "ROLE-02",
    needs=[needs.PREFILL],
)
async def session(ctx: Context) -> None:
    one, other = await _prefill(ctx, ctx.unique_prompt(40)), await _prefill(ctx, ctx.unique_prompt(40))
    info = await _connector(ctx)
    for ref in (one, other):
        expect(ref.session_id, "session_id is empty")
        expect_equal(ref.transfer_backend, info.transfer_backend, "transfer_backend")
        expect_in(ref.dp_rank, ctx.offer.ranks, "dp_rank")
        for number in _numbers(struct_pb2.Value(struct_value=ref.attributes_struct)):
            exact = abs(number) < EXACT_INTEGERS
            expect(exact, f"the number {number:.0f} in attributes_struct is above 2^53 and not exact")
    expect(one.session_id != other.session_id, f"two prefills have the session {one.session_id!r}")


def _numbers(value: struct_pb2.Value) -> list[float]:
    match value.WhichOneof("kind"):
        case "number_value":
            return [value.number_value]
        case "list_value":
            return [number for item in value.list_value.values for number in _numbers(item)]
        case "struct_value":
            return [number for item in value.struct_value.fields.values() for number in _numbers(item)]
    return []


@case(
    "disaggregation.endpoints",
    "A session's endpoints have a host, a valid port and a supported protocol.",
    "PD-06",
    "PD-01",
    needs=[needs.PREFILL],
)
async def endpoints(ctx: Context) -> None:
    info = await _connector(ctx)
    ref = await _prefill(ctx, ctx.unique_prompt(40))
    for endpoint in [*ref.endpoints, *info.local_endpoints]:
        expect(endpoint.host.strip() == endpoint.host and endpoint.host, f"the host is {endpoint.host!r}")
        expect(not is_wildcard(endpoint.host), f"the host {endpoint.host!r} is one to bind to", "PD-01")
        expect(1 <= endpoint.port <= 65535, f"the port is {endpoint.port}")
        expect_in(endpoint.protocol, list(info.supported_protocols), "the protocol")


@case(
    "disaggregation.usage",
    "A prefill's usage counts the prompt.",
    "STREAM-06",
    "STREAM-07",
    needs=[needs.PREFILL],
)
async def usage(ctx: Context) -> None:
    stream = await ctx.generate(ctx.request(ctx.unique_prompt(40), max_tokens=1))
    counted = stream.usage or generate_pb2.Usage()
    expect(counted.prompt_tokens > 0, "prompt_tokens is 0")


@case(
    "disaggregation.abort_session",
    "Aborting an open session is ABORTED, then ALREADY_FINISHED; an unknown one is NOT_FOUND.",
    "PD-04",
    "ABORT-01",
    needs=[needs.PREFILL],
    exclusive=True,
)
async def abort_session(ctx: Context) -> None:
    ref = await _prefill(ctx, ctx.unique_prompt(40))
    request = lifecycle_pb2.AbortRequest(kv_session=ref)
    finished = lifecycle_pb2.ABORT_STATUS_ALREADY_FINISHED
    for expected in (lifecycle_pb2.ABORT_STATUS_ABORTED, finished, finished):
        answer = await ctx.call(ctx.rpc.Abort, request)
        expect_equal(answer.status, expected, "the status of aborting a session")
    unknown = Session(session_id="no-such-session", transfer_backend=ref.transfer_backend)
    await ctx.refused(ctx.rpc.Abort, lifecycle_pb2.AbortRequest(kv_session=unknown), Code.NOT_FOUND)


@case(
    "disaggregation.sessions_are_counted",
    "active_kv_sessions counts open sessions, and returns when they are aborted.",
    "PD-04",
    "LOAD-01",
    needs=[needs.PREFILL],
    exclusive=True,
)
async def sessions_are_counted(ctx: Context) -> None:
    before = await ctx.load()
    if not before.HasField("active_kv_sessions"):
        skip("active_kv_sessions is not reported")
    refs = [await _prefill(ctx, ctx.unique_prompt(40)) for _ in range(2)]
    expect_equal((await ctx.load()).active_kv_sessions, before.active_kv_sessions + 2, "active_kv_sessions")
    for ref in refs:
        await ctx.call(ctx.rpc.Abort, lifecycle_pb2.AbortRequest(kv_session=ref))

    async def returned() -> bool:
        return (await ctx.load()).active_kv_sessions == before.active_kv_sessions

    await ctx.until(returned, "active_kv_sessions did not return to its value", within=3)


@case(
    "disaggregation.abort_prefill",
    "Aborting a running prefill ends its stream with EngineError CANCELLED and usage.",
    "ABORT-02",
    "PD-05",
    needs=[needs.PREFILL],
    exclusive=True,
)
async def abort_prefill(ctx: Context) -> None:
    longest = min(ctx.offer.info.max_context_length or 512, 4000)
    others = [ctx.open(ctx.request(ctx.unique_prompt(longest - 8), max_tokens=1)) for _ in range(3)]
    stream = ctx.open(ctx.request(ctx.unique_prompt(longest - 8), max_tokens=1))
    await stream.accepted()
    status = await ctx.abort(stream.id)
    await stream.drain()
    for other in others:
        await other.drain()  # to learn their sessions, which the clean-up ends
    if status != lifecycle_pb2.ABORT_STATUS_ABORTED or stream.session is not None:
        skip("the prefill was over before the abort")
    stream.check()
    if stream.error is None:
        fail("the aborted prefill has no EngineError")
    expect_equal(stream.error.code, CANCELLED, "the EngineError's code")
    expect(stream.usage is not None, "the EngineError carries no usage", "STREAM-06")


@case(
    "disaggregation.hand_over",
    "The session, sent unchanged to a decode engine, continues the request; each hand-over gives the same output.",
    "PD-02",
    needs=[needs.PREFILL, needs.PEER],
    exclusive=True,
)
async def hand_over(ctx: Context) -> None:
    prompt = ctx.unique_prompt(40)
    outputs = []
    async with _decoder(ctx) as decoder:
        for _ in range(2):
            stream = await decoder.open(prompt, await _prefill(ctx, prompt)).rest()
            expect_equal(len(stream.first.ids), TOKENS, "the number of tokens")
            outputs.append(stream.first.ids)
    expect_equal(outputs[1], outputs[0], "the output of the second hand-over")


@case(
    "disaggregation.equals_aggregated",
    "The decode output is an aggregated run's greedy output, token for token.",
    "PD-02",
    needs=[needs.PREFILL, needs.PEER, needs.AGGREGATED_PEER],
    exclusive=True,
)
async def equals_aggregated(ctx: Context) -> None:
    # One that starts over may write the same after one prompt by chance; after two it does not.
    async with _decoder(ctx) as decoder, ctx.connect(ctx.options.aggregated) as plain:
        offer = await plain.discover("")
        for prompt in (ctx.unique_prompt(40), ctx.unique_prompt(40)):
            request = ctx.steady(prompt, max_tokens=TOKENS)
            request.model = offer.model
            expected = await ctx.open(request, via=plain, offer=offer).rest()
            stream = await decoder.open(prompt, await _prefill(ctx, prompt)).rest()
            expect_equal(stream.first.ids, expected.first.ids, "the output of the decode engine")
            expect_equal(stream.first.text, expected.first.text, "the text of the decode engine")


@case(
    "disaggregation.hand_over_frees",
    "A session that was handed over ends by itself: active_kv_sessions returns to its value.",
    "PD-04",
    needs=[needs.PREFILL, needs.PEER],
    exclusive=True,
)
async def hand_over_frees(ctx: Context) -> None:
    before = await ctx.load()
    if not before.HasField("active_kv_sessions"):
        skip("active_kv_sessions is not reported")
    prompt = ctx.unique_prompt(40)
    async with _decoder(ctx) as decoder:
        await decoder.open(prompt, await _prefill(ctx, prompt)).rest()

    async def returned() -> bool:
        return (await ctx.load()).active_kv_sessions <= before.active_kv_sessions

    await ctx.until(returned, "active_kv_sessions did not return to its value", within=10)


@case(
    "disaggregation.session_is_gone",
    "A session that the prefill side no longer holds fails with KV_SESSION_NOT_FOUND, and the decoder serves on.",
    "PD-03",
    "PD-04",
    needs=[needs.PREFILL, needs.PEER],
    exclusive=True,
)
async def session_is_gone(ctx: Context) -> None:
    prompt = ctx.unique_prompt(40)
    ref = await _prefill(ctx, prompt)
    await ctx.call(ctx.rpc.Abort, lifecycle_pb2.AbortRequest(kv_session=ref))
    async with _decoder(ctx) as decoder:
        await _expect_gone(decoder.open(prompt, ref), "a session that was aborted")
        await decoder.open(prompt, await _prefill(ctx, prompt)).rest()


@case(
    "disaggregation.session_serves_once",
    "A session that was handed over is not held any more: a second request with it fails, and the decoder serves on.",
    "PD-03",
    "PD-04",
    needs=[needs.PREFILL, needs.PEER],
    exclusive=True,
)
async def session_serves_once(ctx: Context) -> None:
    prompt = ctx.unique_prompt(40)
    ref = await _prefill(ctx, prompt)
    async with _decoder(ctx) as decoder:
        await decoder.open(prompt, ref).rest()
        await _expect_gone(decoder.open(prompt, ref), "a session that had been handed over")
        await decoder.open(prompt, await _prefill(ctx, prompt)).rest()


async def _expect_gone(stream: Stream, what: str) -> None:
    """The request is refused NOT_FOUND, or accepted and ended with an EngineError that says why."""
    code = await stream.outcome()
    expect_in(code, (Code.OK, Code.NOT_FOUND), f"the status ({stream.details})")
    if code is Code.OK:
        if stream.error is None:
            fail(f"{what} was served")
        expect_in(stream.error.code, GONE, "the EngineError's code")


@case(
    "disaggregation.malformed_session",
    "A decode engine rejects an unknown backend or a malformed session before acceptance.",
    "PD-03",
    needs=[needs.PREFILL, needs.PEER],
    exclusive=True,
)
async def malformed_session(ctx: Context) -> None:
    prompt = ctx.unique_prompt(40)
    ref = await _prefill(ctx, prompt)
    async with _decoder(ctx) as decoder:
        for change in ("session_id", "transfer_backend", "unknown backend"):
            bad = Session()
            bad.CopyFrom(ref)
            if change == "unknown backend":
                bad.transfer_backend = "no-such-backend"
            else:
                bad.ClearField(change)  # type: ignore[arg-type]  # the names are fields
            stream = decoder.open(prompt, bad)
            code = await stream.outcome()
            expect_in(code, REFUSALS, f"the status for a session with {change} changed ({stream.details})")
        await decoder.open(prompt, ref).rest()


@case(
    "disaggregation.malformed_parameters",
    "Garbage in the hand-off parameters neither kills nor hangs the decode engine.",
    "PD-07",
    "GEN-10",
    needs=[needs.PREFILL, needs.PEER],
    exclusive=True,
    timeout=120,
)
async def malformed_parameters(ctx: Context) -> None:
    """Every parameter in turn is left out, emptied and given another type; then a sound session is served."""
    prompt = ctx.unique_prompt(40)
    ref = await _prefill(ctx, prompt)
    async with _decoder(ctx) as decoder:
        for bad in _garbled(ref):
            stream = decoder.open(prompt, bad)
            code = await stream.outcome()
            expect_in(code, (Code.OK, *REFUSALS), f"the status ({stream.details})")
        await decoder.open(prompt, await _prefill(ctx, prompt)).rest()


def _garbled(ref: kv_pb2.KvSessionRef) -> list[kv_pb2.KvSessionRef]:
    def changed() -> kv_pb2.KvSessionRef:
        twin = Session()
        twin.CopyFrom(ref)
        found.append(twin)
        return twin

    found: list[kv_pb2.KvSessionRef] = []
    changed().ClearField("attributes_struct")
    changed().ClearField("endpoints")
    changed().attributes_struct.update({"surprise": [1, {"a": None}]})
    if ref.endpoints:
        changed().endpoints[0].port = 0
        changed().endpoints[0].host = ""
    for name in ref.attributes_struct.fields:
        del changed().attributes_struct.fields[name]
        values: list[Any] = [None, "x", -1, True, [], [[]], [1], {}]
        for value in values:
            changed().attributes_struct.update({name: value})
    return found


@case(
    "disaggregation.rank_disagrees",
    "A data_parallel_rank that disagrees with the session's dp_rank is INVALID_ARGUMENT.",
    "KVOPT-03",
    needs=[needs.PREFILL, needs.PEER],
    exclusive=True,
)
async def rank_disagrees(ctx: Context) -> None:
    prompt = ctx.unique_prompt(40)
    ref = await _prefill(ctx, prompt)
    async with _decoder(ctx) as decoder:
        rank = ref.dp_rank
        ref.dp_rank += 1
        stream = decoder.open(prompt, ref, data_parallel_rank=rank)
        expect_equal(await stream.outcome(), Code.INVALID_ARGUMENT, f"the status ({stream.details})")


@case(
    "disaggregation.decoder_needs_session",
    "The decode engine refuses a request without a session FAILED_PRECONDITION.",
    "ROLE-03",
    "ROLE-04",
    needs=[needs.PREFILL, needs.PEER],
)
async def decoder_needs_session(ctx: Context) -> None:
    async with _decoder(ctx) as decoder:
        request = ctx.request()
        request.model = decoder.offer.model
        stream = ctx.open(request, via=decoder.connection, offer=decoder.offer)
        expect_equal(await stream.outcome(), Code.FAILED_PRECONDITION, f"the status ({stream.details})")
