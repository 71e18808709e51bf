"""What operators do: abort, drain, LoRA adapters, events and the KV plane."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from openengine.v1 import errors_pb2, kv_pb2, lifecycle_pb2, lora_pb2, observability_pb2
from tests.client.conftest import OpenEngine
from tests.client.fake import FakeServer, Status
from tests.client.responses import batch, cleared, removed, stored

# ------------------------------------------------------------------------------------- abort and drain


@pytest.mark.parametrize(
    ("arguments", "target"),
    [
        (["r1"], lifecycle_pb2.AbortRequest(request_id="r1")),
        (["--all"], lifecycle_pb2.AbortRequest(all_requests=lifecycle_pb2.AllRequests())),
        (["--kv-session", "s"], lifecycle_pb2.AbortRequest(kv_session=kv_pb2.KvSessionRef(session_id="s"))),
    ],
)
async def test_abort(
    fake: FakeServer, openengine: OpenEngine, arguments: list[str], target: lifecycle_pb2.AbortRequest
) -> None:
    fake.answers["Abort"] = lifecycle_pb2.AbortResponse(status=lifecycle_pb2.ABORT_STATUS_ALREADY_FINISHED)
    outcome = await openengine("abort", *arguments)
    assert (outcome.code, outcome.out) == (0, "already finished\n")
    assert fake.last("Abort") == target
    (record,) = (await openengine("abort", *arguments, "--output", "json")).records
    assert record == {"status": "ALREADY_FINISHED", "message": ""}


@pytest.mark.parametrize("arguments", [[], ["r1", "--all"], ["--all", "--kv-session", "s"]])
async def test_abort_takes_exactly_one_target(
    fake: FakeServer, openengine: OpenEngine, arguments: list[str]
) -> None:
    assert (await openengine("abort", *arguments)).code == 2
    assert not fake.requests


def drain(state: lifecycle_pb2.DrainState.ValueType, **fields: Any) -> lifecycle_pb2.DrainResponse:
    return lifecycle_pb2.DrainResponse(state=state, **fields)


async def test_drain(fake: FakeServer, openengine: OpenEngine) -> None:
    fake.answers["Drain"] = [
        drain(lifecycle_pb2.DRAIN_STATE_STARTED, in_flight_requests=2),
        drain(lifecycle_pb2.DRAIN_STATE_IN_PROGRESS, message="waiting"),
        drain(lifecycle_pb2.DRAIN_STATE_COMPLETE, in_flight_requests=0, open_kv_sessions=0),
    ]
    outcome = await openengine("drain", "--deadline", "0", "--abort-after-deadline")
    assert outcome.code == 0
    assert outcome.out.splitlines() == [
        "started: 2 requests in flight",
        "in progress: waiting",
        "complete: 0 requests in flight, 0 KV sessions open",
    ]
    request = fake.last("Drain")
    assert (request.stop_accepting_new_requests, request.abort_after_deadline) == (True, True)
    assert (request.HasField("deadline_ms"), request.deadline_ms) == (True, 0)
    records = (await openengine("drain", "--keep-accepting", "--output", "json")).records
    assert records[0] == {
        "state": "STARTED",
        "in_flight_requests": 2,
        "open_kv_sessions": None,
        "message": "",
    }
    assert not fake.last("Drain").stop_accepting_new_requests


async def test_a_drain_that_runs_out_of_time_exits_1(fake: FakeServer, openengine: OpenEngine) -> None:
    error = errors_pb2.EngineError(code=errors_pb2.ERROR_CODE_DRAINING, message="2 requests still run")
    fake.answers["Drain"] = [
        drain(lifecycle_pb2.DRAIN_STATE_STARTED),
        lifecycle_pb2.DrainResponse(error=error),
    ]
    outcome = await openengine("drain", "--deadline", "0.5")
    assert fake.last("Drain").deadline_ms == 500
    assert (outcome.code, outcome.err) == (
        1,
        "openengine: the request failed: DRAINING: 2 requests still run\n",
    )


# ------------------------------------------------------------------------------------------------ LoRA


async def test_lora_load_makes_the_path_absolute_and_the_id_from_the_name(
    fake: FakeServer, openengine: OpenEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    fake.answers["LoadLora"] = lambda request: lora_pb2.LoadLoraResponse(adapter=request.adapter)
    outcome = await openengine("lora", "load", "en-fr", "adapters/x")
    adapter = fake.last("LoadLora").adapter
    assert adapter.lora_id > 0
    assert adapter.source_path == f"{tmp_path}/adapters/x"
    assert outcome.out == f"loaded: en-fr (id {adapter.lora_id}) from {adapter.source_path}\n"
    await openengine("lora", "load", "en-fr", "/y")
    assert fake.last("LoadLora").adapter.lora_id == adapter.lora_id
    (record,) = (await openengine("lora", "load", "a", "/y", "--id", "7", "--output", "json")).records
    expected = {"lora_id": 7, "lora_name": "a", "source_path": "/y"}
    assert record == {"adapter": expected, "already_loaded": False}


async def test_lora_load_again_unload_and_list(fake: FakeServer, openengine: OpenEngine) -> None:
    adapter = lora_pb2.LoraAdapter(lora_id=7, lora_name="a", source_path="/y")
    fake.answers |= {
        "LoadLora": lora_pb2.LoadLoraResponse(adapter=adapter, already_loaded=True),
        "UnloadLora": lora_pb2.UnloadLoraResponse(adapter=adapter),
        "ListLoras": lora_pb2.ListLorasResponse(adapters=[adapter]),
    }
    assert (await openengine("lora", "load", "a", "/y")).out == "was loaded already: a (id 7) from /y\n"
    assert (await openengine("lora", "unload", "a")).out == "unloaded: a (id 7) from /y\n"
    assert fake.last("UnloadLora").lora_name == "a"
    assert (await openengine("lora", "list")).out == "name  id  path\na      7  /y\n"
    (record,) = (await openengine("lora", "list", "--output", "json")).records
    assert [each["lora_name"] for each in record["adapters"]] == ["a"]
    fake.answers["ListLoras"] = lora_pb2.ListLorasResponse()
    assert (await openengine("lora", "list")).out == "name  id  path\n"


# --------------------------------------------------------------------------------------- events and KV


async def test_events(fake: FakeServer, openengine: OpenEngine) -> None:
    event = observability_pb2.RuntimeEvent(
        event_id="e1",
        timestamp_unix_nanos=1_000_000_000_500_000_000,
        type=observability_pb2.RUNTIME_EVENT_TYPE_QUEUE,
        attributes={"waiting": "2", "running": "1"},
    )
    fake.answers["SubscribeRuntimeEvents"] = observability_pb2.SubscribeRuntimeEventsResponse(
        runtime_event=event
    )
    outcome = await openengine("events", "--type", "queue", "--type", "forward-pass")
    assert (outcome.code, outcome.out) == (0, "01:46:40.500000 QUEUE        running=1 waiting=2\n")
    assert list(fake.last("SubscribeRuntimeEvents").types) == [
        observability_pb2.RUNTIME_EVENT_TYPE_QUEUE,
        observability_pb2.RUNTIME_EVENT_TYPE_FORWARD_PASS,
    ]
    (record,) = (await openengine("events", "--output", "json")).records
    assert record["type"] == "QUEUE"
    assert record["attributes"] == {"waiting": "2", "running": "1"}


async def test_kv_sources(fake: FakeServer, openengine: OpenEngine) -> None:
    zmq = kv_pb2.KvEventSource(
        transport="zmq",
        endpoint_addr=kv_pb2.KvEndpoint(host="10.0.0.1", port=5557, protocol="tcp"),
        topic="kv",
        data_parallel_rank=0,
        encoding="msgpack",
        hwm=100,
    )
    grpc_source = kv_pb2.KvEventSource(transport="grpc", data_parallel_rank=1, encoding="protobuf")
    fake.answers["GetKvEventSources"] = kv_pb2.GetKvEventSourcesResponse(sources=[zmq, grpc_source])
    header, first, second = (await openengine("kv", "sources", "--rank", "0", "--rank", "1")).out.splitlines()
    assert list(fake.last("GetKvEventSources").data_parallel_ranks) == [0, 1]
    assert first.split() == ["0", "zmq", "tcp://10.0.0.1:5557", "kv", "-", "msgpack", "-", "-", "100", "-"]
    assert second.split() == ["1", "grpc", "-", "-", "-", "protobuf", "-", "-", "-", "-"]
    assert len(header.split()) == 10
    records = (await openengine("kv", "sources", "--output", "json")).records
    assert [record["data_parallel_rank"] for record in records] == [0, 1]


async def test_kv_watch(fake: FakeServer, openengine: OpenEngine) -> None:
    response = kv_pb2.SubscribeKvEventsResponse
    fake.answers["SubscribeKvEvents"] = [
        response(batch=batch(4, cleared(), stored(1, 2))),
        response(batch=batch(5)),
        response(batch=batch(6, removed(2), rank=1)),
    ]
    outcome = await openengine("kv", "watch", "--snapshot", "--start", "4", "--rank", "1")
    assert outcome.out.splitlines() == [
        "rank=0 sequence=4 stored=2 cleared=1",
        "rank=0 sequence=5",
        "rank=1 sequence=6 removed=1",
    ]
    request = fake.last("SubscribeKvEvents")
    assert (request.include_snapshot, request.start_sequence_number) == (True, 4)
    assert list(request.data_parallel_ranks) == [1]
    first, _, last = (await openengine("kv", "watch", "--output", "json")).records
    assert first["events"][0]["all_blocks_cleared"] == {}
    removal = last["events"][0]["block_removed"]
    assert removal["block_hashes"] == [{"value": "0000000000000002", "encoding": "int64"}]


async def test_a_refused_subscription_says_how_it_could_be_had(
    fake: FakeServer, openengine: OpenEngine
) -> None:
    fake.answers["SubscribeKvEvents"] = Status(grpc.StatusCode.UNIMPLEMENTED, "start it with --kv-events")
    outcome = await openengine("kv", "watch")
    assert outcome.code == 1
    assert "UNIMPLEMENTED: start it with --kv-events" in outcome.err
