"""A decode server's request holds its session until the first token, and fails with the transfer (PD-03, PD-04)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from openengine.v1 import discovery_pb2, errors_pb2, kv_pb2, model_pb2
from openengine_adapters.core.errors import EngineDied, EngineFailure, Rejected, invalid
from openengine_adapters.core.handoff.decoding import Decoding, Stream
from openengine_adapters.core.handoff.desk import SessionDesk
from openengine_adapters.core.handoff.roles import in_role
from openengine_adapters.core.handoff.sessions import End, SessionTable
from openengine_adapters.engine import (
    Delta,
    EngineDescription,
    Finish,
    FinishKind,
    GenerationSupport,
    KvConnector,
    LogprobSupport,
    Step,
)

PATIENCE_S = 30.0
SESSION = kv_pb2.KvSessionRef(session_id="session")
TOKEN = Step(deltas=[Delta(0, [1], "a")])
LAST = Step(deltas=[Delta(0, [2], "b", finish=Finish(FinishKind.LENGTH))])
FAILED = errors_pb2.ERROR_CODE_KV_TRANSFER_FAILED


class Engine:
    """A decode engine whose steps come when the test says so."""

    def __init__(self) -> None:
        self.steps: asyncio.Queue[Step | Exception | None] = asyncio.Queue()
        self.closed = False
        self.refusal: Exception | None = None
        self.aborted = asyncio.Event()
        self.deaf = False

    async def admit(self) -> Stream:
        if self.refusal is not None:
            raise self.refusal
        return self.begin()

    async def begin(self) -> Stream:
        try:
            while (step := await self.steps.get()) is not None:
                if isinstance(step, Exception):
                    raise step
                yield step
        finally:
            self.closed = True

    async def abort(self) -> None:
        self.aborted.set()
        if self.deaf:
            return
        cancelled = Finish(FinishKind.CANCELLED)
        self.steps.put_nowait(Step(deltas=[Delta(0, [], "", finish=cancelled)]))


class Pair:
    """A prefill server's desk with one session, and a decode server with one engine."""

    def __init__(self) -> None:
        self.ends: asyncio.Queue[End] = asyncio.Queue()
        self.table: SessionTable[None] = SessionTable(3600, self._ended, 3600)
        self.desk = SessionDesk(self.table)
        self.endpoint = kv_pb2.KvEndpoint(host="127.0.0.1")
        self.engine = Engine()
        self.decoding = Decoding(timeout=3600)

    async def _ended(self, held: None, how: End) -> None:
        self.ends.put_nowait(how)

    async def serve(self, checksum: str = "checksum") -> Stream:
        return await self.decoding.serve(
            SESSION, self.endpoint, checksum, self.engine.admit, self.engine.abort
        )

    async def ended(self) -> End:
        async with asyncio.timeout(PATIENCE_S):
            return await self.ends.get()


@pytest_asyncio.fixture
async def pair() -> AsyncIterator[Pair]:
    one = Pair()
    one.endpoint.port = await one.desk.start("127.0.0.1")
    one.table.open("session", "checksum", "call", None)
    yield one
    await one.desk.stop()
    await one.table.close()


async def following(stream: Stream) -> Step:
    async with asyncio.timeout(PATIENCE_S):
        return await anext(stream)


async def test_the_session_goes_with_the_first_token(pair: Pair) -> None:
    stream = await pair.serve()
    assert pair.decoding.waiting == 1
    pair.engine.steps.put_nowait(Step())
    await following(stream)
    assert len(pair.table) == 1
    for step in (TOKEN, LAST, None):
        pair.engine.steps.put_nowait(step)
    assert await following(stream) is TOKEN
    assert await pair.ended() is End.FETCHED
    assert pair.decoding.waiting == 0
    assert [step async for step in stream] == [LAST]


async def test_a_caller_that_leaves_before_gives_it_up(pair: Pair) -> None:
    stream = await pair.serve()
    await stream.aclose()
    assert await pair.ended() is End.ABANDONED
    assert pair.decoding.waiting == 0


async def test_a_refusal_gives_it_up(pair: Pair) -> None:
    pair.engine.refusal = invalid("sampling.top_p", "is wrong")
    with pytest.raises(Rejected, match=r"sampling\.top_p"):
        await pair.serve()
    assert await pair.ended() is End.ABANDONED
    assert pair.decoding.waiting == 0


async def test_a_session_that_is_gone_fails_the_accepted_request(pair: Pair) -> None:
    pair.table.end("session", End.RELEASED)
    stream = await pair.serve()
    with pytest.raises(EngineFailure) as caught:
        await following(stream)
    assert caught.value.code == errors_pb2.ERROR_CODE_KV_SESSION_NOT_FOUND


async def test_a_changed_session_is_refused(pair: Pair) -> None:
    with pytest.raises(Rejected, match=r"kv\.session"):
        await pair.serve("another checksum")


async def test_a_failure_before_the_first_token_is_the_transfer_s(pair: Pair) -> None:
    stream = await pair.serve()
    pair.engine.steps.put_nowait(EngineFailure("no blocks"))
    with pytest.raises(EngineFailure) as caught:
        await following(stream)
    assert (caught.value.code, caught.value.retryable) == (FAILED, True)
    assert await pair.ended() is End.ABANDONED
    assert pair.engine.closed


@pytest.mark.parametrize("death", [EngineDied(), EngineFailure("late")])
async def test_any_other_failure_stays_what_it_is(pair: Pair, death: EngineFailure) -> None:
    stream = await pair.serve()
    if not isinstance(death, EngineDied):
        pair.engine.steps.put_nowait(TOKEN)
        await following(stream)
    pair.engine.steps.put_nowait(death)
    with pytest.raises(EngineFailure) as caught:
        await following(stream)
    assert caught.value is death


async def test_a_lost_prefill_server_ends_the_wait(pair: Pair) -> None:
    stream = await pair.serve()
    await pair.desk.stop()
    with pytest.raises(EngineFailure, match="the prefill server is gone") as caught:
        await following(stream)
    assert caught.value.code == FAILED
    assert pair.engine.closed


@pytest.mark.parametrize("how", [End.RELEASED, End.EXPIRED])
async def test_tokens_from_blocks_that_were_freed_are_not_served(pair: Pair, how: End) -> None:
    """The engine reads on, whoever has the blocks now; so what it brings after the session's end counts for nothing."""
    stream = await pair.serve()
    pair.engine.deaf = True
    pair.table.end("session", how)
    async with asyncio.timeout(PATIENCE_S):
        await pair.engine.aborted.wait()
    pair.engine.steps.put_nowait(TOKEN)
    with pytest.raises(EngineFailure, match="has ended the session") as caught:
        await following(stream)
    assert (caught.value.code, caught.value.retryable) == (FAILED, True)
    assert pair.engine.closed


async def test_a_prefill_engine_may_be_done_before_the_first_token(pair: Pair) -> None:
    stream = await pair.serve()
    pair.table.end("session", End.FETCHED)
    assert await pair.ended() is End.FETCHED
    pair.engine.steps.put_nowait(TOKEN)
    assert await following(stream) is TOKEN
    assert not pair.engine.aborted.is_set()


async def test_a_session_that_ends_during_the_admission_fails_it(pair: Pair) -> None:
    """The abort comes before the engine knows of the request, and so it does nothing."""

    async def slow() -> Stream:
        pair.table.end("session", End.RELEASED)
        async with asyncio.timeout(PATIENCE_S):
            await pair.engine.aborted.wait()
        pair.engine.aborted.clear()
        return pair.engine.begin()

    pair.engine.deaf = True
    stream = await pair.decoding.serve(SESSION, pair.endpoint, "checksum", slow, pair.engine.abort)
    with pytest.raises(EngineFailure, match="has ended the session"):
        await following(stream)
    assert pair.decoding.waiting == 0
    assert pair.engine.aborted.is_set()


async def test_blocks_that_do_not_come_end_the_wait(pair: Pair) -> None:
    pair.decoding = Decoding(timeout=0.05)
    stream = await pair.serve()
    with pytest.raises(EngineFailure, match=r"did not come within 0\.05 s") as caught:
        await following(stream)
    assert (caught.value.code, caught.value.retryable) == (FAILED, True)
    assert await pair.ended() is End.ABANDONED


async def test_a_prefill_server_lost_after_the_first_token_does_not_matter(pair: Pair) -> None:
    stream = await pair.serve()
    pair.engine.steps.put_nowait(TOKEN)
    await following(stream)
    await pair.desk.stop()
    pair.engine.steps.put_nowait(LAST)
    assert await following(stream) is LAST
    with contextlib.suppress(StopAsyncIteration):
        pair.engine.steps.put_nowait(None)
        await following(stream)


def described() -> EngineDescription:
    modes = frozenset({model_pb2.GUIDED_DECODING_MODE_REGEX})
    support = GenerationSupport(
        prompt_logprobs=LogprobSupport(),
        output_logprobs=LogprobSupport(),
        guided_modes=modes,
        max_num_sequences=4,
    )
    return EngineDescription(
        engine_name="x", engine_version="1", model_id="m", vocab_size=10, generation=support
    )


@pytest.mark.parametrize(
    ("role", "samples", "prompt", "output"),
    [
        (discovery_pb2.ENGINE_ROLE_PREFILL, False, True, False),
        (discovery_pb2.ENGINE_ROLE_PREFILL, True, False, True),
        (discovery_pb2.ENGINE_ROLE_DECODE, False, False, True),
    ],
)
def test_a_role_offers_what_its_side_computes(role: int, samples: bool, prompt: bool, output: bool) -> None:
    known = discovery_pb2.EngineRole.ValueType(role)
    found = in_role(described(), known, KvConnector(enabled=True), prefill_samples=samples)
    assert (found.role, found.kv_connector.enabled) == (role, True)
    support = found.generation
    assert support is not None
    assert support.max_num_sequences == 1
    assert (support.prompt_logprobs is not None, support.output_logprobs is not None) == (prompt, output)
    assert bool(support.guided_modes) == output
