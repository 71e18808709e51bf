"""Prefill and decode with vLLM: a request handed from one server to another (PD-01 … PD-07).

vLLM's own hand-off knows no end but its lease, and a decode engine reads freed blocks without a sign. So a session
lives in a table of the prefill server, shorter than the lease, and a decode server attaches to it before its engine
is told of the blocks.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from vllm import AsyncEngineArgs
from vllm.config import KVTransferConfig, VllmConfig
from vllm.outputs import RequestOutput
from vllm.v1.engine.async_llm import AsyncLLM

from openengine.v1 import kv_pb2
from openengine_adapters.core.errors import EngineFailure
from openengine_adapters.core.handoff.decoding import Decoding, Stream
from openengine_adapters.core.handoff.desk import PROTOCOL, SessionDesk
from openengine_adapters.core.handoff.parameters import checksum, content_digest
from openengine_adapters.core.handoff.roles import HandOffWanted
from openengine_adapters.core.handoff.sessions import End, SessionTable
from openengine_adapters.engine import FinishKind, GenerateCall, KvConnector, StartupError, Step
from openengine_adapters.vllm import kv_transfer
from openengine_adapters.vllm.kv_transfer import Connector, Handed
from openengine_adapters.vllm.outputs import OutputReader
from openengine_adapters.vllm.worker import END_LEASE, EXTENSION

LEASE_SHARE = 2 / 3
"""How much of vLLM's lease a session lasts at most: the rest is for the decode engine to take over."""

LEASE_TRIES, LEASE_RETRY_S = 20, 0.1

PREFILL_PARAMS = {"do_remote_decode": True, "do_remote_prefill": False}
SCHEMA_VERSION = 1


def hand_off(args: AsyncEngineArgs, wanted: HandOffWanted) -> Prefills | Decodes | None:
    """The hand-offs of a server with these arguments, which are made ready for it; None when it is aggregated.

    Raises `StartupError` for a role or a connector that cannot be served (ROLE-05).
    """
    config = args.kv_transfer_config
    role = kv_transfer.role_of(config, wanted.role)
    if config is None or role == kv_transfer.AGGREGATED:
        return None
    connector = kv_transfer.connector_of(config)
    host = kv_transfer.prepare_side_channel(connector, wanted.host, args.data_parallel_size)
    if role == kv_transfer.DECODE:
        return Decodes(config, wanted.transfer_timeout)
    if connector.mode:
        if args.worker_extension_cls:
            raise StartupError("--worker-extension-cls is taken by this adapter on a prefill server")
        args.worker_extension_cls = EXTENSION
    return Prefills(config, host, wanted)


class Prefills:
    """The hand-offs of a prefill server."""

    role = kv_transfer.PREFILL

    def __init__(self, config: KVTransferConfig, host: str, wanted: HandOffWanted) -> None:
        self._connector = kv_transfer.connector_of(config)
        self._llm: AsyncLLM | None = None
        self._at = (host, wanted.port)
        lasts = min(wanted.timeout, kv_transfer.lease_of(config) * LEASE_SHARE)
        self.sessions: SessionTable[str] = SessionTable(lasts, self._free)
        self._desk = SessionDesk(self.sessions)

    async def start(self, llm: AsyncLLM) -> KvConnector:
        """Open the desk and describe the connector. Raises `StartupError`."""
        self._llm = llm
        self._at = await _open_desk(self._desk, *self._at)
        return _describe(self._connector, self._at, llm.vllm_config, prefill=True)

    async def stop(self) -> None:
        """Close the desk and forget the sessions."""
        await self._desk.stop()
        await self.sessions.close()

    @property
    def kv_transfer_params(self) -> dict[str, Any] | None:
        """What vLLM is told of a request that it only prefills."""
        return dict(PREFILL_PARAMS) if self._connector.mode else None

    def reader(
        self, call: GenerateCall, prompt_ids: Sequence[int], reader: OutputReader
    ) -> Callable[[RequestOutput], Step]:
        """Read a prefill's outputs: no tokens, and a session at the end."""

        def read(output: RequestOutput) -> Step:
            step = reader.read(output)
            ended = [delta.finish.kind for delta in step.deltas if delta.finish is not None]
            if ended == [FinishKind.LENGTH]:
                step.session = self._open(call, prompt_ids, output)
            step.deltas = ()
            return step

        return read

    async def release(self, session_id: str) -> bool | None:
        """End a session; on return vLLM has been told to free its blocks."""
        released = self.sessions.end(session_id, End.RELEASED)
        await self.sessions.settled()
        return released

    def _open(
        self, call: GenerateCall, prompt_ids: Sequence[int], output: RequestOutput
    ) -> kv_pb2.KvSessionRef:
        """Open the session of a finished prefill. Raises `EngineFailure`."""
        params = output.kv_transfer_params or {}
        if self._connector.mode and not params.get("remote_block_ids"):
            raise EngineFailure("the engine kept no blocks of this prompt", retryable=True)
        rank = self._rank(call, params)
        session = kv_transfer.to_session(self._connector, uuid.uuid4().hex, params, self._at, rank)
        content = content_digest(prompt_ids, call.lora, call.media)
        self.sessions.open(
            session.session_id, checksum(session, content), call.id, str(params.get("remote_request_id", ""))
        )
        return session

    def _rank(self, call: GenerateCall, params: dict[str, Any]) -> int:
        """The rank that holds the blocks; each has a side channel of its own."""
        if self._connector.mode:
            return int(params["remote_port"]) - kv_transfer.side_channel(0)[1]
        return call.request.kv.data_parallel_rank

    async def _free(self, request_id: str, how: End) -> None:
        """Have vLLM free a session's blocks, unless the decode engine's own word did that."""
        if how is End.FETCHED or not request_id or self._llm is None or self._llm.errored:
            return
        for _ in range(LEASE_TRIES):
            # The lease begins a step after the output that told of it.
            if all(await self._llm.collective_rpc(END_LEASE, args=(request_id,))):
                return
            await asyncio.sleep(LEASE_RETRY_S)


class Decodes:
    """The hand-offs of a decode server."""

    role = kv_transfer.DECODE

    def __init__(self, config: KVTransferConfig, timeout: float) -> None:
        self._connector = kv_transfer.connector_of(config)
        self.decoding = Decoding(timeout)

    async def start(self, llm: AsyncLLM) -> KvConnector:
        """Describe the connector."""
        return _describe(self._connector, None, llm.vllm_config, prefill=False)

    async def stop(self) -> None:
        """Nothing is held here."""

    @property
    def needs_all_blocks(self) -> bool:
        """Whether the engine must not find a part of a prompt in its own cache: pushed to, it then waits for ever."""
        return self._connector.mode == "push"

    def read(self, session: kv_pb2.KvSessionRef) -> Handed:
        """Check a session completely. Raises `Rejected`."""
        return kv_transfer.from_session(self._connector, session)

    async def serve(
        self,
        call: GenerateCall,
        handed: Handed,
        prompt_ids: Sequence[int],
        admit: Callable[[str, dict[str, Any] | None], Awaitable[Stream]],
        abort: Callable[[], Awaitable[None]],
    ) -> Stream:
        """Attach to the request's session and serve it; `admit` gets vLLM's id and parameters for it."""
        session = call.request.kv.session
        content = content_digest(prompt_ids, call.lora, call.media)
        engine_id, params = self._engine_id(call, handed), self._params(handed)
        return await self.decoding.serve(
            session, handed.desk, checksum(session, content), lambda: admit(engine_id, params), abort
        )

    def _params(self, handed: Handed) -> dict[str, Any] | None:
        """What vLLM is told of the blocks.

        Left out is the one number that is no instruction: vLLM would report it in place of what it found itself.
        """
        params = {key: value for key, value in handed.params.items() if key != "remote_prefill_cached_tokens"}
        return params or None

    def _engine_id(self, call: GenerateCall, handed: Handed) -> str:
        """The id for vLLM; a prefill engine that pushes finds the request by the id that it had there."""
        if self._connector.mode == "push":
            return str(handed.params["remote_request_id"]).rpartition("-")[0] or call.id
        return call.id


async def _open_desk(desk: SessionDesk, host: str, port: int) -> tuple[str, int]:
    try:
        return host, await desk.start(host, port)
    except OSError as error:
        raise StartupError(
            f"decode servers cannot be answered on {host}:{port} ({error.strerror}); "
            "set --kv-session-port to a free one, and the host to one of this machine's"
        ) from error


def _describe(
    connector: Connector, desk: tuple[str, int] | None, config: VllmConfig, *, prefill: bool
) -> KvConnector:
    endpoints: list[tuple[str, int, str]] = []
    if connector.mode:
        ranks = range(config.parallel_config.data_parallel_size)
        endpoints += [(*kv_transfer.side_channel(rank), kv_transfer.NIXL) for rank in ranks]
    protocols = [*dict.fromkeys(protocol for *_, protocol in endpoints), PROTOCOL]
    if desk is not None:
        endpoints.append((*desk, PROTOCOL))
    return KvConnector(
        enabled=True,
        transfer_backend=connector.backend,
        local_endpoints=tuple(endpoints),
        supported_protocols=tuple(protocols),
        supports_remote_prefill=prefill,
        supports_decode_pull=connector.mode != "push",
        supports_abort_cleanup=True,
        supports_drain=True,
        schema_version=SCHEMA_VERSION,
    )
