"""Signals to a real vLLM server: vLLM's own shutdown would leave open streams hanging."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from signal import SIGINT
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


def interrupt(server: psutil.Process) -> None:
    """What a Ctrl-C on the terminal does: every process of the group gets it."""
    os.killpg(os.getpgid(server.pid), SIGINT)


CASES: dict[str, tuple[str, Callable[[psutil.Process], None]]] = {
    # The grace, and the signal.
    "patient": ("120", psutil.Process.terminate),
    "terminal": ("120", interrupt),
    "hasty": ("0.2", psutil.Process.terminate),
}


def make(*flags: str) -> Server:
    return Server("vllm", [*cpu_env.vllm_flags(cpu_env.TINY_LLAMA), *flags], cpu_env.vllm_env())


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, Server]]:
    """A server for each case."""
    made = {case: make("--drain-grace", grace) for case, (grace, _) in CASES.items()}
    with restarts.stopping([*made.values()]):
        yield made


@pytest.mark.parametrize("case", CASES)
async def test_a_signal_lets_streams_end_within_the_grace_and_aborts_the_rest(
    servers: dict[str, Server], case: str
) -> None:
    """DRAIN-05, GEN-05, STREAM-08: every stream has its proper end, late requests are UNAVAILABLE, nothing is left."""
    server, (grace, signal) = servers[case], CASES[case]
    patient = grace == "120"
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
        signal(process)
        while await death.code_of(stub.Generate(death.request(99, 1))) is not grpc.StatusCode.UNAVAILABLE:
            pass  # the signal is on its way
        if patient:
            health = await stub.Health(lifecycle_pb2.HealthRequest())
            assert health.state == lifecycle_pb2.HEALTH_STATE_DRAINING
        for answer in await asyncio.gather(*streams):
            assert answer.first.reason == (
                generate_pb2.FINISH_REASON_LENGTH if patient else generate_pb2.FINISH_REASON_CANCELLED
            )
            assert answer.usage.completion_tokens == len(answer.first.tokens)
            assert (len(answer.first.tokens) == MAX_TOKENS) == patient
    assert await asyncio.to_thread(server.wait, death.PATIENCE_S) == 0, server.tail()
    await death.until_gone(tree)
