"""What must be seen when a process of an engine dies or hangs: streams, new calls, Health, exit status, processes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import grpc
import psutil

from openengine.v1 import (
    errors_pb2,
    generate_pb2,
    inputs_pb2,
    lifecycle_pb2,
    observability_pb2,
    service_pb2_grpc,
)
from tests.support import cpu_env
from tests.support.server import Server, executable

PATIENCE_S = 240.0
START_S = 600.0
"""A slow machine may take so long to find out that a start fails."""
STREAMS = 4
EXIT_DIED = 3

Blow = signal.Signals | Callable[[psutil.Process], Awaitable[None]]
"""A signal, or what a test does to a process."""


def request(number: int, max_tokens: int = 1000) -> generate_pb2.GenerateRequest:
    """A stream of tiny-llama that goes on until `max_tokens`."""
    return generate_pb2.GenerateRequest(
        request_id=f"r{number}",
        model=str(cpu_env.model(cpu_env.TINY_LLAMA)),
        token_ids=inputs_pb2.TokenIds(ids=[5, 6, 7]),
        sampling=generate_pb2.SamplingParams(temperature=0.0),
        stopping=generate_pb2.StoppingOptions(max_tokens=max_tokens, ignore_eos=True),
    )


async def strike(
    target: str, victim: psutil.Process, blow: Blow, max_tokens: int
) -> list[generate_pb2.GenerateResponse]:
    """Strike while streams run; returns the last response of each."""
    running: asyncio.Queue[None] = asyncio.Queue()

    async def last(call: Any) -> generate_pb2.GenerateResponse:
        responses: list[generate_pb2.GenerateResponse] = []
        async for response in call:
            if not responses:
                running.put_nowait(None)
            responses.append(response)
        assert await call.code() is grpc.StatusCode.OK
        return responses[-1]

    async with grpc.aio.insecure_channel(target) as channel, asyncio.timeout(PATIENCE_S):
        stub: Any = service_pb2_grpc.OpenEngineStub(channel)
        streams = [
            asyncio.create_task(last(stub.Generate(request(number, max_tokens)))) for number in range(STREAMS)
        ]
        for _ in streams:
            await running.get()
        if isinstance(blow, signal.Signals):
            victim.send_signal(blow)
        else:
            await blow(victim)
        return await asyncio.gather(*streams)


async def prove_hang_of_rank_1(server: Server, victim_name: str) -> None:
    """Stop the process of rank 1 while rank 0 has work all the time: its steps must not hide the hang (ERR-07)."""
    process = psutil.Process(server.pid)
    tree = [process, *process.children(recursive=True)]
    victim = named(victim_name, tree)

    def on_rank(rank: int, number: int, max_tokens: int) -> generate_pb2.GenerateRequest:
        one = request(number, max_tokens)
        one.kv.data_parallel_rank = rank
        return one

    async def keep_busy(stub: Any) -> None:
        for number in itertools.count(1):
            async for _ in stub.Generate(on_rank(0, number, 100)):
                pass

    async with grpc.aio.insecure_channel(server.target) as channel, asyncio.timeout(PATIENCE_S):
        stub: Any = service_pb2_grpc.OpenEngineStub(channel)
        busy = asyncio.create_task(keep_busy(stub))
        responses = aiter(stub.Generate(on_rank(1, 0, 1000)))
        await anext(responses)
        victim.suspend()
        *_, last = [response async for response in responses]
        assert last.error.message.startswith("rank 1 of the engine made no step"), last
        busy.cancel()
        await asyncio.gather(busy, return_exceptions=True)
    assert await asyncio.to_thread(server.wait, PATIENCE_S) == EXIT_DIED, server.tail()
    await until_gone(tree)


def named(name: str, tree: list[psutil.Process]) -> psutil.Process:
    """The process whose title has the name in it."""
    return next(child for child in tree if name in " ".join(child.cmdline()))


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


async def afterwards(target: str) -> tuple[set[grpc.StatusCode], grpc.StatusCode]:
    """The statuses of new calls once the streams are over, and Health's; if it answers, it must say NOT_READY."""
    async with grpc.aio.insecure_channel(target) as channel:
        stub: Any = service_pb2_grpc.OpenEngineStub(channel)
        codes = {
            await code_of(stub.Generate(request(99))),
            await code_of(stub.GetLoad(observability_pb2.GetLoadRequest())),
            await code_of(stub.Drain(lifecycle_pb2.DrainRequest())),
        }
        try:
            state = (await stub.Health(lifecycle_pb2.HealthRequest(), timeout=PATIENCE_S)).state
            assert state == lifecycle_pb2.HEALTH_STATE_NOT_READY
            return codes, grpc.StatusCode.OK
        except grpc.aio.AioRpcError as error:
            return codes, error.code()


async def prove(
    server: Server, victim_name: str, blow: Blow, *, stay_up: bool, max_tokens: int = 1000
) -> None:
    """Strike the process with that name in a READY server, and look at everything that must follow (ERR-04, ERR-07)."""
    process = psutil.Process(server.pid)
    tree = [process, *process.children(recursive=True)]
    victim = named(victim_name, tree)
    for response in await strike(server.target, victim, blow, max_tokens):
        assert response.WhichOneof("event") == "error", response
        assert (response.error.code, response.error.retryable) == (errors_pb2.ERROR_CODE_INTERNAL, True)
        assert response.usage.prompt_tokens == 3 and response.usage.completion_tokens > 0
    codes, health = await afterwards(server.target)
    assert codes == {grpc.StatusCode.UNAVAILABLE}
    if stay_up:
        assert health is grpc.StatusCode.OK
        process.terminate()
    else:
        assert health in (grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE)
    assert await asyncio.to_thread(server.wait, PATIENCE_S) == EXIT_DIED, server.tail()
    await until_gone(tree)
    assert "engine died" in server.log.read_text(errors="replace")


def refused_start(engine: str, flags: Sequence[str], env: Mapping[str, str]) -> str:
    """Start a server of tiny-llama that cannot start: exit status 1, and no process left. Returns its last words."""
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    command = [executable(engine, f"openengine-{engine}"), *cpu_env.flags(engine, cpu_env.TINY_LLAMA)]
    done = subprocess.run(
        [*command, "--host", "127.0.0.1", "--port", "0", *flags],
        env={**os.environ, **cpu_env.env(engine), **env},
        capture_output=True,
        text=True,
        check=False,
        timeout=START_S,
    )
    assert done.returncode == 1, done.stderr[-2000:]
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before
    last = done.stderr.splitlines()[-1]
    assert last.startswith("cannot start: "), done.stderr[-2000:]
    return last


async def until_gone(processes: list[psutil.Process]) -> None:
    """Wait until all of them have ended."""
    end = time.monotonic() + PATIENCE_S
    while left := [process for process in processes if alive(process)]:
        assert time.monotonic() < end, left
        await asyncio.sleep(0.1)


def alive(process: psutil.Process) -> bool:
    """Whether it still runs, or is stopped."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def out_of_memory(server: Server) -> Callable[[psutil.Process], Any]:
    """A blow that lets a process have no more memory than it has, and makes it need some."""

    async def strike(victim: psutil.Process) -> None:
        used = victim.memory_info().vms
        victim.rlimit(psutil.RLIMIT_AS, (used, used))
        greedy = request(98)
        greedy.token_ids.ids.extend(range(10, 900))
        greedy.response.CopyFrom(
            generate_pb2.ResponseOptions(
                return_prompt_logprobs=True, prompt_candidates=generate_pb2.CandidateTokenSelection(top_n=20)
            )
        )
        async with grpc.aio.insecure_channel(server.target) as channel:
            stub: Any = service_pb2_grpc.OpenEngineStub(channel)
            await code_of(stub.Generate(greedy))

    return strike
