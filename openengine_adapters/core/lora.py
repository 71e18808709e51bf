"""LoRA adapters: the caller's ids, names and paths, and who is using them (LORA-01 … LORA-10).

An entry is in the table from the moment its load begins until its unload has ended, so that nothing can take its
id, name or path meanwhile. While a change is under way the entry is not settled: other changes of the same adapter
wait for the outcome, requests do not find it, and all other adapters are untouched. What the engine was asked to
do is always waited for, even when the caller has left, so that the table says what the engine has.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Coroutine

import grpc

from openengine.v1 import lora_pb2
from openengine_adapters.core.calls import patience
from openengine_adapters.core.errors import EngineDied, Rejected, invalid
from openengine_adapters.engine import HostsLora, Lora

log = logging.getLogger(__name__)

ANSWER_S = 0.2
"""Seconds before the caller's deadline at which an unload gives up, so that its answer still arrives (LORA-09)."""


class _Entry:
    """One adapter of the table. Only a settled one is there for requests; `loaded` says that the engine has it."""

    def __init__(self, lora: Lora, *, loaded: bool = False) -> None:
        self.lora = lora
        self.loaded = loaded
        self.users = 0
        self.settled = asyncio.Event()
        self.unused = asyncio.Event()
        self.unused.set()
        if loaded:
            self.settled.set()

    def acquire(self) -> None:
        self.users += 1
        self.unused.clear()

    def release(self) -> None:
        self.users -= 1
        if not self.users:
            self.unused.set()

    def resembles(self, other: Lora) -> bool:
        """Whether both claim the same id, name or directory."""
        lora = self.lora
        return lora.id == other.id or lora.name == other.name or _same_path(lora.path, other.path)

    def equals(self, other: Lora) -> bool:
        lora = self.lora
        return lora.id == other.id and lora.name == other.name and _same_path(lora.path, other.path)


class LoraRegistry:
    """The adapters of one engine. `host` None is an engine without LoRA (LORA-05)."""

    def __init__(self, host: HostsLora | None) -> None:
        self._host = host
        self._entries = {
            lora.name: _Entry(lora, loaded=True) for lora in (host.static_loras() if host else ())
        }
        self._changes: set[asyncio.Task[None]] = set()

    def loaded(self) -> list[Lora]:
        """The loaded adapters, by id (LORA-06). Raises `Rejected` without LoRA (LORA-05)."""
        self._require_host()
        return sorted((entry.lora for entry in self._entries.values() if entry.loaded), key=lambda o: o.id)

    @contextlib.asynccontextmanager
    async def use(self, name: str) -> AsyncIterator[Lora | None]:
        """Hold the adapter for one request; an empty name is no adapter. Raises `Rejected` (LORA-07)."""
        if not name:
            yield None
            return
        self._require_host()
        entry = self._entries.get(name)
        if entry is None or not entry.settled.is_set():
            raise _unknown(name)
        entry.acquire()
        try:
            yield entry.lora
        finally:
            entry.release()

    async def load(self, adapter: lora_pb2.LoraAdapter) -> tuple[Lora, bool]:
        """Load an adapter; True when the same one was loaded already (LORA-01 … LORA-03)."""
        host = self._require_host()
        lora = await _checked(adapter)
        while (other := self._resembling(lora)) is not None:
            if not other.settled.is_set():
                await other.settled.wait()
            elif other.equals(lora):
                return other.lora, True
            else:
                raise Rejected(
                    grpc.StatusCode.ALREADY_EXISTS,
                    f"adapter {other.lora.name!r} (id {other.lora.id}) has the same id, name or path; "
                    "unload it first, or choose others",
                    field="adapter",
                    value=lora.name,
                )
        entry = self._entries[lora.name] = _Entry(lora)
        await self._to_the_end(self._load(host, entry))
        return lora, False

    async def unload(self, name: str, timeout: float | None) -> Lora:
        """Unload once nobody uses the adapter (LORA-04); `timeout` seconds are the caller's (LORA-09)."""
        host = self._require_host()
        if not name:
            raise invalid("lora_name", "must not be empty")
        try:
            async with asyncio.timeout(patience(timeout, ANSWER_S)):
                entry = await self._claim_unused(host, name)
        except TimeoutError:
            raise self._busy(name) from None
        await self._to_the_end(self._unload(host, entry))
        return entry.lora

    async def _claim_unused(self, host: HostsLora, name: str) -> _Entry:
        """Close the adapter to requests and wait for those that hold it; gives up without a trace."""
        while (entry := self._entries.get(name)) is not None and not entry.settled.is_set():
            await entry.settled.wait()
        if entry is None:
            raise _unknown(name)
        entry.settled.clear()
        try:
            await entry.unused.wait()
            await host.lora_unused(entry.lora)
        except BaseException:
            entry.settled.set()
            raise
        return entry

    async def _load(self, host: HostsLora, entry: _Entry) -> None:
        try:
            await host.load_lora(entry.lora)
            entry.loaded = True
        finally:
            if not entry.loaded:
                del self._entries[entry.lora.name]
            entry.settled.set()

    async def _unload(self, host: HostsLora, entry: _Entry) -> None:
        try:
            await host.unload_lora(entry.lora)
            del self._entries[entry.lora.name]
        finally:
            entry.settled.set()

    async def _to_the_end(self, change: Coroutine[None, None, None]) -> None:
        """Run a change of the engine to its end, whether or not the caller stays to see it."""
        task = asyncio.create_task(change, name="lora-change")
        self._changes.add(task)
        task.add_done_callback(self._ended)
        try:
            await asyncio.shield(task)
        except EngineDied as death:
            raise Rejected(grpc.StatusCode.UNAVAILABLE, str(death)) from death

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._changes.discard(task)
        # Asking for the outcome also keeps asyncio from complaining when the caller had left.
        if not task.cancelled() and (error := task.exception()) is not None:
            log.info("a LoRA change failed: %s", error)

    def _resembling(self, lora: Lora) -> _Entry | None:
        return next((entry for entry in self._entries.values() if entry.resembles(lora)), None)

    def _busy(self, name: str) -> Rejected:
        entry = self._entries.get(name)
        users = entry.users if entry else 0
        return Rejected(
            grpc.StatusCode.FAILED_PRECONDITION,
            f"{users} requests still use {name!r}; wait for them, or abort them"
            if users
            else f"another change of {name!r} is still going on, or an open KV session uses it; try again",
            field="lora_name",
            value=name,
        )

    def _require_host(self) -> HostsLora:
        if self._host is None:
            raise Rejected(
                grpc.StatusCode.FAILED_PRECONDITION,
                "LoRA is not enabled on this server; start it with LoRA enabled",
            )
        return self._host


def _unknown(name: str) -> Rejected:
    return Rejected(
        grpc.StatusCode.NOT_FOUND, f"{name!r} is not loaded; load it first", field="lora_name", value=name
    )


def _same_path(one: str, other: str) -> bool:
    return os.path.normpath(one) == os.path.normpath(other)


async def _checked(adapter: lora_pb2.LoraAdapter) -> Lora:
    if adapter.lora_id <= 0:
        raise invalid("adapter.lora_id", "must be positive", limit=1, value=adapter.lora_id)
    if not adapter.lora_name:
        raise invalid("adapter.lora_name", "must not be empty")
    if not os.path.isabs(adapter.source_path):
        raise invalid("adapter.source_path", "must be an absolute directory that the server can read")
    # False for whatever is wrong with it; off the loop, because a network file system may take its time.
    if not await asyncio.to_thread(os.path.isdir, adapter.source_path):
        raise invalid("adapter.source_path", "is not a directory on the server's machine")
    return Lora(adapter.lora_id, adapter.lora_name, adapter.source_path)
