"""Prefill on one engine, decode on another: the state really crosses, once, and nothing stays held."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from openengine.v1 import discovery_pb2, errors_pb2, kv_pb2, observability_pb2
from openengine_adapters.core.errors import EngineFailure, Rejected
from openengine_adapters.engine import FinishKind, RuntimeEvent
from openengine_adapters.reference.engine import ReferenceEngine
from openengine_adapters.reference.sessions import ATTRIBUTES
from tests.reference.harness import Answer, ask, call, read, running, until

PROMPT = "The old house by the river was small, and every morning"


@asynccontextmanager
async def _pair(**settings: Any) -> AsyncIterator[tuple[ReferenceEngine, ReferenceEngine]]:
    async with (
        running(role=discovery_pb2.ENGINE_ROLE_PREFILL, **settings) as prefill,
        running(role=discovery_pb2.ENGINE_ROLE_DECODE) as decode,
    ):
        yield prefill, decode


async def _prefill(engine: ReferenceEngine, **fields: Any) -> kv_pb2.KvSessionRef:
    answer = await ask(engine, PROMPT, max_tokens=1, **fields)
    assert not answer.outputs
    session: kv_pb2.KvSessionRef = answer.session
    return session


async def _used(engine: ReferenceEngine) -> int | None:
    return (await engine.load()).ranks[0].used_kv_blocks


async def test_decode_continues_what_prefill_began_as_one_engine_would() -> None:
    async with running() as whole:
        expected = await ask(whole, PROMPT, max_tokens=30)
    async with _pair() as (prefill, decode):
        session = await _prefill(prefill)
        answer = await ask(decode, PROMPT, max_tokens=30, kv={"session": session})
    assert answer.one.ids == expected.one.ids
    assert answer.one.text == expected.one.text


async def test_a_seed_and_several_sequences_survive_the_hand_off() -> None:
    sampling = {"seed": 3, "num_sequences": 3, "temperature": 1.0}
    async with running() as whole:
        expected = await ask(whole, PROMPT, sampling=sampling)
    async with _pair() as (prefill, decode):
        session = await _prefill(prefill)
        answer = await ask(decode, PROMPT, sampling=sampling, kv={"session": session})
    assert [o.ids for _, o in sorted(answer.outputs.items())] == [
        o.ids for _, o in sorted(expected.outputs.items())
    ]


async def test_the_session_names_its_backend_endpoint_and_rank_and_keeps_types() -> None:
    async with _pair(data_parallel_size=2) as (prefill, _):
        description = prefill._description
        assert description is not None
        session = await _prefill(prefill, kv={"data_parallel_rank": 1})
    connector = description.kv_connector
    assert connector.enabled
    assert session.transfer_backend == connector.transfer_backend
    ((host, port, protocol),) = connector.local_endpoints
    assert [(e.host, e.port, e.protocol) for e in session.endpoints] == [(host, port, protocol)]
    assert session.dp_rank == 1
    values = session.attributes_struct.fields[ATTRIBUTES].struct_value.fields
    assert values["ticket"].WhichOneof("kind") == "string_value"  # above 2^53
    assert values["final"].bool_value is True


async def test_blocks_are_held_until_decode_fetches_them() -> None:
    async with _pair() as (prefill, decode):
        session = await _prefill(prefill)
        assert prefill.open_sessions() == 1
        assert await _used(prefill)
        await ask(decode, PROMPT, kv={"session": session})
        assert (prefill.open_sessions(), await _used(prefill)) == (0, 0)
        assert await prefill.release_session(session.session_id) is False


async def test_a_session_ends_by_itself_after_its_time() -> None:
    async with _pair(session_ttl=0.05) as (prefill, decode):
        session = await _prefill(prefill)
        await until(lambda: prefill.open_sessions() == 0)
        assert await _used(prefill) == 0
        await _expect(decode, session, errors_pb2.ERROR_CODE_KV_SESSION_NOT_FOUND)


async def test_a_released_session_is_gone() -> None:
    async with _pair() as (prefill, decode):
        session = await _prefill(prefill)
        assert await prefill.release_session(session.session_id) is True
        assert await prefill.release_session(session.session_id) is False
        assert await prefill.release_session("never heard of") is None
        assert await _used(prefill) == 0
        await _expect(decode, session, errors_pb2.ERROR_CODE_KV_SESSION_NOT_FOUND)


async def test_a_session_is_fetched_once() -> None:
    async with _pair() as (prefill, decode):
        session = await _prefill(prefill)
        await ask(decode, PROMPT, kv={"session": session})
        await _expect(decode, session, errors_pb2.ERROR_CODE_KV_SESSION_NOT_FOUND)


async def test_a_prefill_server_that_is_gone_is_a_failed_transfer() -> None:
    async with _pair() as (prefill, decode):
        session = await _prefill(prefill)
        await prefill.stop()
        failure = await _expect(decode, session, errors_pb2.ERROR_CODE_KV_TRANSFER_FAILED)
        assert failure.retryable
        assert decode.unfinished() == 0


async def _expect(
    decode: ReferenceEngine, session: kv_pb2.KvSessionRef, code: errors_pb2.ErrorCode.ValueType
) -> EngineFailure:
    """Decode admits the session and then fails with `code`."""
    with pytest.raises(EngineFailure) as failure:
        await ask(decode, PROMPT, kv={"session": session})
    assert failure.value.code == code
    return failure.value


async def test_a_session_of_another_prompt_is_refused_and_stays_open() -> None:
    async with _pair() as (prefill, decode):
        session = await _prefill(prefill)
        with pytest.raises(Rejected) as refused:
            await ask(decode, "Another prompt", kv={"session": session})
        assert refused.value.field == "kv.session"
        assert prefill.open_sessions() == 1


def _spoilt(session: kv_pb2.KvSessionRef, how: str) -> kv_pb2.KvSessionRef:
    spoilt = kv_pb2.KvSessionRef()
    spoilt.CopyFrom(session)
    values = spoilt.attributes_struct.fields[ATTRIBUTES].struct_value.fields
    match how:
        case "backend":
            spoilt.transfer_backend = "nixl"
        case "id":
            spoilt.session_id = ""
        case "no endpoint":
            del spoilt.endpoints[:]
        case "port":
            spoilt.endpoints[0].port = 0
        case "protocol":
            spoilt.endpoints[0].protocol = "udp"
        case "no attributes":
            spoilt.ClearField("attributes_struct")
        case "renamed":
            spoilt.attributes_struct.fields["other"].string_value = "x"
        case "missing":
            del values["ticket"]
        case "retyped":
            values["final"].string_value = "true"
        case "number":
            values["ticket"].string_value = "12x"
    return spoilt


@pytest.mark.parametrize(
    "how",
    [
        "backend",
        "id",
        "no endpoint",
        "port",
        "protocol",
        "no attributes",
        "renamed",
        "missing",
        "retyped",
        "number",
    ],
)
async def test_a_malformed_session_is_refused_before_admission(how: str) -> None:
    async with _pair() as (prefill, decode):
        session = _spoilt(await _prefill(prefill), how)
        with pytest.raises(Rejected):
            decode.check_session(session)
        with pytest.raises(Rejected):
            await ask(decode, PROMPT, kv={"session": session})
        assert decode.unfinished() == 0


async def test_a_forged_ticket_fetches_nothing() -> None:
    async with _pair() as (prefill, decode):
        session = await _prefill(prefill)
        values = session.attributes_struct.fields[ATTRIBUTES].struct_value.fields
        values["ticket"].string_value = "1"
        await _expect(decode, session, errors_pb2.ERROR_CODE_KV_SESSION_NOT_FOUND)
        assert prefill.open_sessions() == 1


async def test_an_aborted_prefill_fails_as_cancelled_and_holds_nothing() -> None:
    async with running(role=discovery_pb2.ENGINE_ROLE_PREFILL, latency=5.0) as prefill:
        made = call(PROMPT)
        stream = await prefill.generate(made)
        await prefill.abort(made.id)
        with pytest.raises(EngineFailure) as failure:
            await anext(stream)
        assert failure.value.code == errors_pb2.ERROR_CODE_CANCELLED
        assert (prefill.open_sessions(), await _used(prefill)) == (0, 0)


async def test_a_decode_can_be_aborted_while_it_waits_for_the_transfer() -> None:
    silent = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    async with _pair() as (prefill, decode):
        session = await _prefill(prefill)
        session.endpoints[0].port = silent.sockets[0].getsockname()[1]
        made = call(PROMPT, kv={"session": session})
        stream = await decode.generate(made)
        await asyncio.sleep(0.02)
        await decode.abort(made.id)
        answer = Answer()
        async for step in stream:
            answer.add(step)
        assert answer.one.kind is FinishKind.CANCELLED
        assert decode.unfinished() == 0
    silent.close()


async def test_transfers_are_told_on_both_sides() -> None:
    events: dict[str, list[RuntimeEvent]] = {"prefill": [], "decode": []}
    async with _pair() as (prefill, decode):
        prefill.observe(events["prefill"].append)
        decode.observe(events["decode"].append)
        await read(decode, call(PROMPT, kv={"session": await _prefill(prefill)}))
    told = {
        side: [e.attributes["event"] for e in seen if e.type == observability_pb2.RUNTIME_EVENT_TYPE_TRANSFER]
        for side, seen in events.items()
    }
    assert told == {"prefill": ["opened", "fetched"], "decode": ["transferred"]}
