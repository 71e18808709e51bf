"""Mutants of disaggregation: the prefill server, the decode server, or both are wrong."""

from __future__ import annotations

from typing import Any

import grpc

from openengine.v1 import discovery_pb2, errors_pb2, generate_pb2, kv_pb2
from openengine_adapters.engine import EngineDescription
from openengine_adapters.reference.engine import ReferenceEngine
from openengine_adapters.reference.generation import Generation
from openengine_adapters.reference.mutants.seams import (
    engine_of,
    replace,
    request_of,
    response_of,
    status_of,
    work_of,
)
from openengine_adapters.reference.sessions import BACKEND

_G = "Generate"
_PREFILL = {"role": discovery_pb2.ENGINE_ROLE_PREFILL}
_SLOW = {**_PREFILL, "latency": 0.3}
_DECODE = {"role": discovery_pb2.ENGINE_ROLE_DECODE}


def _session(response: Any) -> kv_pb2.KvSessionRef | None:
    """The session that a prefill ended with."""
    return response.prefill_ready.kv_session if response.HasField("prefill_ready") else None


@response_of(
    _G, "prefill_with_a_token", "ROLE-02", "A prefill engine sends a token as well.", settings=_PREFILL
)
def _(response: Any) -> Any:
    if _session(response) is None:
        return None
    token = generate_pb2.GenerateResponse(request_id=response.request_id)
    token.token.output_index = 0
    token.token.tokens.add(token_id=97, token="a")
    token.token.text = "a"
    return token, response


@status_of(
    _G, "sessionless_decode", "ROLE-03", "A decode without a session is UNIMPLEMENTED.", settings=_DECODE
)
def _(code: grpc.StatusCode) -> grpc.StatusCode:
    return grpc.StatusCode.UNIMPLEMENTED if code is grpc.StatusCode.FAILED_PRECONDITION else code


@response_of("GetKvConnectorInfo", "connector_unsaid", "KVC-01", "`enabled` is absent without a connector.")
def _(info: Any) -> None:
    info.ClearField("enabled")


@response_of(
    "GetKvConnectorInfo", "drain_unsaid", "KVC-02", "A prefill engine does not report supports_drain.",
    settings=_PREFILL,
)  # fmt: skip
def _(info: Any) -> None:
    info.ClearField("supports_drain")


@response_of(_G, "session_without_id", "PD-01", "A session has no id.", settings=_PREFILL)
def _(response: Any) -> None:
    if (session := _session(response)) is not None:
        session.session_id = ""


@response_of(_G, "session_at_a_wildcard", "PD-01", "A session's endpoint is a wildcard.", settings=_PREFILL)
def _(response: Any) -> None:
    if (session := _session(response)) is not None:
        session.endpoints[0].host = "0.0.0.0"


@response_of(_G, "session_of_no_backend", "PD-01", "A session names another backend.", settings=_PREFILL)
def _(response: Any) -> None:
    if (session := _session(response)) is not None:
        session.transfer_backend = "other"


@response_of(_G, "session_without_port", "PD-06", "A session's endpoint has the port 0.", settings=_PREFILL)
def _(response: Any) -> None:
    if (session := _session(response)) is not None:
        session.endpoints[0].port = 0


@work_of("decode_starts_over", "PD-02", "Decode does not use the state that it fetched.", settings=_PREFILL)
def _(work: Generation) -> None:
    attach = work.attach
    replace(work, "attach", lambda state: attach(bytes(len(state))))


@request_of(_G, "any_transfer_backend", "PD-03", "A session of another backend is taken.", settings=_PREFILL)
def _(request: Any) -> None:
    if request.kv.HasField("session"):
        request.kv.session.transfer_backend = BACKEND


@response_of(
    _G, "lost_session_is_internal", "PD-03", "A lost session is an INTERNAL error.", settings=_PREFILL
)
def _(response: Any) -> None:
    if response.error.code == errors_pb2.ERROR_CODE_KV_SESSION_NOT_FOUND:
        response.error.code = errors_pb2.ERROR_CODE_INTERNAL


@engine_of("session_kept", "PD-04", "A session stays open after it was fetched.", settings=_PREFILL)
def _(engine: ReferenceEngine) -> None:
    start = engine.start

    async def keeping() -> EngineDescription:
        description = await start()
        if (sessions := engine._sessions) is not None:
            end = sessions._end
            replace(sessions, "_end", lambda session_id, event: event == "fetched" or end(session_id, event))
        return description

    replace(engine, "start", keeping)


@engine_of("session_served_twice", "PD-03", "A session is handed out again and again.", settings=_PREFILL)
def _(engine: ReferenceEngine) -> None:
    start = engine.start
    told: dict[bytes, dict[str, str]] = {}

    async def remembering() -> EngineDescription:
        description = await start()
        if (sessions := engine._sessions) is not None:
            answer = sessions._answer
            replace(sessions, "_answer", lambda line: told.setdefault(line, answer(line)))
        return description

    replace(engine, "start", remembering)


@response_of(_G, "prefill_without_an_end", "PD-05", "A failing prefill just ends.", settings=_SLOW)
def _(response: Any) -> Any:
    return () if response.HasField("error") else None


@request_of(
    _G, "session_rank_ignored", "KVOPT-03", "A rank that is not the session's is taken.", settings=_PREFILL
)
def _(request: Any) -> None:
    if request.kv.HasField("session"):
        request.kv.ClearField("data_parallel_rank")


@status_of(_G, "garbage_is_internal", "PD-07", "Garbage in a session is INTERNAL.", settings=_PREFILL)
def _(code: grpc.StatusCode) -> grpc.StatusCode:
    return grpc.StatusCode.INTERNAL if code is grpc.StatusCode.INVALID_ARGUMENT else code
