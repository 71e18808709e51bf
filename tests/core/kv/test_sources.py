"""GetKvEventSources (KVS-01 … KVS-03)."""

from __future__ import annotations

import argparse

import grpc
import pytest
import zmq.asyncio

from openengine.v1 import kv_pb2
from openengine_adapters.core.kv import discovery
from openengine_adapters.core.kv.discovery import Reachable, is_wildcard, own_address
from openengine_adapters.core.kv.plane import KvOptions
from openengine_adapters.engine import KvEventPublisher
from openengine_adapters.options import parse
from tests.core.kv.conftest import KvServed, kv_serving
from tests.core.kv.publisher import FakePublisher, stored

OUTSIDE = Reachable(advertise_host="node-7.example", listen_host="0.0.0.0", port=50051)


def publisher_at(endpoint: str, replay: str = "", **more: object) -> KvEventPublisher:
    values: dict[str, object] = {"rank": 0, "endpoint": endpoint, "replay_endpoint": replay, **more}
    return KvEventPublisher(**values)  # type: ignore[arg-type]


def found(kind: str, *publishers: KvEventPublisher, at: Reachable = OUTSIDE) -> list[kv_pb2.KvEventSource]:
    return list(discovery.sources(kind, publishers, range(9), at).sources)


async def ask(kv: KvServed, *ranks: int) -> list[kv_pb2.KvEventSource]:
    answer = await kv.stub.GetKvEventSources(kv_pb2.GetKvEventSourcesRequest(data_parallel_ranks=ranks))
    return list(answer.sources)


async def test_by_default_one_stream_for_each_rank(publisher: FakePublisher) -> None:
    async with kv_serving([publisher.describe(rank=1), publisher.describe(rank=0)]) as kv:
        sources = await ask(kv)
        assert [(s.transport, s.data_parallel_rank, s.encoding) for s in sources] == [
            ("grpc", 0, "protobuf"),
            ("grpc", 1, "protobuf"),
        ]
        assert all(s.HasField("data_parallel_rank") for s in sources)
        address = sources[0].endpoint_addr
        assert f"{address.host}:{address.port}" == kv.target
        assert [s.data_parallel_rank for s in await ask(kv, 1)] == [1]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask(kv, 0, 2)
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_none_when_events_are_off() -> None:
    async with kv_serving([]) as kv:
        assert await ask(kv) == []


async def test_a_plain_subscriber_can_read_a_native_source(publisher: FakePublisher) -> None:
    async with kv_serving([publisher.describe(topic="kv")], KvOptions(source="both")) as kv:
        await publisher.subscribed()
        stream, native = await ask(kv)
        assert (stream.transport, native.transport, native.encoding) == ("grpc", "zmq", "msgpack")
        assert (native.topic, native.buffer_steps, native.hwm, native.max_queue_size) == (
            "kv",
            1000,
            2000,
            3000,
        )
        address = native.endpoint_addr
        with (
            zmq.asyncio.Context() as context,
            context.socket(zmq.SUB) as plain,
            context.socket(zmq.DEALER) as asking,
        ):
            plain.subscribe("")
            plain.connect(f"{address.protocol}://{address.host}:{address.port}")
            await publisher.subscribed()
            await publisher.publish(stored(1))
            assert (await plain.recv_multipart())[1] == bytes(8)
            asking.connect(native.replay_endpoint)
            await asking.send_multipart((b"", bytes(8)))
            assert (await asking.recv_multipart())[2] == bytes(8)


def test_what_listens_everywhere_is_advertised_under_our_name() -> None:
    (source,) = found("native", publisher_at("tcp://127.0.0.1:5557", "tcp://*:5558", every_interface=True))
    assert (source.endpoint_addr.host, source.endpoint_addr.port) == ("node-7.example", 5557)
    assert source.replay_endpoint == "tcp://node-7.example:5558"


def test_what_listens_on_one_address_is_advertised_there() -> None:
    (source,) = found("native", publisher_at("tcp://10.1.2.3:5557"))
    assert source.endpoint_addr.host == "10.1.2.3"
    assert source.replay_endpoint == ""
    assert not source.HasField("buffer_steps")


def test_ipv6_addresses_are_bracketed_where_needed() -> None:
    (source,) = found("native", publisher_at("tcp://[fd00::7]:5557", "tcp://[fd00::7]:5558"))
    assert source.endpoint_addr.host == "fd00::7"
    assert source.replay_endpoint == "tcp://[fd00::7]:5558"


def test_what_nobody_outside_can_reach_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    local = publisher_at("ipc:///tmp/kv")
    assert [s.transport for s in found("both", local)] == ["grpc"]
    discovery.warn_of_unreachable("both", [local])
    assert "cannot be advertised" in caplog.text


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "[::]", "*", ""])
def test_a_wildcard_is_never_advertised(host: str) -> None:
    assert is_wildcard(host)
    assert Reachable(listen_host=host).host() == own_address()
    assert not is_wildcard(own_address())
    where = "[::]" if host == "::" else host or "*"
    (source,) = found("native", publisher_at(f"tcp://{where}:5557"), at=Reachable(listen_host=host))
    assert source.endpoint_addr.host == own_address()


@pytest.mark.parametrize(
    ("host", "expected"), [("127.0.0.1", "127.0.0.1"), ("[::1]", "::1"), ("node", "node")]
)
def test_a_listening_address_is_its_own_name(host: str, expected: str) -> None:
    assert Reachable(listen_host=host).host() == expected


def test_options() -> None:
    options = parse(["--kv-events", "--kv-source", "both", "--kv-hash-encoding", "decimal_int64"])
    assert (options.kv_events, options.kv_source, options.kv_hash_encoding) == (True, "both", "decimal_int64")
    assert not parse([]).kv_events
    with pytest.raises(SystemExit):
        parse(["--advertise-host", "0.0.0.0"])


def test_help_names_the_options() -> None:
    from openengine_adapters.options import add_server_options

    parser = argparse.ArgumentParser()
    add_server_options(parser)
    text = parser.format_help()
    assert all(option in text for option in ("--kv-events", "--kv-source", "--kv-hash-encoding"))
