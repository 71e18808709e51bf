"""A decode server attaches to a session, and the session ends with that (PD-03, PD-04)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import pytest_asyncio

from openengine.v1 import errors_pb2, kv_pb2
from openengine_adapters.core.errors import EngineFailure, Rejected
from openengine_adapters.core.handoff.desk import Attachment, SessionDesk, attach
from openengine_adapters.core.handoff.sessions import Attach, End, SessionTable

PATIENCE_S = 30.0
HOUR_S = 3600.0
SESSION = kv_pb2.KvSessionRef(session_id="session")


class Prefill:
    """A prefill server without an engine: it notes what it freed."""

    def __init__(self, ttl: float = HOUR_S, attached_ttl: float = HOUR_S) -> None:
        self.freed: asyncio.Queue[tuple[str, End]] = asyncio.Queue()
        self.table: SessionTable[str] = SessionTable(ttl, self._free, attached_ttl)
        self.desk = SessionDesk(self.table)
        self.endpoint = kv_pb2.KvEndpoint(host="127.0.0.1")

    async def _free(self, held: str, how: End) -> None:
        self.freed.put_nowait((held, how))

    def open(self) -> None:
        self.table.open("session", "checksum", "call", "blocks")

    async def attach(self, checksum: str = "checksum") -> Attachment:
        return await attach(SESSION, self.endpoint, checksum)

    async def ended(self) -> End:
        async with asyncio.timeout(PATIENCE_S):
            held, how = await self.freed.get()
        assert held == "blocks"
        assert len(self.table) == 0
        return how


@pytest_asyncio.fixture
async def prefill() -> AsyncIterator[Prefill]:
    one = Prefill()
    one.endpoint.port = await one.desk.start("127.0.0.1")
    one.open()
    yield one
    await one.desk.stop()
    await one.table.close()


async def test_fetched_blocks_end_the_session(prefill: Prefill) -> None:
    async with await prefill.attach() as attachment:
        assert len(prefill.table) == 1
        await attachment.done()
        assert await prefill.ended() is End.FETCHED


async def test_a_decode_server_that_goes_away_ends_the_session(prefill: Prefill) -> None:
    async with await prefill.attach():
        pass
    assert await prefill.ended() is End.ABANDONED


async def test_an_abort_sends_the_decode_server_away(prefill: Prefill) -> None:
    async with await prefill.attach() as attachment:
        assert prefill.table.end("session", End.RELEASED)
        async with asyncio.timeout(PATIENCE_S):
            assert not await attachment.ended()
    assert await prefill.ended() is End.RELEASED


async def test_the_end_of_all_sessions_ends_those_that_are_attached_to(prefill: Prefill) -> None:
    """DRAIN-01: a drain that may abort is over with none open."""
    async with await prefill.attach() as attachment:
        prefill.table.end_all()
        async with asyncio.timeout(PATIENCE_S):
            assert not await attachment.ended()
    assert await prefill.ended() is End.RELEASED


async def test_an_engine_that_is_done_says_so(prefill: Prefill) -> None:
    async with await prefill.attach() as attachment:
        prefill.table.end("session", End.FETCHED)
        async with asyncio.timeout(PATIENCE_S):
            assert await attachment.ended()


async def test_a_lost_prefill_server_shows(prefill: Prefill) -> None:
    async with await prefill.attach() as attachment:
        await prefill.desk.stop()
        async with asyncio.timeout(PATIENCE_S):
            assert not await attachment.ended()


async def test_a_session_is_attached_to_once(prefill: Prefill) -> None:
    async with await prefill.attach():
        with pytest.raises(EngineFailure, match="another decode server") as caught:
            await prefill.attach()
        assert caught.value.code == errors_pb2.ERROR_CODE_KV_SESSION_NOT_FOUND
        assert len(prefill.table) == 1


async def test_an_unknown_session_is_not_found(prefill: Prefill) -> None:
    prefill.table.end("session", End.RELEASED)
    with pytest.raises(EngineFailure) as caught:
        await prefill.attach()
    assert caught.value.code == errors_pb2.ERROR_CODE_KV_SESSION_NOT_FOUND


async def test_another_checksum_is_a_changed_session(prefill: Prefill) -> None:
    with pytest.raises(Rejected, match=r"kv\.session: is not what"):
        await prefill.attach("other")
    assert len(prefill.table) == 1


async def test_nobody_at_the_desk_is_a_failed_transfer(prefill: Prefill) -> None:
    await prefill.desk.stop()
    with pytest.raises(EngineFailure) as caught:
        await prefill.attach()
    assert caught.value.code == errors_pb2.ERROR_CODE_KV_TRANSFER_FAILED
    assert caught.value.retryable


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"\n",
        b"nonsense\n",
        b"[]\n",
        b"{}\n",
        b"x" * 5000 + b"\n",
        b"\xff\xfe\n",
        b"null\n",
        b"[" * 1000 + b"\n",
    ],
)
async def test_nonsense_is_sent_away(prefill: Prefill, line: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", prefill.endpoint.port)
    writer.write(line)
    writer.write_eof()
    async with asyncio.timeout(PATIENCE_S):
        answer = await reader.read()
    writer.close()
    assert answer == b"" or json.loads(answer) == {"answer": "gone"}
    async with await prefill.attach():
        pass


async def test_a_session_that_nobody_attaches_to_expires() -> None:
    one = Prefill(ttl=0.01)
    one.open()
    assert await one.ended() is End.EXPIRED


async def test_an_attached_session_does_not_expire() -> None:
    one = Prefill(ttl=0.01)
    one.open()
    assert await one.table.attach("session", "checksum", lambda how: None) is Attach.ATTACHED
    one.table.open("other", "checksum", "other-call", "blocks")
    assert await asyncio.wait_for(one.freed.get(), PATIENCE_S) == ("blocks", End.EXPIRED)
    assert len(one.table) == 1
    await one.table.close()


async def nobody_gets_the_session(prefill: Prefill, on_attach: Callable[[str], Awaitable[bool]]) -> None:
    """With an engine that answers so, the first decode server that asks ends the session."""
    prefill.table.on_attach = on_attach
    with pytest.raises(EngineFailure) as caught:
        await prefill.attach()
    assert caught.value.code == errors_pb2.ERROR_CODE_KV_SESSION_NOT_FOUND
    assert await prefill.ended() is End.EXPIRED


async def test_an_engine_without_the_blocks_has_no_session_for_anybody(prefill: Prefill) -> None:
    """Its own lease may be over before ours."""

    async def gone(held: str) -> bool:
        assert held == "blocks"
        return False

    await nobody_gets_the_session(prefill, gone)


async def test_an_engine_that_cannot_be_asked_has_no_session_either(prefill: Prefill) -> None:
    async def broken(held: str) -> bool:
        raise RuntimeError("no answer")

    await nobody_gets_the_session(prefill, broken)


async def test_a_session_that_ends_while_the_engine_is_asked_is_gone(prefill: Prefill) -> None:
    async def aborted(held: str) -> bool:
        with pytest.raises(EngineFailure, match="another decode server"):
            await prefill.attach()
        prefill.table.end("session", End.RELEASED)
        return True

    prefill.table.on_attach = aborted
    with pytest.raises(EngineFailure, match="does not hold") as caught:
        await prefill.attach()
    assert caught.value.code == errors_pb2.ERROR_CODE_KV_SESSION_NOT_FOUND
    assert await prefill.ended() is End.RELEASED


async def test_a_decode_server_that_stays_for_ever_is_sent_away() -> None:
    """One that stands still keeps its connection."""
    one = Prefill(attached_ttl=0.01)
    one.endpoint.port = await one.desk.start("127.0.0.1")
    one.open()
    async with await one.attach() as attachment:
        assert await one.ended() is End.EXPIRED
        assert not await attachment.ended()
    await one.desk.stop()


async def test_a_caller_that_stops_waiting_does_not_stop_the_end() -> None:
    """An Abort that its client cancels has ended the session all the same (PD-04)."""
    begun, go_on = asyncio.Event(), asyncio.Event()
    freed = asyncio.Event()

    async def free(held: None, how: End) -> None:
        begun.set()
        await go_on.wait()
        freed.set()

    table: SessionTable[None] = SessionTable(HOUR_S, free, HOUR_S)
    table.open("session", "checksum", "call", None)
    table.end("session", End.RELEASED)
    waiting = asyncio.create_task(table.settled())
    async with asyncio.timeout(PATIENCE_S):
        await begun.wait()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    go_on.set()
    async with asyncio.timeout(PATIENCE_S):
        await freed.wait()


async def test_a_client_that_never_learnt_of_it_ends_the_session(prefill: Prefill) -> None:
    prefill.table.end_call("another call")
    assert len(prefill.table) == 1
    prefill.table.end_call("call")
    assert await prefill.ended() is End.RELEASED


async def test_an_ended_session_is_told_from_an_unknown_one(prefill: Prefill) -> None:
    assert prefill.table.end("unknown", End.RELEASED) is None
    assert prefill.table.end("session", End.RELEASED) is True
    assert prefill.table.end("session", End.RELEASED) is False
