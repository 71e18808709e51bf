"""Streams: typed events, one end, and a close that cancels (STREAM-08, ERR-01, STREAM-11)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from openengine.v1 import errors_pb2, generate_pb2, kv_pb2, lifecycle_pb2, observability_pb2
from openengine.v1.generate_pb2 import GenerateRequest, GenerateResponse
from openengine_adapters.client import (
    ConnectionLost,
    ContractViolation,
    DrainStep,
    EngineError,
    Finished,
    OpenEngineClient,
    PrefillReady,
    PromptTokens,
    RpcRejected,
    TimedOut,
    Tokens,
)
from tests.client.fake import HANG, FakeServer, Status
from tests.client.responses import USAGE, batch, failed, finished, record, stored, tokens

REQUEST = GenerateRequest(request_id="r", model="tiny", prompt="hi")
TWO = GenerateRequest(prompt="hi", sampling=generate_pb2.SamplingParams(num_sequences=2))


@pytest.fixture
async def client(fake: FakeServer) -> AsyncIterator[OpenEngineClient]:
    async with await OpenEngineClient.connect(fake.target) as client:
        yield client


async def test_events_come_typed_and_in_order(fake: FakeServer, client: OpenEngineClient) -> None:
    match = generate_pb2.StopMatch(stop_text="!")
    prompt = GenerateResponse(request_id="r", prompt=generate_pb2.PromptOutput(tokens=[record("hi")]))
    end = finished(reason=generate_pb2.FINISH_REASON_STOP, stop_match=match)
    fake.answers["Generate"] = [prompt, tokens("a"), tokens("b"), end]
    generation = client.generate(REQUEST)
    assert [event async for event in generation] == [
        PromptTokens([record("hi")]),
        Tokens(0, "a", [record("a")]),
        Tokens(0, "b", [record("b")]),
        Finished(0, "STOP", "", match, USAGE),
    ]
    assert generation.usage == USAGE
    assert fake.last("Generate") == REQUEST


async def test_collect_puts_the_outputs_together(fake: FakeServer, client: OpenEngineClient) -> None:
    fake.answers["Generate"] = [
        tokens("a"),
        tokens("x", 1),
        tokens("b"),
        finished(1, usage=None),
        finished(0),
    ]
    result = await client.generate(TWO).collect()
    assert [output.text for output in result.outputs] == ["ab", "x"]
    assert result.outputs[0].finish is not None
    assert result.usage == USAGE


async def test_a_prefill_server_hands_over_its_session(fake: FakeServer, client: OpenEngineClient) -> None:
    session = kv_pb2.KvSessionRef(session_id="s", transfer_backend="nixl")
    fake.answers["Generate"] = GenerateResponse(
        prefill_ready=generate_pb2.PrefillReady(kv_session=session), usage=USAGE
    )
    assert [event async for event in client.generate(REQUEST)] == [PrefillReady(session, USAGE)]


async def test_before_acceptance_a_failure_is_a_status(fake: FakeServer, client: OpenEngineClient) -> None:
    fake.answers["Generate"] = Status(grpc.StatusCode.INVALID_ARGUMENT, "sampling.top_p: must be in (0, 1]")
    with pytest.raises(RpcRejected) as failure:
        await client.generate(REQUEST).collect()
    assert failure.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert failure.value.message == "sampling.top_p: must be in (0, 1]"


async def test_after_acceptance_it_is_an_engine_error(fake: FakeServer, client: OpenEngineClient) -> None:
    code = errors_pb2.ERROR_CODE_OVERLOADED
    error = failed(code=code, retryable=True, retry_after_ms=1500, details={"limit": 3})
    fake.answers["Generate"] = [tokens("a"), error]
    with pytest.raises(EngineError, match="OVERLOADED: out of blocks") as failure:
        await client.generate(REQUEST).collect()
    assert failure.value.retryable
    assert failure.value.retry_after_ms == 1500
    assert failure.value.details == {"limit": 3}
    assert failure.value.usage == USAGE


async def test_DISC_12_unknown_values_are_unspecified(fake: FakeServer, client: OpenEngineClient) -> None:
    fake.answers["Generate"] = [GenerateResponse(request_id="r"), finished(reason=77)]
    (event,) = [event async for event in client.generate(REQUEST)]
    assert isinstance(event, Finished)
    assert event.reason == "UNSPECIFIED"
    fake.answers["Generate"] = failed(code=99)
    with pytest.raises(EngineError, match="UNSPECIFIED"):
        await client.generate(REQUEST).collect()


@pytest.mark.parametrize(
    "script", [[], [tokens("a")], [finished(0, usage=None)]], ids=["nothing", "no end", "one of two ends"]
)
async def test_STREAM_08_a_stream_without_its_end_is_a_fault_of_the_server(
    fake: FakeServer, client: OpenEngineClient, script: list[Any]
) -> None:
    fake.answers["Generate"] = script
    with pytest.raises(ContractViolation, match="of 2 outputs"):
        await client.generate(TWO).collect()


async def test_an_output_that_was_not_asked_for(fake: FakeServer, client: OpenEngineClient) -> None:
    fake.answers["Generate"] = [tokens("a", 3), finished(3)]
    with pytest.raises(ContractViolation, match="output 3"):
        await client.generate(REQUEST).collect()


async def test_STREAM_11_closing_cancels_on_the_server(fake: FakeServer, client: OpenEngineClient) -> None:
    fake.answers["Generate"] = [tokens("a"), HANG]
    async with client.generate(REQUEST) as generation:
        assert await anext(generation) == Tokens(0, "a", [record("a")])
    await asyncio.wait_for(fake.cancelled.wait(), 2)
    assert [event async for event in generation] == []


async def test_cancelling_the_reader_cancels_on_the_server(
    fake: FakeServer, client: OpenEngineClient
) -> None:
    fake.answers["Generate"] = [tokens("a"), HANG]
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(client.generate(REQUEST).collect(), 0.3)
    await asyncio.wait_for(fake.cancelled.wait(), 2)


async def test_a_deadline_ends_the_stream(fake: FakeServer, client: OpenEngineClient) -> None:
    fake.answers["Generate"] = [tokens("a"), HANG]
    with pytest.raises(TimedOut, match=r"Generate did not end within 0\.3 s"):
        await client.generate(REQUEST, timeout=0.3).collect()


async def test_a_status_after_the_first_event_is_a_cut(fake: FakeServer, client: OpenEngineClient) -> None:
    fake.answers["Generate"] = [tokens("a"), Status(grpc.StatusCode.INTERNAL, "bug")]
    with pytest.raises(ConnectionLost, match="INTERNAL: bug"):
        await client.generate(REQUEST).collect()


async def test_a_server_that_goes_away_in_mid_stream(fake: FakeServer, client: OpenEngineClient) -> None:
    fake.answers["Generate"] = [tokens("a"), HANG]
    async with client.generate(REQUEST) as generation:
        await anext(generation)
        await fake.stop()
        with pytest.raises(ConnectionLost, match="Generate was cut off"):
            await anext(generation)


async def test_a_server_that_does_not_close_after_the_end(
    fake: FakeServer, client: OpenEngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("openengine_adapters.client.streams._CLOSING", 0.1)
    fake.answers["Generate"] = [tokens("a"), finished(), HANG]
    async with asyncio.timeout(2):
        result = await client.generate(REQUEST).collect()
    assert result.outputs[0].text == "a"


async def test_a_drain_reports_until_complete(fake: FakeServer, client: OpenEngineClient) -> None:
    response = lifecycle_pb2.DrainResponse
    fake.answers["Drain"] = [
        response(state=lifecycle_pb2.DRAIN_STATE_STARTED, in_flight_requests=2),
        response(state=lifecycle_pb2.DRAIN_STATE_COMPLETE, in_flight_requests=0, open_kv_sessions=0),
    ]
    steps = [step async for step in client.drain(deadline=0, abort_after_deadline=True)]
    assert steps == [DrainStep("STARTED", 2, None, ""), DrainStep("COMPLETE", 0, 0, "")]
    request = fake.last("Drain")
    assert request.stop_accepting_new_requests
    assert request.abort_after_deadline
    assert (request.HasField("deadline_ms"), request.deadline_ms) == (True, 0)


async def test_a_drain_may_not_end_without_complete(fake: FakeServer, client: OpenEngineClient) -> None:
    fake.answers["Drain"] = lifecycle_pb2.DrainResponse(state=lifecycle_pb2.DRAIN_STATE_STARTED)
    with pytest.raises(ContractViolation, match="COMPLETE"):
        _ = [step async for step in client.drain()]
    assert not fake.last("Drain").HasField("deadline_ms")


async def test_subscriptions_end_in_their_one_error(fake: FakeServer, client: OpenEngineClient) -> None:
    kv = kv_pb2.SubscribeKvEventsResponse
    error = errors_pb2.EngineError(code=errors_pb2.ERROR_CODE_OVERLOADED, message="too slow")
    fake.answers["SubscribeKvEvents"] = [kv(batch=batch(5, stored(1))), kv(error=error)]
    batches = client.kv_events([0], snapshot=True)
    assert (await anext(batches)).sequence_number == 5
    with pytest.raises(EngineError, match="too slow"):
        await anext(batches)
    assert fake.last("SubscribeKvEvents").include_snapshot

    runtime = observability_pb2.SubscribeRuntimeEventsResponse
    fake.answers["SubscribeRuntimeEvents"] = [
        runtime(runtime_event=observability_pb2.RuntimeEvent(event_id="1")),
        runtime(error=error),
    ]
    events = client.runtime_events()
    assert (await anext(events)).event_id == "1"
    with pytest.raises(EngineError, match="too slow"):
        await anext(events)


async def test_a_subscription_may_be_silent_and_is_closed(fake: FakeServer, client: OpenEngineClient) -> None:
    fake.answers["SubscribeKvEvents"] = HANG
    async with client.kv_events(start=3) as batches:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(anext(batches), 0.2)
    await asyncio.wait_for(fake.cancelled.wait(), 2)
    assert fake.last("SubscribeKvEvents").start_sequence_number == 3
