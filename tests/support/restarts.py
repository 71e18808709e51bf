"""A rolling restart under load: two replicas, clients that reconnect, and no accepted request lost (DRAIN-05)."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import grpc

from openengine.v1 import generate_pb2, inputs_pb2, service_pb2_grpc
from tests.support.server import Server

PATIENCE_S: Final = 180.0
RETRY_S: Final = 0.02

NEVER_SENT: Final = ("failed to connect", "connection refused", "connect: ")
"""How gRPC says that a call found nobody to send it to."""

DRAINING: Final = "draining"

CLOSED: Final = ("socket closed", "broken pipe")
"""How gRPC says that the server had ended the connection in an orderly way: a write after that is a broken pipe, and a
connection that was cut is a reset one."""

STARTING: Final = "the engine is starting"

# Without a pause between attempts a replica that is back would be found late.
_CHANNEL_OPTIONS: Final = [
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 200),
]


@dataclass
class Tally:
    """What the clients saw: whole answers, refusals by kind, and what must not be."""

    finished: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)


class Load:
    """Clients that ask one replica and, when it refuses, the other, until they are stopped."""

    def __init__(
        self, replicas: Sequence[Server], model: str, max_tokens: int, clients: int, pause: float
    ) -> None:
        self.tally = Tally()
        self._count = clients
        self._pause = pause
        self._model = model
        self._max_tokens = max_tokens
        self._replicas = replicas
        self._stopped = asyncio.Event()
        self._numbers = itertools.count()

    async def __aenter__(self) -> Load:
        self._channels = [
            grpc.aio.insecure_channel(one.target, options=_CHANNEL_OPTIONS) for one in self._replicas
        ]
        self._stubs: list[Any] = [service_pb2_grpc.OpenEngineStub(channel) for channel in self._channels]
        self._clients = [asyncio.create_task(self._client(number)) for number in range(self._count)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stopped.set()
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*self._clients)
        for channel in self._channels:
            await channel.close()

    async def more_finished(self) -> None:
        """Wait until as many requests more have ended well as there are clients."""
        goal = self.tally.finished + self._count
        async with asyncio.timeout(PATIENCE_S):
            while self.tally.finished < goal:
                assert not self.tally.lost, self.tally
                await asyncio.sleep(0.01)

    async def _client(self, number: int) -> None:
        chance = random.Random(number)
        while not self._stopped.is_set():
            tokens = chance.randint(1, self._max_tokens)
            first = chance.randrange(len(self._stubs))
            for attempt in itertools.count(first):
                if await self._ask(self._stubs[attempt % len(self._stubs)], tokens):
                    break
                await asyncio.sleep(RETRY_S)
            await asyncio.sleep(self._pause)

    async def _ask(self, stub: Any, tokens: int) -> bool:
        """One request; False when it was refused, so that it is asked again elsewhere."""
        call = stub.Generate(
            generate_pb2.GenerateRequest(
                request_id=f"restart-{next(self._numbers)}",
                model=self._model,
                token_ids=inputs_pb2.TokenIds(ids=[5, 6, 7]),
                stopping=generate_pb2.StoppingOptions(max_tokens=tokens, ignore_eos=True),
            ),
            timeout=PATIENCE_S,
        )
        last: generate_pb2.GenerateResponse | None = None
        try:
            async for response in call:
                last = response
        except grpc.aio.AioRpcError as error:
            kind = _refusal(error)
            if last is not None or not kind:
                self.tally.lost.append(f"after {last}: {error.code()}: {error.details()}")
            self.tally.refused[kind] += 1
            return False
        if last is None or last.usage.completion_tokens != tokens:
            self.tally.lost.append(f"ended with {last}")
        self.tally.finished += 1
        return True


def _refusal(error: grpc.aio.AioRpcError) -> str:
    """The kind of an orderly refusal; empty for all else, a reset connection among it."""
    details = (error.details() or "").lower()
    if error.code() is not grpc.StatusCode.UNAVAILABLE:
        return ""
    for words in (DRAINING, *CLOSED, STARTING):
        if words in details:
            return words
    return "never sent" if any(words in details for words in NEVER_SENT) else ""


async def restart(replica: Server) -> None:
    """End a replica with SIGTERM, which must end it well, and start it again."""
    status = await asyncio.to_thread(replica.stop, PATIENCE_S)
    assert status == 0, replica.tail()
    replica.start()
    await asyncio.to_thread(replica.wait_ready)


@contextlib.contextmanager
def stopping(replicas: Sequence[Server]) -> Any:
    """End the replicas whatever happens."""
    try:
        yield
    finally:
        for replica in replicas:
            replica.stop(grace=30)


async def rolling(
    replicas: Sequence[Server],
    model: str,
    *,
    rounds: int,
    max_tokens: int,
    clients: int,
    pause: float = 0,
) -> Tally:
    """Restart each replica in turn, `rounds` times, while clients ask; returns what they saw.

    Each client waits `pause` seconds between its requests.
    """
    async with Load(replicas, model, max_tokens, clients, pause) as load:
        for _ in range(rounds):
            for replica in replicas:
                await load.more_finished()
                await restart(replica)
        await load.more_finished()
    return load.tally
