"""LoRA adapters: the caller's ids, names and paths, and who is using them (LORA-01 … LORA-10)."""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
from collections import Counter
from collections.abc import AsyncIterator

import grpc

from openengine.v1 import lora_pb2
from openengine_adapters.core.errors import Rejected, invalid
from openengine_adapters.engine import HostsLora, Lora


class LoraRegistry:
    """The loaded adapters of one engine. `host` None is an engine without LoRA (LORA-05)."""

    def __init__(self, host: HostsLora | None) -> None:
        self._host = host
        self._loaded: dict[str, Lora] = {lora.name: lora for lora in (host.static_loras() if host else ())}
        self._users: Counter[str] = Counter()
        self._changed = asyncio.Condition()
        self._unloading: set[str] = set()
        # One change at a time: an id, a name and a path may each conflict with any other adapter's.
        self._change = asyncio.Lock()

    def loaded(self) -> list[Lora]:
        """The loaded adapters, by id (LORA-06). Raises `Rejected` without LoRA (LORA-05)."""
        self._require_host()
        return sorted(self._loaded.values(), key=lambda lora: lora.id)

    @contextlib.asynccontextmanager
    async def use(self, name: str) -> AsyncIterator[Lora | None]:
        """Hold the adapter for one request; an empty name is no adapter. Raises `Rejected` (LORA-07)."""
        if not name:
            yield None
            return
        self._require_host()
        lora = self._loaded.get(name)
        if lora is None or name in self._unloading:
            raise Rejected(
                grpc.StatusCode.NOT_FOUND,
                f"{name!r} is not loaded; load it first",
                field="lora_name",
                value=name,
            )
        self._users[name] += 1
        try:
            yield lora
        finally:
            self._users[name] -= 1
            async with self._changed:
                self._changed.notify_all()

    async def load(self, adapter: lora_pb2.LoraAdapter) -> tuple[Lora, bool]:
        """Load an adapter; True when the same one was loaded already (LORA-01 … LORA-03)."""
        host = self._require_host()
        lora = _checked(adapter)
        async with self._change:
            for loaded in self._loaded.values():
                if loaded == lora:
                    return loaded, True
                if loaded.id == lora.id or loaded.name == lora.name or loaded.path == lora.path:
                    raise Rejected(
                        grpc.StatusCode.ALREADY_EXISTS,
                        f"adapter {loaded.name!r} (id {loaded.id}) has the same id, name or path; "
                        "unload it first, or choose others",
                        field="adapter",
                        value=lora.name,
                    )
            await host.load_lora(lora)
            self._loaded[lora.name] = lora
        return lora, False

    async def unload(self, name: str, timeout: float | None) -> Lora:
        """Unload once nobody uses the adapter; waits at most `timeout` seconds (LORA-04, LORA-09)."""
        host = self._require_host()
        if not name:
            raise invalid("lora_name", "must not be empty")
        async with self._change:
            lora = self._loaded.get(name)
            if lora is None:
                raise Rejected(
                    grpc.StatusCode.NOT_FOUND, f"{name!r} is not loaded", field="lora_name", value=name
                )
            self._unloading.add(name)
            try:
                await self._wait_unused(name, timeout)
                await host.unload_lora(lora)
                del self._loaded[name]
            finally:
                self._unloading.discard(name)
        return lora

    async def _wait_unused(self, name: str, timeout: float | None) -> None:
        try:
            async with asyncio.timeout(timeout), self._changed:
                await self._changed.wait_for(lambda: not self._users[name])
        except TimeoutError:
            raise Rejected(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"{self._users[name]} requests still use {name!r}; wait for them, or abort them",
                field="lora_name",
                value=name,
            ) from None

    def _require_host(self) -> HostsLora:
        if self._host is None:
            raise Rejected(
                grpc.StatusCode.FAILED_PRECONDITION,
                "LoRA is not enabled on this server; start it with LoRA enabled",
            )
        return self._host


def _checked(adapter: lora_pb2.LoraAdapter) -> Lora:
    if adapter.lora_id <= 0:
        raise invalid("adapter.lora_id", "must be positive", limit=1, value=adapter.lora_id)
    if not adapter.lora_name:
        raise invalid("adapter.lora_name", "must not be empty")
    path = pathlib.Path(adapter.source_path)
    if not path.is_absolute():
        raise invalid("adapter.source_path", "must be an absolute directory that the server can read")
    if not path.is_dir():
        raise invalid("adapter.source_path", "is not a directory on the server's machine")
    return Lora(adapter.lora_id, adapter.lora_name, adapter.source_path)
