"""SIGTERM to a real vLLM server: vLLM's own shutdown would leave open streams hanging."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from signal import SIGTERM
from typing import Any

import grpc
import psutil
import pytest

from openengine.v1 import generate_pb2, lifecycle_pb2, service_pb2_grpc
from tests.support import cpu_env, death, restarts
from tests.support.server import Server
from tests.support.wire import Answer

STREAMS = 4
MAX_TOKENS = 900
GRACES = {"120": generate_pb2.FINISH_REASON_LENGTH, "0.2": generate_pb2.FINISH_REASON_CANCELLED}


def make(*flags: str) -> Server:
    return Server("vllm", [*cpu_env.vllm_flags(cpu_env.TINY_LLAMA), *flags], cpu_env.vllm_env())


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, Server]]:
    """A server for each grace; the second starts while the first is drained."""
    made = {grace: make("--drain-grace", grace) for grace in GRACES}
    next(iter(made.values())).start()
    with restarts.stopping([*made.values()]):
        yield made


@pytest.mark.parametrize("grace", GRACES)
async def test_sigterm_lets_streams_end_within_its_grace_and_aborts_the_rest(
    servers: dict[str, Server], grace: str
) -> None:
    """DRAIN-05, GEN-05, STREAM-08: every stream has its proper end, late requests are UNAVAILABLE, nothing is left."""
    server = servers[grace]
    if grace != next(iter(GRACES)):
        server.start()
    server.wait_ready()
    process = psutil.Process(server.pid)
    tree = [process, *process.children(recursive=True)]
    begun: asyncio.Queue[None] = asyncio.Queue()

    async def read(call: Any) -> Answer:
        responses: list[generate_pb2.GenerateResponse] = []
        async for response in call:
            if not responses:
                begun.put_nowait(None)
            responses.append(response)
        return Answer(responses)

    async with grpc.aio.insecure_channel(server.target) as channel, asyncio.timeout(death.PATIENCE_S):
        stub: Any = service_pb2_grpc.OpenEngineStub(channel)
        requests = [death.request(number, MAX_TOKENS) for number in range(STREAMS)]
        streams = [asyncio.create_task(read(stub.Generate(request))) for request in requests]
        for _ in streams:
            await begun.get()
        process.send_signal(SIGTERM)
        while await death.code_of(stub.Generate(death.request(99, 1))) is not grpc.StatusCode.UNAVAILABLE:
            pass  # the signal is on its way
        if grace == "120":
            health = await stub.Health(lifecycle_pb2.HealthRequest())
            assert health.state == lifecycle_pb2.HEALTH_STATE_DRAINING
        for answer in await asyncio.gather(*streams):
            assert answer.first.reason == GRACES[grace]
            assert answer.usage.completion_tokens == len(answer.first.tokens)
            assert (len(answer.first.tokens) == MAX_TOKENS) == (grace == "120")
    assert await asyncio.to_thread(server.wait, death.PATIENCE_S) == 0, server.tail()
    await death.until_gone(tree)
