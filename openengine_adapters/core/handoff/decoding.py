"""A decode server's side of a session: from its admission to the first token (PD-02, PD-03)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable

from openengine.v1 import errors_pb2, kv_pb2
from openengine_adapters.core.errors import EngineDied, EngineFailure
from openengine_adapters.core.handoff.desk import Attachment, attach, transfer_failed
from openengine_adapters.engine import Step

LOST_GRACE_S = 10.0
"""How long an engine may take to notice by itself that the prefill server is gone."""

Stream = AsyncGenerator[Step, None]
_NO_STEPS: tuple[Step, ...] = ()


class Decoding:
    """The requests of a decode server that wait for their blocks; `waiting` tells how many.

    One that has no token `timeout` seconds after its admission fails: an engine may wait for ever.
    """

    def __init__(self, timeout: float) -> None:
        self.waiting = 0
        self._timeout = timeout

    async def serve(
        self,
        session: kv_pb2.KvSessionRef,
        desk: kv_pb2.KvEndpoint,
        checksum: str,
        admit: Callable[[], Awaitable[Stream]],
        abort: Callable[[], Awaitable[None]],
    ) -> Stream:
        """Attach to the session, admit the request with `admit`, and return its stream.

        What the session lacks fails the accepted request. Raises `Rejected` for one that was changed, and what
        `admit` raises.
        """
        stream = self._stream(session, desk, checksum, admit, abort)
        try:
            await anext(stream)  # up to the admission, so that closing the stream frees what it holds
        except EngineDied:
            raise
        except EngineFailure as failure:
            return _fail(failure)
        return stream

    async def _stream(
        self,
        session: kv_pb2.KvSessionRef,
        desk: kv_pb2.KvEndpoint,
        checksum: str,
        admit: Callable[[], Awaitable[Stream]],
        abort: Callable[[], Awaitable[None]],
    ) -> Stream:
        async with await attach(session, desk, checksum) as attachment:
            watch = asyncio.create_task(self._give_up(attachment, abort), name="kv-transfer-watch")
            steps: Stream | None = None
            self.waiting += 1
            waiting = True
            try:
                steps = await admit()
                yield Step()
                async for step in steps:
                    if waiting and step.deltas:
                        if watch.done():
                            raise transfer_failed(session, watch.result())
                        waiting = False
                        self.waiting -= 1
                        watch.cancel()
                        await attachment.done()
                    yield step
            except EngineDied:
                raise
            except EngineFailure as failure:
                if waiting and failure.code == errors_pb2.ERROR_CODE_INTERNAL:
                    raise transfer_failed(session, "the engine could not load the blocks") from failure
                raise
            finally:
                self.waiting -= waiting
                watch.cancel()
                await asyncio.gather(watch, return_exceptions=True)
                if steps is not None:
                    await steps.aclose()

    async def _give_up(self, attachment: Attachment, abort: Callable[[], Awaitable[None]]) -> str:
        """Abort the request when there is nothing to wait for any more, and say why."""
        reason = f"the blocks did not come within {self._timeout:g} s"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._timeout):
                await attachment.lost()
                reason = "the prefill server is gone, or has ended the session"
                await asyncio.sleep(LOST_GRACE_S)
        with contextlib.suppress(EngineDied):
            await abort()
        return reason


async def _fail(failure: EngineFailure) -> Stream:
    """The stream of a request that is accepted, and cannot be served."""
    for step in _NO_STEPS:
        yield step
    raise failure
