"""Connecting: DISC-11, and telling apart why there is no connection."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from openengine.v1 import discovery_pb2, generate_pb2, inputs_pb2, observability_pb2, service_pb2_grpc
from openengine_adapters.client import (
    ClientError,
    ConnectionLost,
    ContractViolation,
    Incompatible,
    OpenEngineClient,
    RpcRejected,
    TimedOut,
    Tls,
    Unreachable,
)
from openengine_adapters.client.errors import from_status
from tests.client.fake import HANG, MODEL, RELEASE, FakeServer, Status, engine_info
from tests.client.responses import finished, tokens


async def test_a_compatible_server_is_accepted_and_remembered(fake: FakeServer) -> None:
    async with await OpenEngineClient.connect(fake.target) as client:
        assert client.engine.engine_name == "fake"
        assert client.default_model() == MODEL


@pytest.mark.parametrize(
    ("changes", "theirs", "ours"),
    [
        ({"minimum_client_revision": 2}, "needs a client of revision 2 or newer", "has revision 1"),
        ({"schema_revision": 0}, "has schema revision 0", "works with revisions 1 to 1"),
        ({"schema_revision": 9}, "has schema revision 9", "works with revisions 1 to 1"),
        ({"schema_release": ""}, "names no schema release", "needs the name of an immutable one"),
    ],
)
async def test_DISC_11_an_incompatible_server_is_refused_with_both_sides_values(
    fake: FakeServer, changes: dict[str, Any], theirs: str, ours: str
) -> None:
    fake.answers["GetEngineInfo"] = engine_info(**changes)
    with pytest.raises(Incompatible) as failure:
        await OpenEngineClient.connect(fake.target)
    assert (failure.value.theirs, failure.value.ours) == (theirs, ours)
    assert theirs in str(failure.value)
    assert ours in str(failure.value)


async def test_a_pinned_release_refuses_every_other(fake: FakeServer) -> None:
    async with await OpenEngineClient.connect(fake.target, releases={RELEASE}):
        pass
    with pytest.raises(Incompatible, match="accepts v9"):
        await OpenEngineClient.connect(fake.target, releases={"v9"})


async def test_a_grpc_server_without_the_service_is_incompatible() -> None:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        with pytest.raises(Incompatible, match=r"does not serve openengine\.v1"):
            await OpenEngineClient.connect(f"127.0.0.1:{port}")
    finally:
        await server.stop(None)


async def test_a_server_that_is_starting_is_not_unreachable(fake: FakeServer) -> None:
    fake.answers["GetEngineInfo"] = Status(grpc.StatusCode.UNAVAILABLE, "the model is loading")
    with pytest.raises(RpcRejected, match="the model is loading") as failure:
        await OpenEngineClient.connect(fake.target)
    assert failure.value.code is grpc.StatusCode.UNAVAILABLE


async def test_nobody_listens() -> None:
    with socket.socket() as placeholder:
        placeholder.bind(("127.0.0.1", 0))
        target = f"127.0.0.1:{placeholder.getsockname()[1]}"
        with pytest.raises(Unreachable, match="refused"):
            await OpenEngineClient.connect(target)


@contextlib.asynccontextmanager
async def _listener(greeting: bytes) -> AsyncIterator[str]:
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            if greeting:
                await reader.read(16)
                writer.write(greeting)
            await reader.read()
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def test_something_else_answers_there() -> None:
    async with _listener(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n") as target:
        with pytest.raises(Unreachable, match="http1"):
            await OpenEngineClient.connect(target)


@pytest.mark.parametrize(
    ("details", "meaning"),
    [
        pytest.param(
            "failed to connect to all addresses; last error: UNKNOWN: refused", Unreachable, id="up again"
        ),
        pytest.param("Stream removed (Transport closed (Socket closed))", ConnectionLost, id="not yet down"),
        pytest.param("the server is draining", RpcRejected, id="the server's word"),
    ],
)
async def test_a_status_says_more_than_a_channel_that_is_connected(
    details: str, meaning: type[ClientError], fake: FakeServer
) -> None:
    """The channel's state is younger than the status, or older."""
    nothing = grpc.aio.Metadata()
    error = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, details)
    async with await OpenEngineClient.connect(fake.target) as client:
        channel = client._channel
        assert channel.get_state() is grpc.ChannelConnectivity.READY
        failure = from_status(error, False, channel=channel, target="t", rpc="Health", timeout=1)
    assert isinstance(failure, meaning)


async def test_a_silent_peer_is_given_up_after_the_connect_timeout() -> None:
    async with _listener(b"") as target:
        with pytest.raises(Unreachable, match=r"no connection within 0\.2 s"):
            await OpenEngineClient.connect(target, connect_timeout=0.2)


async def test_a_server_that_does_not_answer_is_a_timeout(fake: FakeServer) -> None:
    fake.answers["GetEngineInfo"] = HANG
    with pytest.raises(TimedOut, match=r"GetEngineInfo did not end within 0\.2 s"):
        await OpenEngineClient.connect(fake.target, connect_timeout=0.2)


async def test_a_unary_deadline_stops_the_server_too(fake: FakeServer) -> None:
    fake.answers["GetLoad"] = HANG
    async with await OpenEngineClient.connect(fake.target, timeout=0.2) as client:
        with pytest.raises(TimedOut):
            await client.load()
        await asyncio.wait_for(fake.cancelled.wait(), 2)


async def test_cancelling_a_unary_call_cancels_it_on_the_server(fake: FakeServer) -> None:
    fake.answers["GetLoad"] = HANG
    async with await OpenEngineClient.connect(fake.target) as client:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.load(), 0.2)
        await asyncio.wait_for(fake.cancelled.wait(), 2)


async def test_nothing_is_repeated(fake: FakeServer) -> None:
    fake.answers["GetLoad"] = Status(grpc.StatusCode.UNAVAILABLE, "draining")
    async with await OpenEngineClient.connect(fake.target) as client:
        with pytest.raises(RpcRejected):
            await client.load()
    assert len(fake.requests["GetLoad"]) == 1


async def test_the_token_goes_with_every_call(fake: FakeServer) -> None:
    fake.answers |= {"GetLoad": observability_pb2.LoadInfo(), "Generate": [tokens("a"), finished()]}
    async with await OpenEngineClient.connect(fake.target, token="secret") as client:
        assert ("authorization", "Bearer secret") in fake.metadata
        await client.load()
        assert ("authorization", "Bearer secret") in fake.metadata
        await client.generate(generate_pb2.GenerateRequest(prompt="a")).collect()
        assert ("authorization", "Bearer secret") in fake.metadata


async def test_messages_of_many_megabytes_pass(fake: FakeServer) -> None:
    fake.answers["Generate"] = [tokens("x" * 8_000_000), finished()]
    request = generate_pb2.GenerateRequest(token_ids=inputs_pb2.TokenIds(ids=range(2_000_000)))
    async with await OpenEngineClient.connect(fake.target) as client:
        result = await client.generate(request).collect()
    assert len(result.outputs[0].text) == 8_000_000
    assert len(fake.last("Generate").token_ids.ids) == 2_000_000


async def test_a_server_on_a_unix_socket(fake: FakeServer, tmp_path: Any) -> None:
    class Server(service_pb2_grpc.OpenEngineServicer):
        async def GetEngineInfo(self, request: Any, context: Any) -> discovery_pb2.EngineInfo:
            return engine_info()

    Server.__abstractmethods__ = frozenset()
    server = grpc.aio.server()
    service_pb2_grpc.add_OpenEngineServicer_to_server(Server(), server)  # type: ignore[abstract]
    server.add_insecure_port(f"unix:{tmp_path}/s")
    await server.start()
    try:
        async with await OpenEngineClient.connect(f"unix:{tmp_path}/s") as client:
            assert client.engine.schema_revision == 1
    finally:
        await server.stop(None)


async def test_tls_to_a_plain_server_is_unreachable(fake: FakeServer) -> None:
    with pytest.raises(Unreachable):
        await OpenEngineClient.connect(fake.target, tls=Tls())


async def test_no_single_model_has_to_be_chosen(fake: FakeServer) -> None:
    fake.answers["GetEngineInfo"] = engine_info(supported_models=["a", "b"])
    async with await OpenEngineClient.connect(fake.target) as client:
        with pytest.raises(ContractViolation, match="a, b"):
            client.default_model()


async def test_a_server_that_goes_away_between_calls_is_not_a_rejection(fake: FakeServer) -> None:
    client = await OpenEngineClient.connect(fake.target)
    async with client:
        await fake.stop()
        with pytest.raises((ConnectionLost, Unreachable)):
            await client.load()
