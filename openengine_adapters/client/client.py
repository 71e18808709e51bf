"""The client: one typed method for every RPC of the contract."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import partial
from types import TracebackType
from typing import Self, TypeVar

import grpc
import grpc.aio

from openengine.v1 import (
    discovery_pb2,
    generate_pb2,
    kv_pb2,
    lifecycle_pb2,
    lora_pb2,
    model_pb2,
    observability_pb2,
    service_pb2_grpc,
    tasks_pb2,
)
from openengine_adapters.client import compatibility
from openengine_adapters.client.connection import DEFAULT_KEEPALIVE, Tls, open_channel
from openengine_adapters.client.errors import ClientError, ContractViolation, RpcRejected, from_status
from openengine_adapters.client.generate import Generation
from openengine_adapters.client.streams import DrainSteps, KvBatches, RuntimeEvents

Request = TypeVar("Request")
Response = TypeVar("Response")


class OpenEngineClient:
    """A connection to one server. `connect` checks the server first; the bare constructor does no I/O.

    `timeout` bounds every unary call that names no other. Streams have no deadline unless they are given one.
    """

    def __init__(
        self,
        target: str,
        *,
        tls: Tls | None = None,
        token: str = "",
        timeout: float = 30.0,
        keepalive: float = DEFAULT_KEEPALIVE,
        releases: Collection[str] | None = None,
    ) -> None:
        self.target = target
        self.timeout = timeout
        self.engine = discovery_pb2.EngineInfo()  # what the server said of itself, once verified
        self._releases = releases
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self._channel = open_channel(target, tls, keepalive)
        self._stub: service_pb2_grpc.OpenEngineAsyncStub = service_pb2_grpc.OpenEngineStub(self._channel)

    @classmethod
    async def connect(
        cls,
        target: str,
        *,
        tls: Tls | None = None,
        token: str = "",
        timeout: float = 30.0,
        connect_timeout: float = 10.0,
        keepalive: float = DEFAULT_KEEPALIVE,
        releases: Collection[str] | None = None,
    ) -> Self:
        """Return a client whose server was reached and is compatible. `releases` pins its schema release.

        Raises `Unreachable`, `Incompatible`, or `RpcRejected` from a server that is still starting.
        """
        client = cls(target, tls=tls, token=token, timeout=timeout, keepalive=keepalive, releases=releases)
        try:
            await client.verify(timeout=connect_timeout)
        except BaseException:
            await client.close()
            raise
        return client

    async def verify(self, *, timeout: float | None = None) -> discovery_pb2.EngineInfo:
        """Ask the server who it is and fail closed unless the two sides can work together (DISC-11)."""
        try:
            info = await self.engine_info(timeout=timeout)
        except RpcRejected as error:
            if error.code is grpc.StatusCode.UNIMPLEMENTED:
                raise compatibility.not_served(self.target, error.message) from None
            raise
        compatibility.check(self.target, info, self._releases)
        self.engine = info
        return info

    async def close(self) -> None:
        """Close the connection and cancel what still runs on it."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # ------------------------------------------------------------------------------------------ discovery

    def default_model(self) -> str:
        """Return the server's one model. Raises `ContractViolation` when it does not serve exactly one."""
        models = list(self.engine.supported_models)
        if len(models) != 1:
            raise ContractViolation(f"the server serves {', '.join(models) or 'no model'}; name one")
        return models[0]

    async def engine_info(self, *, timeout: float | None = None) -> discovery_pb2.EngineInfo:
        """Identity, role and contract revision."""
        request = discovery_pb2.GetEngineInfoRequest()
        return await self._call("GetEngineInfo", self._stub.GetEngineInfo, request, timeout)

    async def model_info(self, model: str, *, timeout: float | None = None) -> model_pb2.ModelInfo:
        """Limits and abilities of one served model."""
        request = model_pb2.GetModelInfoRequest(model=model)
        return await self._call("GetModelInfo", self._stub.GetModelInfo, request, timeout)

    async def load(
        self, *, per_rank: bool = False, timeout: float | None = None
    ) -> observability_pb2.LoadInfo:
        """Load of this moment."""
        request = observability_pb2.GetLoadRequest(include_per_rank=per_rank)
        return await self._call("GetLoad", self._stub.GetLoad, request, timeout)

    # ------------------------------------------------------------------------------------------ inference

    def generate(self, request: generate_pb2.GenerateRequest, *, timeout: float | None = None) -> Generation:
        """Send the request and return its events. Closing the generation early cancels it on the server."""
        call = self._stub.Generate(request, timeout=timeout, metadata=self._metadata)
        return Generation(call, self._failure_of("Generate", timeout), request)

    async def embed(
        self, request: tasks_pb2.EmbedRequest, *, timeout: float | None = None
    ) -> tasks_pb2.EmbedResponse:
        """Turn inputs into vectors, all of them or none."""
        return await self._call("Embed", self._stub.Embed, request, timeout)

    async def classify(
        self, request: tasks_pb2.ClassifyRequest, *, timeout: float | None = None
    ) -> tasks_pb2.ClassifyResponse:
        """Give inputs class values, all of them or none."""
        return await self._call("Classify", self._stub.Classify, request, timeout)

    async def score(
        self, request: tasks_pb2.ScoreRequest, *, timeout: float | None = None
    ) -> tasks_pb2.ScoreResponse:
        """Rate candidates against queries, all of them or none."""
        return await self._call("Score", self._stub.Score, request, timeout)

    # ------------------------------------------------------------------------------------------ lifecycle

    async def health(
        self,
        *,
        probe: bool = False,
        model: str = "",
        role: discovery_pb2.EngineRole.ValueType = discovery_pb2.ENGINE_ROLE_UNSPECIFIED,
        timeout: float | None = None,
    ) -> lifecycle_pb2.HealthResponse:
        """Readiness; with `probe` a minimal inference is part of it."""
        request = lifecycle_pb2.HealthRequest(include_inference_probe=probe, model=model, role=role)
        return await self._call("Health", self._stub.Health, request, timeout)

    async def abort(self, request_id: str, *, timeout: float | None = None) -> lifecycle_pb2.AbortResponse:
        """Stop one request, whichever RPC started it."""
        return await self._abort(lifecycle_pb2.AbortRequest(request_id=request_id), timeout)

    async def abort_session(
        self, session: kv_pb2.KvSessionRef, *, timeout: float | None = None
    ) -> lifecycle_pb2.AbortResponse:
        """End one KV session."""
        return await self._abort(lifecycle_pb2.AbortRequest(kv_session=session), timeout)

    async def abort_all(self, *, timeout: float | None = None) -> lifecycle_pb2.AbortResponse:
        """Stop everything that runs, whoever started it."""
        everything = lifecycle_pb2.AllRequests()
        return await self._abort(lifecycle_pb2.AbortRequest(all_requests=everything), timeout)

    async def _abort(
        self, request: lifecycle_pb2.AbortRequest, timeout: float | None
    ) -> lifecycle_pb2.AbortResponse:
        return await self._call("Abort", self._stub.Abort, request, timeout)

    def drain(
        self,
        *,
        stop_accepting: bool = True,
        deadline: float | None = None,
        abort_after_deadline: bool = False,
        timeout: float | None = None,
    ) -> DrainSteps:
        """Let running requests end and report progress. Closing the stream leaves the server draining."""
        request = lifecycle_pb2.DrainRequest(
            stop_accepting_new_requests=stop_accepting,
            deadline_ms=None if deadline is None else round(deadline * 1000),
            abort_after_deadline=abort_after_deadline,
        )
        call = self._stub.Drain(request, timeout=timeout, metadata=self._metadata)
        return DrainSteps(call, self._failure_of("Drain", timeout))

    # ----------------------------------------------------------------------------------------------- LoRA

    async def load_lora(
        self, name: str, path: str, lora_id: int, *, timeout: float | None = None
    ) -> lora_pb2.LoadLoraResponse:
        """Make an adapter available; `path` is a directory on the server's machine."""
        adapter = lora_pb2.LoraAdapter(lora_id=lora_id, lora_name=name, source_path=path)
        request = lora_pb2.LoadLoraRequest(adapter=adapter)
        return await self._call("LoadLora", self._stub.LoadLora, request, timeout)

    async def unload_lora(self, name: str, *, timeout: float | None = None) -> lora_pb2.UnloadLoraResponse:
        """Take an adapter away."""
        request = lora_pb2.UnloadLoraRequest(lora_name=name)
        return await self._call("UnloadLora", self._stub.UnloadLora, request, timeout)

    async def list_loras(self, *, timeout: float | None = None) -> lora_pb2.ListLorasResponse:
        """Adapters loaded at present."""
        return await self._call("ListLoras", self._stub.ListLoras, lora_pb2.ListLorasRequest(), timeout)

    # ------------------------------------------------------------------------------------ KV and events

    async def kv_connector_info(self, *, timeout: float | None = None) -> kv_pb2.KvConnectorInfo:
        """How KV state moves between engines."""
        request = kv_pb2.GetKvConnectorInfoRequest()
        return await self._call("GetKvConnectorInfo", self._stub.GetKvConnectorInfo, request, timeout)

    async def kv_event_sources(
        self, ranks: Iterable[int] = (), *, timeout: float | None = None
    ) -> kv_pb2.GetKvEventSourcesResponse:
        """Where KV events can be had, for these data-parallel ranks or all."""
        request = kv_pb2.GetKvEventSourcesRequest(data_parallel_ranks=ranks)
        return await self._call("GetKvEventSources", self._stub.GetKvEventSources, request, timeout)

    def kv_events(
        self,
        ranks: Iterable[int] = (),
        *,
        snapshot: bool = False,
        start: int = 0,
        timeout: float | None = None,
    ) -> KvBatches:
        """Changes of the prefix cache: first its content with `snapshot`, or from sequence number `start`."""
        request = kv_pb2.SubscribeKvEventsRequest(
            data_parallel_ranks=ranks, include_snapshot=snapshot, start_sequence_number=start
        )
        call = self._stub.SubscribeKvEvents(request, timeout=timeout, metadata=self._metadata)
        return KvBatches(call, self._failure_of("SubscribeKvEvents", timeout))

    def runtime_events(
        self,
        types: Iterable[observability_pb2.RuntimeEventType.ValueType] = (),
        *,
        timeout: float | None = None,
    ) -> RuntimeEvents:
        """Events of the engine's scheduler, of these types or all."""
        request = observability_pb2.SubscribeRuntimeEventsRequest(types=types)
        call = self._stub.SubscribeRuntimeEvents(request, timeout=timeout, metadata=self._metadata)
        return RuntimeEvents(call, self._failure_of("SubscribeRuntimeEvents", timeout))

    # ------------------------------------------------------------------------------------------- plumbing

    async def _call(
        self,
        rpc: str,
        method: grpc.aio.UnaryUnaryMultiCallable[Request, Response],
        request: Request,
        timeout: float | None,
    ) -> Response:
        timeout = self.timeout if timeout is None else timeout
        try:
            return await method(request, timeout=timeout, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise self._failure_of(rpc, timeout)(error, False) from None

    def _failure_of(
        self, rpc: str, timeout: float | None
    ) -> Callable[[grpc.aio.AioRpcError, bool], ClientError]:
        return partial(from_status, channel=self._channel, target=self.target, rpc=rpc, timeout=timeout)
