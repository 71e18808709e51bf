"""Death and hang of each engine process: what streams, new calls, Health and the exit status say.

Every case is a server process of its own, started before it is needed so that the starts overlap.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Iterator
from typing import Any

import grpc
import psutil
import pytest

from openengine.v1 import (
    errors_pb2,
    generate_pb2,
    inputs_pb2,
    lifecycle_pb2,
    observability_pb2,
    service_pb2_grpc,
)
from tests.support import cpu_env
from tests.support.server import Server

PATIENCE_S = 120.0
HANG_S = 4.0
"""Above the longest wait for a core that others use as well."""

NOTICED_S = 2.0
STREAMS = 4
Signal = signal.Signals
CASES = [
    (Signal.SIGKILL, "EngineCore", True),
    (Signal.SIGKILL, "Worker", False),
    (Signal.SIGSTOP, "EngineCore", False),
    (Signal.SIGSTOP, "Worker", True),
]


@pytest.fixture(scope="module")
def servers() -> Iterator[list[Server]]:
    """One server for each case, two of them starting at a time."""
    made = []
    for _, _, stay_up in CASES:
        flags = [*cpu_env.vllm_flags(cpu_env.TINY_LLAMA), "--hang-timeout", str(HANG_S)]
        made.append(Server("vllm", [*flags, *(["--stay-up"] if stay_up else [])], cpu_env.vllm_env()))
    made[0].start()
    yield made
    for server in made:
        server.stop(grace=30)


def request(number: int) -> generate_pb2.GenerateRequest:
    return generate_pb2.GenerateRequest(
        request_id=f"r{number}",
        model=str(cpu_env.model(cpu_env.TINY_LLAMA)),
        token_ids=inputs_pb2.TokenIds(ids=[5, 6, 7]),
        sampling=generate_pb2.SamplingParams(temperature=0.0),
        stopping=generate_pb2.StoppingOptions(max_tokens=1000, ignore_eos=True),
    )


async def code_of(call: Any) -> grpc.StatusCode:
    """The status of a call, whatever it answered."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            if hasattr(call, "__aiter__"):
                async for _ in call:
                    pass
            else:
                await call
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def strike(target: str, victim: psutil.Process, blow: signal.Signals) -> list[tuple[Any, float]]:
    """Strike while streams run; returns their last responses, each with the seconds that it took to come."""
    running: asyncio.Queue[None] = asyncio.Queue()
    struck = 0.0

    async def last(call: Any) -> tuple[Any, float]:
        responses: list[generate_pb2.GenerateResponse] = []
        async for response in call:
            if not responses:
                running.put_nowait(None)
            responses.append(response)
        assert await call.code() is grpc.StatusCode.OK
        return responses[-1], time.monotonic() - struck

    async with grpc.aio.insecure_channel(target) as channel, asyncio.timeout(PATIENCE_S):
        stub: Any = service_pb2_grpc.OpenEngineStub(channel)
        streams = [asyncio.create_task(last(stub.Generate(request(number)))) for number in range(STREAMS)]
        for _ in streams:
            await running.get()
        struck = time.monotonic()
        victim.send_signal(blow)
        return await asyncio.gather(*streams)


async def afterwards(target: str) -> dict[str, grpc.StatusCode]:
    """What Health and new calls say once the streams are over; Health that answers must say NOT_READY."""
    async with grpc.aio.insecure_channel(target) as channel:
        stub: Any = service_pb2_grpc.OpenEngineStub(channel)
        codes = {
            "Generate": await code_of(stub.Generate(request(99))),
            "GetLoad": await code_of(stub.GetLoad(observability_pb2.GetLoadRequest())),
            "Drain": await code_of(stub.Drain(lifecycle_pb2.DrainRequest())),
        }
        try:
            state = (await stub.Health(lifecycle_pb2.HealthRequest(), timeout=PATIENCE_S)).state
            codes["Health"] = grpc.StatusCode.OK
            assert state == lifecycle_pb2.HEALTH_STATE_NOT_READY
        except grpc.aio.AioRpcError as error:
            codes["Health"] = error.code()
    return codes


@pytest.mark.parametrize(
    ("number", "case"), [*enumerate(CASES)], ids=[f"{blow.name}-{victim}" for blow, victim, _ in CASES]
)
async def test_every_open_stream_ends_and_no_process_stays(
    servers: list[Server], number: int, case: tuple[signal.Signals, str, bool]
) -> None:
    """ERR-04, ERR-07, HEALTH-04; exit status 3."""
    blow, victim_name, stay_up = case
    server = servers[number]
    server.wait_ready()
    if number + 1 < len(servers):
        servers[number + 1].start()  # it is ready when its turn comes
    process = psutil.Process(server.pid)
    tree = [process, *process.children(recursive=True)]
    victim = next(child for child in tree if victim_name in " ".join(child.cmdline()))
    limit = NOTICED_S + (HANG_S if blow is Signal.SIGSTOP else 0)
    for response, took in await strike(server.target, victim, blow):
        assert response.WhichOneof("event") == "error", response
        assert (response.error.code, response.error.retryable) == (errors_pb2.ERROR_CODE_INTERNAL, True)
        assert response.usage.prompt_tokens == 3 and response.usage.completion_tokens > 0
        assert took < limit
    codes = await afterwards(server.target)
    health = codes.pop("Health")
    assert set(codes.values()) == {grpc.StatusCode.UNAVAILABLE}, codes
    if stay_up:
        assert health is grpc.StatusCode.OK
        process.terminate()
    else:
        assert health in (grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE)
    assert server.wait(PATIENCE_S) == 3, server.tail()
    end = time.monotonic() + PATIENCE_S
    while left := [child for child in tree if alive(child)]:
        assert time.monotonic() < end, left
        await asyncio.sleep(0.1)
    assert "engine died" in server.log.read_text(errors="replace")


def alive(process: psutil.Process) -> bool:
    """Whether it still runs, or is stopped."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
