"""The 17 RPCs, each a few lines: check, admit, call, answer."""

from __future__ import annotations

import functools
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc

from openengine.v1 import (
    discovery_pb2,
    errors_pb2,
    generate_pb2,
    kv_pb2,
    lifecycle_pb2,
    lora_pb2,
    model_pb2,
    observability_pb2,
    service_pb2_grpc,
    tasks_pb2,
)
from openengine_adapters.core import capabilities, load, runtime_events, subscriptions, validation
from openengine_adapters.core.calls import OpenCalls
from openengine_adapters.core.drain import Drains
from openengine_adapters.core.errors import EngineFailure, Rejected, invalid, unexpected
from openengine_adapters.core.generate import TRACE_KEYS, run_generate, trace_headers
from openengine_adapters.core.health import Health
from openengine_adapters.core.kv import messages
from openengine_adapters.core.kv.discovery import Reachable
from openengine_adapters.core.kv.plane import KvOptions, KvPlane
from openengine_adapters.core.lifecycle import Lifecycle, Phase
from openengine_adapters.core.lora import LoraRegistry
from openengine_adapters.core.media import MediaLoader, MediaPolicy
from openengine_adapters.core.requests import AbortOutcome, RequestTable
from openengine_adapters.core.runtime_events import RuntimeEvents
from openengine_adapters.core.tasks import Tasks
from openengine_adapters.core.watchdog import Limits, Watchdog
from openengine_adapters.engine import (
    Engine,
    EngineDescription,
    HandsOffKv,
    HostsLora,
    Lora,
    PublishesKvEvents,
)

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
Handler = TypeVar("Handler", bound=Callable[..., Awaitable[Any]])

MOST_METADATA = 256
"""Characters of a request's metadata in a log line."""

_ABORT_STATUS = {
    AbortOutcome.ABORTED: lifecycle_pb2.ABORT_STATUS_ABORTED,
    AbortOutcome.ALREADY_FINISHED: lifecycle_pb2.ABORT_STATUS_ALREADY_FINISHED,
}


def rpc(handler: Handler) -> Handler:
    """Turn refusals into their status, and the unexpected into INTERNAL with an id for the log (ERR-06)."""

    @functools.wraps(handler)
    async def guarded(self: OpenEngineServicer, request: Any, context: Context) -> Any:
        self.calls.add(context)
        try:
            return await handler(self, request, context)
        except Rejected as rejected:
            log.info(
                "rejected",
                extra={
                    "rpc": handler.__name__,
                    **_named(request),
                    "code": rejected.code.name,
                    "field": rejected.field,
                },
            )
            await context.abort(rejected.code, str(rejected))
        except grpc.aio.AbortError:
            raise
        except EngineFailure as failure:
            await context.abort(grpc.StatusCode.INTERNAL, str(failure))
        except Exception:
            await context.abort(grpc.StatusCode.INTERNAL, str(unexpected(handler.__name__)))

    return guarded  # type: ignore[return-value]  # the same signature


def _named(request: Any) -> dict[str, str]:
    """The request's id, and the metadata that the caller sent for logs (GEN-07): as data, and no more than a line."""
    named = getattr(request, "context", request)  # where Embed, Classify and Score have both
    pairs = sorted(getattr(named, "metadata", {}).items())
    carried = " ".join(f"{key}={value}" for key, value in pairs if key not in TRACE_KEYS)
    found = {"request_id": getattr(named, "request_id", "")}
    return found | ({"metadata": carried[:MOST_METADATA]} if carried else {})


class OpenEngineServicer(service_pb2_grpc.OpenEngineServicer):
    """Serves the contract over one engine. Before `opened` is called it answers as STARTING."""

    def __init__(
        self,
        engine: Engine,
        instance_id: str,
        schema_release: str,
        limits: Limits | None = None,
        media: MediaPolicy | None = None,
        kv: KvOptions | None = None,
    ) -> None:
        self.engine = engine
        self.calls = OpenCalls()
        self.reachable = Reachable()
        self.kv = KvPlane(kv or KvOptions())
        self.runtime_events = RuntimeEvents(engine)
        self.lifecycle = Lifecycle()
        self.requests = RequestTable(engine.abort)
        self.watchdog = Watchdog(engine, self.requests, self.lifecycle, limits or Limits())
        self.requests.on_death = self.watchdog.declare_dead
        self.drains = Drains(self.lifecycle, self.requests, self._open_sessions, self._end_sessions)
        self.description: EngineDescription | None = None
        self._instance_id = instance_id
        self._schema_release = schema_release
        self._health = Health(engine, self.lifecycle)
        self._load = load.LoadReader(engine)
        self._loras = LoraRegistry(None)
        self._media = MediaLoader(media or MediaPolicy())
        self.lifecycle.listen(self._on_phase)

    def opened(self, description: EngineDescription) -> None:
        """The engine is up and is `description`: take requests from now on."""
        self.description = description
        host = self.engine if description.lora and isinstance(self.engine, HostsLora) else None
        self._loras = LoraRegistry(host)
        if isinstance(self.engine, PublishesKvEvents):
            self.kv.open(self.engine.kv_event_publishers())
        self.lifecycle.ready()

    async def closed(self) -> None:
        """The server is going to close: end what would otherwise run for ever. Safe to call twice."""
        self._end_subscriptions(
            EngineFailure(
                "the server is closing; subscribe to another replica",
                code=errors_pb2.ERROR_CODE_DRAINING,
                retryable=True,
            )
        )
        await self.kv.close()

    # ------------------------------------------------------------------------------------------- inference

    @rpc
    async def Generate(  # type: ignore[override]  # writes to the context
        self, request: generate_pb2.GenerateRequest, context: Context
    ) -> None:
        self.lifecycle.require_open()
        description = self._described()
        validation.check_generate(request, description)
        if request.kv.HasField("session") and isinstance(self.engine, HandsOffKv):
            self.engine.check_session(request.kv.session)
        await run_generate(
            self.engine, description, self.requests, self._loras, self._media, request, context
        )

    @rpc
    async def Embed(self, request: tasks_pb2.EmbedRequest, context: Context) -> tasks_pb2.EmbedResponse:
        return await self._tasks().embed(request, trace_headers(request.context.metadata, context))

    @rpc
    async def Classify(
        self, request: tasks_pb2.ClassifyRequest, context: Context
    ) -> tasks_pb2.ClassifyResponse:
        return await self._tasks().classify(request, trace_headers(request.context.metadata, context))

    @rpc
    async def Score(self, request: tasks_pb2.ScoreRequest, context: Context) -> tasks_pb2.ScoreResponse:
        return await self._tasks().score(request, trace_headers(request.context.metadata, context))

    # ------------------------------------------------------------------------------------------- discovery

    @rpc
    async def GetEngineInfo(
        self, request: discovery_pb2.GetEngineInfoRequest, context: Context
    ) -> discovery_pb2.EngineInfo:
        return capabilities.engine_info(self._described(), self._instance_id, self._schema_release)

    @rpc
    async def GetModelInfo(
        self, request: model_pb2.GetModelInfoRequest, context: Context
    ) -> model_pb2.ModelInfo:
        description = self._described()
        validation.check_model(request.model, description)
        return capabilities.model_info(description)

    @rpc
    async def GetKvConnectorInfo(
        self, request: kv_pb2.GetKvConnectorInfoRequest, context: Context
    ) -> kv_pb2.KvConnectorInfo:
        return capabilities.kv_connector_info(self._described())

    @rpc
    async def GetLoad(
        self, request: observability_pb2.GetLoadRequest, context: Context
    ) -> observability_pb2.LoadInfo:
        self.lifecycle.require_started()
        snapshot = await self._load.read()
        return load.load_info(snapshot, self._instance_id, self._open_sessions(), request.include_per_rank)

    # ------------------------------------------------------------------------------------------- lifecycle

    @rpc
    async def Health(
        self, request: lifecycle_pb2.HealthRequest, context: Context
    ) -> lifecycle_pb2.HealthResponse:
        return await self._health.answer(request, self.description, context.time_remaining())

    @rpc
    async def Abort(
        self, request: lifecycle_pb2.AbortRequest, context: Context
    ) -> lifecycle_pb2.AbortResponse:
        self.lifecycle.require_started()
        target = request.WhichOneof("target")
        if target is None:
            raise invalid("target", "set one of request_id, kv_session and all_requests")
        if target == "all_requests":
            count = await self.requests.abort_all()
            return lifecycle_pb2.AbortResponse(
                status=lifecycle_pb2.ABORT_STATUS_ABORTED, message=f"{count} requests aborted"
            )
        if target == "kv_session":
            return lifecycle_pb2.AbortResponse(
                status=await self._abort_session(request.kv_session.session_id)
            )
        return lifecycle_pb2.AbortResponse(
            status=_ABORT_STATUS[await self.requests.abort(request.request_id)]
        )

    @rpc
    async def Drain(  # type: ignore[override]  # writes to the context
        self, request: lifecycle_pb2.DrainRequest, context: Context
    ) -> None:
        self.lifecycle.require_started()
        await subscriptions.serve(
            self.drains.run(request), lambda error: lifecycle_pb2.DrainResponse(error=error), context
        )

    # ------------------------------------------------------------------------------------------------ LoRA

    @rpc
    async def LoadLora(
        self, request: lora_pb2.LoadLoraRequest, context: Context
    ) -> lora_pb2.LoadLoraResponse:
        self.lifecycle.require_open()
        lora, already_loaded = await self._loras.load(request.adapter)
        return lora_pb2.LoadLoraResponse(adapter=_adapter(lora), already_loaded=already_loaded)

    @rpc
    async def UnloadLora(
        self, request: lora_pb2.UnloadLoraRequest, context: Context
    ) -> lora_pb2.UnloadLoraResponse:
        self.lifecycle.require_started()
        lora = await self._loras.unload(request.lora_name, context.time_remaining())
        return lora_pb2.UnloadLoraResponse(adapter=_adapter(lora))

    @rpc
    async def ListLoras(
        self, request: lora_pb2.ListLorasRequest, context: Context
    ) -> lora_pb2.ListLorasResponse:
        self.lifecycle.require_started()
        return lora_pb2.ListLorasResponse(adapters=[_adapter(lora) for lora in self._loras.loaded()])

    # -------------------------------------------------------------------------------------- KV and events

    @rpc
    async def GetKvEventSources(
        self, request: kv_pb2.GetKvEventSourcesRequest, context: Context
    ) -> kv_pb2.GetKvEventSourcesResponse:
        return self.kv.sources(request, self._described().parallelism.ranks, self.reachable)

    @rpc
    async def SubscribeKvEvents(  # type: ignore[override]  # writes to the context
        self, request: kv_pb2.SubscribeKvEventsRequest, context: Context
    ) -> None:
        self.lifecycle.require_started()
        with await self.kv.admit(request) as subscription:
            await subscriptions.serve(subscription.responses(), messages.error_response, context)

    @rpc
    async def SubscribeRuntimeEvents(  # type: ignore[override]  # writes to the context
        self, request: observability_pb2.SubscribeRuntimeEventsRequest, context: Context
    ) -> None:
        self.lifecycle.require_started()
        with self.runtime_events.subscribe(request) as responses:
            await subscriptions.serve(responses, runtime_events.error_response, context)

    # --------------------------------------------------------------------------------------------- helpers

    def _described(self) -> EngineDescription:
        self.lifecycle.require_started()
        assert self.description is not None  # READY and DRAINING come after `opened`
        return self.description

    def _tasks(self) -> Tasks:
        self.lifecycle.require_open()
        return Tasks(self.engine, self._described(), self.requests, self._loras, self._media)

    def _on_phase(self, phase: Phase) -> None:
        if phase is Phase.DEAD and self.lifecycle.died is not None:
            self._end_subscriptions(self.lifecycle.died)

    def _end_subscriptions(self, failure: EngineFailure) -> None:
        self.kv.fail(failure)
        self.runtime_events.fail(failure)

    def _open_sessions(self) -> int:
        return self.engine.open_sessions() if isinstance(self.engine, HandsOffKv) else 0

    async def _end_sessions(self) -> None:
        if isinstance(self.engine, HandsOffKv):
            await self.engine.end_sessions()

    async def _abort_session(self, session_id: str) -> lifecycle_pb2.AbortStatus.ValueType:
        released = (
            await self.engine.release_session(session_id) if isinstance(self.engine, HandsOffKv) else None
        )
        if released is None:
            raise Rejected(
                grpc.StatusCode.NOT_FOUND,
                f"{session_id!r} is unknown here",
                field="kv_session",
                value=session_id,
            )
        return lifecycle_pb2.ABORT_STATUS_ABORTED if released else lifecycle_pb2.ABORT_STATUS_ALREADY_FINISHED


def _adapter(lora: Lora) -> lora_pb2.LoraAdapter:
    return lora_pb2.LoraAdapter(lora_id=lora.id, lora_name=lora.name, source_path=lora.path)
