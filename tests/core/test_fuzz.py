"""Arbitrary valid messages to every RPC: the server stands, and nothing is left behind (ERR-05)."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import grpc

from openengine.v1 import (
    discovery_pb2,
    generate_pb2,
    kv_pb2,
    lifecycle_pb2,
    lora_pb2,
    model_pb2,
    observability_pb2,
    tasks_pb2,
)
from tests.core.conftest import Served, until
from tests.core.fake_engine import length_finish
from tests.support.fuzz import fill

UNARY: dict[str, Any] = {
    "GetEngineInfo": discovery_pb2.GetEngineInfoRequest,
    "GetModelInfo": model_pb2.GetModelInfoRequest,
    "GetLoad": observability_pb2.GetLoadRequest,
    "Health": lifecycle_pb2.HealthRequest,
    "Abort": lifecycle_pb2.AbortRequest,
    "Embed": tasks_pb2.EmbedRequest,
    "Classify": tasks_pb2.ClassifyRequest,
    "Score": tasks_pb2.ScoreRequest,
    "LoadLora": lora_pb2.LoadLoraRequest,
    "UnloadLora": lora_pb2.UnloadLoraRequest,
    "ListLoras": lora_pb2.ListLorasRequest,
    "GetKvConnectorInfo": kv_pb2.GetKvConnectorInfoRequest,
    "GetKvEventSources": kv_pb2.GetKvEventSourcesRequest,
}
STREAMS: dict[str, Any] = {
    "Generate": generate_pb2.GenerateRequest,
    "SubscribeKvEvents": kv_pb2.SubscribeKvEventsRequest,
    "SubscribeRuntimeEvents": observability_pb2.SubscribeRuntimeEventsRequest,
}
ALLOWED = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.ALREADY_EXISTS,
}


async def _status(call: Any) -> grpc.StatusCode:
    try:
        if hasattr(call, "__aiter__"):
            async for _ in call:
                pass
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def test_any_message_to_any_rpc_gets_a_status_of_the_contract(served: Served) -> None:
    """ERR-05, ERR-06: never INTERNAL, which would be a bug of ours."""
    served.engine.script = lambda call: [
        length_finish(index) for index in range(call.request.sampling.num_sequences or 1)
    ]
    chance = random.Random(7)
    for _ in range(60):
        calls = []
        for name, kind in (UNARY | STREAMS).items():
            message = fill(kind(), chance, density=chance.choice((0.2, 0.6, 0.9)))
            if name == "Generate" and chance.random() < 0.8:
                message.request_id, message.model = f"f{chance.random()}", "fake-model"
            calls.append((name, getattr(served.stub, name)(message, timeout=20)))
        for name, code in zip(
            [name for name, _ in calls],
            await asyncio.gather(*(_status(call) for _, call in calls)),
            strict=True,
        ):
            assert code in ALLOWED, f"{name}: {code}"
    await until(lambda: len(served.servicer.requests) == 0 and not served.engine.running)
    health = await served.stub.Health(lifecycle_pb2.HealthRequest())
    assert health.state == lifecycle_pb2.HEALTH_STATE_READY
