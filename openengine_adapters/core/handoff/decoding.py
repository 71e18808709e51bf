"""A decode server's side of a session: from its admission to the first token (PD-02, PD-03)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable

from openengine.v1 import errors_pb2, kv_pb2
from openengine_adapters.core.errors import EngineDied, EngineFailure
from openengine_adapters.core.handoff.desk import Attachment, attach, transfer_failed
from openengine_adapters.engine import Step

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
            watch = _Watch(attachment, self._timeout, abort)
            steps: Stream | None = None
            self.waiting += 1
            waiting = True
            try:
                steps = await admit()
                watch.check(session)  # its abort may have come too early for the engine
                yield Step()
                async for step in steps:
                    if waiting and step.deltas:
                        watch.check(session)
                        watch.stop()
                        waiting = False
                        self.waiting -= 1
                        await attachment.done()
                    yield step
            except EngineDied:
                raise
            except EngineFailure as failure:
                if waiting and failure.code == errors_pb2.ERROR_CODE_INTERNAL:
                    reason = watch.reason or "the engine could not load the blocks"
                    raise transfer_failed(session, reason) from failure
                raise
            finally:
                self.waiting -= waiting
                await watch.close()
                if steps is not None:
                    if waiting:
                        with contextlib.suppress(EngineDied):
                            await abort()  # a stream that nobody read from ends nothing when it is closed
                    await steps.aclose()


class _Watch:
    """Aborts a request when there is nothing to wait for any more; `reason` says why, from that moment on.

    Whatever an engine brings after the session's end may be made of other blocks, so it must not be served.
    """

    def __init__(self, attachment: Attachment, timeout: float, abort: Callable[[], Awaitable[None]]) -> None:
        self.reason = ""
        self._attachment = attachment
        self._timeout = timeout
        self._abort = abort
        self._task = asyncio.create_task(self._run(), name="kv-transfer-watch")

    def check(self, session: kv_pb2.KvSessionRef) -> None:
        """Raise when there was nothing to wait for."""
        if self.reason:
            raise transfer_failed(session, self.reason)

    def stop(self) -> None:
        """The wait is over."""
        self._task.cancel()

    async def close(self) -> None:
        """Stop, and wait for an abort that is under way."""
        self.stop()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        reason = f"the blocks did not come within {self._timeout:g} s"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._timeout):
                if await self._attachment.ended():
                    await asyncio.Event().wait()  # all blocks are here: the token will come
                reason = "the prefill server is gone, or has ended the session"
        self.reason = reason
        with contextlib.suppress(EngineDied):
            await self._abort()


async def _fail(failure: EngineFailure) -> Stream:
    """The stream of a request that is accepted, and cannot be served."""
    for step in _NO_STEPS:
        yield step
    raise failure
