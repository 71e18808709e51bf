"""A prefill and a decode server on the tiny Llama, and short words for asking both."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
import psutil
import pytest

from openengine.v1 import errors_pb2, generate_pb2, kv_pb2, lifecycle_pb2, observability_pb2
from tests.support import cpu_env, remote
from tests.support.pairs import Side
from tests.support.server import REPOSITORY, Server, executable
from tests.support.wire import PATIENCE_S, Answer, Wire

FIRST, OTHER, LENGTH = 1000, 3000, 201
PROMPT = [*range(FIRST, FIRST + LENGTH)]
TOKENS = 8
FLOAT32 = ["--dtype", "float32"]
"""So that the pair's numbers are those of Transformers."""

Asked = str | list[int]

SCORED = generate_pb2.ResponseOptions(return_output_logprobs=True)


def expected(engine: str, first: int = FIRST) -> list[tuple[int, float]]:
    """The model's own greedy answer to `prompt(first)` with its log-probabilities, from Transformers in float32.

    The tiny model likes to repeat its last token, so that tokens alone would prove little.
    """
    return _expected(engine)[first]


@functools.cache
def _expected(engine: str) -> dict[int, list[tuple[int, float]]]:
    asked = {"prompts": [prompt(first) for first in (FIRST, OTHER)], "tokens": TOKENS, "adapters": {}}
    done = subprocess.run(
        [executable(engine, "python"), "-m", "tests.support.peft_reference"],
        input=json.dumps(asked),
        env={**os.environ, **cpu_env.env(engine)},
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=PATIENCE_S,
    )
    answers = [[(token, logprob) for token, logprob in one] for one in json.loads(done.stdout)[""]]
    assert abs(answers[0][0][1] - answers[1][0][1]) > 0.01  # the prompt's beginning shows at its end
    return dict(zip((FIRST, OTHER), answers, strict=True))


def prompt(first: int) -> list[int]:
    """A prompt of which all but the last token differs from `PROMPT`."""
    return [*range(first, first + LENGTH - 1), PROMPT[-1]]


def check(engine: str, answer: Answer, first: int = FIRST) -> None:
    """The answer is the model's own, in its tokens and in its numbers."""
    found = answer.first.tokens
    assert [token.token_id for token in found] == [token for token, _ in expected(engine, first)]
    assert [token.logprob for token in found] == pytest.approx(
        [logprob for _, logprob in expected(engine, first)], abs=1e-3
    )


@dataclass
class Pair:
    """A prefill and a decode server."""

    prefill: Wire
    decode: Wire
    prefill_server: Server
    decode_server: Server

    async def session(self, prompt: Asked = PROMPT, **fields: Any) -> kv_pb2.KvSessionRef:
        """Prefill a prompt."""
        answer = await self.prefill.generate(prompt, **fields)
        (ready,) = answer.responses
        assert ready.WhichOneof("event") == "prefill_ready", ready
        return ready.prefill_ready.kv_session

    async def decoded(self, session: kv_pb2.KvSessionRef, prompt: Asked = PROMPT, **fields: Any) -> Answer:
        """Send the session, as it is, to the decode server."""
        fields.setdefault("kv", generate_pb2.KvOptions(session=session))
        return await self.decode.generate(prompt, max_tokens=TOKENS, **fields)

    async def handed_over(self, prompt: Asked = PROMPT, *, both: bool = False, **fields: Any) -> Answer:
        """One request through both servers, with the log-probabilities of its answer.

        `both` asks for those of the prefill server too, as an engine needs that draws the first token there.
        """
        session = await self.session(prompt, **fields, **({"response": SCORED} if both else {}))
        return await self.decoded(session, prompt, response=SCORED, **fields)

    async def abort(self, session: kv_pb2.KvSessionRef) -> int:
        request = lifecycle_pb2.AbortRequest(kv_session=session)
        answer = await self.prefill.stub.Abort(request, timeout=PATIENCE_S)
        return int(answer.status)

    async def load(self) -> observability_pb2.LoadInfo:
        """The load of the prefill server."""
        request = observability_pb2.GetLoadRequest()
        info: observability_pb2.LoadInfo = await self.prefill.stub.GetLoad(request, timeout=PATIENCE_S)
        return info

    async def open_sessions(self) -> int:
        """Open sessions of the prefill server."""
        return int((await self.load()).active_kv_sessions)

    async def until_free(self) -> None:
        """Wait until the prefill server holds neither sessions nor blocks."""
        async with asyncio.timeout(PATIENCE_S):
            while (info := await self.load()).active_kv_sessions or info.used_kv_blocks:
                await asyncio.sleep(0.1)


def stand_still(server: Server) -> list[psutil.Process]:
    """Stop the engine's processes, so that a hand-over comes no further than to the server's own; return them."""
    children = psutil.Process(server.pid).children(recursive=True)
    for child in children:
        child.suspend()
    return children


def kill(server: Server, children: list[psutil.Process]) -> None:
    """Kill a server without a warning, and its engine's processes."""
    os.kill(server.pid, signal.SIGKILL)
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):  # some die with their parent
            child.kill()


async def a_killed_decode_server_costs_nothing(pair: Pair, **fields: Any) -> None:
    """In the middle of a hand-over; the prefill server frees what it held, and goes on (PD-04). The pair's last act."""
    await pair.until_free()
    session = await pair.session(prompt(OTHER), **fields)
    children = stand_still(pair.decode_server)
    call = await pair.decode.accepted(prompt(OTHER), kv=generate_pb2.KvOptions(session=session))
    assert await pair.open_sessions() == 1
    kill(pair.decode_server, children)
    with pytest.raises(grpc.aio.AioRpcError):
        async for _ in call:
            pass
    await pair.until_free()
    assert await pair.abort(session) == lifecycle_pb2.ABORT_STATUS_ALREADY_FINISHED
    again = await pair.session(**fields)
    assert await pair.open_sessions() == 1
    assert await pair.abort(again) == lifecycle_pb2.ABORT_STATUS_ABORTED
    await pair.until_free()


async def a_killed_prefill_server_fails_the_transfer(pair: Pair, asked: Asked, **fields: Any) -> None:
    """In the middle of a hand-over; the decode server says so, and goes on (PD-03). The pair's last act."""
    session = await pair.session(asked, **fields)
    engine = stand_still(pair.decode_server)
    call = await pair.decode.accepted(asked, kv=generate_pb2.KvOptions(session=session), **fields)
    kill(pair.prefill_server, psutil.Process(pair.prefill_server.pid).children(recursive=True))
    for process in engine:
        process.resume()
    async with asyncio.timeout(PATIENCE_S):
        (*_, last) = [response async for response in call]
    assert (last.error.code, last.error.retryable) == (errors_pb2.ERROR_CODE_KV_TRANSFER_FAILED, True)
    again = await pair.decoded(session, asked, **fields)
    assert again.responses[-1].error.code == errors_pb2.ERROR_CODE_KV_TRANSFER_FAILED
    health = await pair.decode.stub.Health(lifecycle_pb2.HealthRequest())
    assert health.state == lifecycle_pb2.HEALTH_STATE_READY


@contextlib.asynccontextmanager
async def started(engine: str, *sides: Side, model: str = cpu_env.TINY_LLAMA) -> AsyncIterator[Pair]:
    """A prefill and a decode server, started at the same time."""
    servers = [remote.server(engine, model, flags, env) for flags, env in sides]
    with remote.running(*servers):
        async with remote.client(servers[0].target) as one, remote.client(servers[1].target) as other:
            yield Pair(one, other, *servers)
