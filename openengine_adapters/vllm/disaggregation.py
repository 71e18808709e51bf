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
from openengine_adapters.core.handoff.decoding import Stream
from openengine_adapters.core.handoff.desk import PROTOCOL
from openengine_adapters.core.handoff.parameters import checksum, content_digest
from openengine_adapters.core.handoff.roles import HandOffWanted
from openengine_adapters.core.handoff.sessions import End
from openengine_adapters.core.handoff.sides import DecodeSide, PrefillSide
from openengine_adapters.engine import FinishKind, GenerateCall, KvConnector, StartupError, Step
from openengine_adapters.vllm import kv_transfer
from openengine_adapters.vllm.kv_transfer import Connector, Handed
from openengine_adapters.vllm.outputs import OutputReader
from openengine_adapters.vllm.worker import END_LEASE, EXTENSION, KEEP

LEASE_SHARE = 2 / 3
"""How much of vLLM's lease a session waits at most; from then on, attached to, the server keeps the blocks itself."""

LEASE_TRIES, LEASE_RETRY_S = 40, 0.05

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
        return Decodes(config, wanted)
    if connector.mode:
        if args.worker_extension_cls:
            raise StartupError("--worker-extension-cls is taken by this adapter on a prefill server")
        args.worker_extension_cls = EXTENSION
    return Prefills(config, host, wanted)


class Prefills(PrefillSide[str]):
    """The hand-offs of a prefill server; its sessions hold vLLM's ids of their requests."""

    def __init__(self, config: KVTransferConfig, host: str, wanted: HandOffWanted) -> None:
        super().__init__(wanted, host, min(wanted.timeout, kv_transfer.lease_of(config) * LEASE_SHARE))
        self._connector = kv_transfer.connector_of(config)
        self._attached_s = wanted.attached_timeout
        self._llm: AsyncLLM | None = None

    async def start(self, llm: AsyncLLM) -> KvConnector:
        """Open the desk and describe the connector. Raises `StartupError`."""
        self._llm = llm
        await self.open_desk()
        return _describe(self._connector, self.at, llm.vllm_config, prefill=True)

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

    def _open(
        self, call: GenerateCall, prompt_ids: Sequence[int], output: RequestOutput
    ) -> kv_pb2.KvSessionRef:
        """Open the session of a finished prefill. Raises `EngineFailure`."""
        params = output.kv_transfer_params or {}
        if self._connector.mode and not params.get("remote_block_ids"):
            raise EngineFailure("the engine kept no blocks of this prompt", retryable=True)
        rank = self._rank(call, params)
        session = kv_transfer.to_session(self._connector, uuid.uuid4().hex, params, self.at, rank)
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

    async def keep(self, request_id: str) -> bool:
        """Have vLLM keep a session's blocks for as long as a decode server is attached; False when they are gone."""
        if not request_id:
            return True
        for _ in range(LEASE_TRIES):
            ranks = await self._ask_workers(KEEP, request_id, self._attached_s)
            if any(all(kept is True for kept in workers) for workers in ranks):
                return True
            if all(kept is False for workers in ranks for kept in workers):
                return False
            await asyncio.sleep(LEASE_RETRY_S)
        return False

    async def free(self, request_id: str, how: End) -> None:
        """Have vLLM free a session's blocks, unless the decode engine's own word did that."""
        if how is End.FETCHED or not request_id or self._llm is None or self._llm.errored:
            return
        for _ in range(LEASE_TRIES):
            if all(free for workers in await self._ask_workers(END_LEASE, request_id) for free in workers):
                return
            await asyncio.sleep(LEASE_RETRY_S)

    async def _ask_workers(self, method: str, *args: Any) -> list[list[bool | None]]:
        """The answers of each rank's workers; vLLM's own `collective_rpc` asks all, and returns the first rank's."""
        assert self._llm is not None
        answers: list[list[bool | None]] = await self._llm.engine_core.call_utility_all_async(
            "collective_rpc", method, None, args, {}
        )
        return answers


class Decodes(DecodeSide):
    """The hand-offs of a decode server."""

    def __init__(self, config: KVTransferConfig, wanted: HandOffWanted) -> None:
        super().__init__(wanted)
        self._connector = kv_transfer.connector_of(config)

    async def start(self, llm: AsyncLLM) -> KvConnector:
        """Describe the connector."""
        return _describe(self._connector, None, llm.vllm_config, prefill=False)

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
