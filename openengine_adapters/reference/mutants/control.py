"""Mutants of abort, drain, load, runtime events and LoRA."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Iterable
from typing import Any, ClassVar

import grpc

from openengine.v1 import lifecycle_pb2, lora_pb2
from openengine_adapters.core.errors import Rejected
from openengine_adapters.core.requests import AbortOutcome
from openengine_adapters.core.servicer import OpenEngineServicer
from openengine_adapters.engine import EngineDescription, Lora, Step
from openengine_adapters.reference.engine import ReferenceEngine
from openengine_adapters.reference.generation import Generation
from openengine_adapters.reference.loras import LoadedLora
from openengine_adapters.reference.model import lora_bias
from openengine_adapters.reference.mutants.seams import (
    Answer,
    Refuse,
    Tamper,
    engine_of,
    replace,
    request_of,
    response_of,
    servicer_of,
    status_of,
    tampers,
)

_NOT_FOUND = grpc.StatusCode.NOT_FOUND
_DRAINABLE = {"include_drain": True}

# ----------------------------------------------------------------------------------------------------- abort


@response_of("Abort", "finished_is_unknown", "ABORT-01", "A finished id is NOT_FOUND.")
def _(response: Any) -> None:
    if response.status == lifecycle_pb2.ABORT_STATUS_ALREADY_FINISHED:
        raise Refuse(_NOT_FOUND, "request_id: is unknown")


@status_of("Abort", "unknown_is_finished", "ABORT-01", "An unknown id is ALREADY_FINISHED.")
def _(code: grpc.StatusCode) -> grpc.StatusCode:
    if code is _NOT_FOUND:
        raise Answer(lifecycle_pb2.AbortResponse(status=lifecycle_pb2.ABORT_STATUS_ALREADY_FINISHED))
    return code


@request_of("Abort", "no_target_is_all", "ABORT-01", "An abort without a target aborts everything.")
def _(request: Any) -> None:
    if request.WhichOneof("target") is None:
        request.all_requests.SetInParent()


@servicer_of("abort_does_nothing", "ABORT-02", "Abort says ABORTED and lets the request run.")
def _(servicer: OpenEngineServicer) -> None:
    abort = servicer.requests.abort

    async def pretend(request_id: str) -> AbortOutcome:
        if any(request.request_id == request_id for request in servicer.requests):
            return AbortOutcome.ABORTED
        return await abort(request_id)

    replace(servicer.requests, "abort", pretend)


@servicer_of(
    "all_but_tasks", "ABORT-03", "all_requests leaves task requests running.", settings={"latency": 0.3}
)
def _(servicer: OpenEngineServicer) -> None:
    async def generations() -> int:
        found = [request for request in servicer.requests if not request.unary]
        await asyncio.gather(*(servicer.requests.abort(request.request_id) for request in found))
        return len(found)

    replace(servicer.requests, "abort_all", generations)


@servicer_of("all_but_one", "ABORT-03", "all_requests leaves the newest request running.")
def _(servicer: OpenEngineServicer) -> None:
    async def older() -> int:
        found = list(servicer.requests)[:-1]
        await asyncio.gather(*(servicer.requests.abort(request.request_id) for request in found))
        return len(found)

    replace(servicer.requests, "abort_all", older)


@servicer_of("prefix_abort", "ABORT-04", "Abort also ends requests whose id begins with the one given.")
def _(servicer: OpenEngineServicer) -> None:
    abort = servicer.requests.abort

    async def by_prefix(request_id: str) -> AbortOutcome:
        found = [r.request_id for r in servicer.requests if r.request_id.startswith(request_id)]
        for longer in found:
            if longer != request_id:
                await abort(longer)
        return await abort(request_id)

    replace(servicer.requests, "abort", by_prefix)


@engine_of("abort_of_one_sequence", "ABORT-05", "Abort ends one sequence of several.")
def _(engine: ReferenceEngine) -> None:
    abort = engine.abort

    async def first_only(call_id: str) -> None:
        for scheduler in engine._schedulers():
            for work in scheduler.works():
                if work.call_id == call_id and isinstance(work, Generation) and len(work._outputs) > 1:
                    if work._outputs[0].finish is None:
                        work.outbox.put(Step([work._outputs[0].cancel()]))
                    return
        await abort(call_id)

    replace(engine, "abort", first_only)


# ----------------------------------------------------------------------------------------------------- drain


@response_of("Drain", "drain_without_start", "DRAIN-01", "A drain does not say STARTED.")
def _(response: Any) -> Any:
    return () if response.state == lifecycle_pb2.DRAIN_STATE_STARTED else None


@response_of("Drain", "drain_without_counts", "DRAIN-01", "The counts are absent when they are 0.")
def _(response: Any) -> None:
    if not response.in_flight_requests:
        response.ClearField("in_flight_requests")


@servicer_of("drain_complete_at_once", "DRAIN-01", "A drain is COMPLETE while requests are running.")
def _(servicer: OpenEngineServicer) -> None:
    async def run(request: Any) -> AsyncGenerator[lifecycle_pb2.DrainResponse, None]:
        for state in (lifecycle_pb2.DRAIN_STATE_STARTED, lifecycle_pb2.DRAIN_STATE_COMPLETE):
            yield lifecycle_pb2.DrainResponse(state=state, in_flight_requests=0, open_kv_sessions=0)

    replace(servicer.drains, "run", run)


@request_of("Drain", "drain_that_stops_anyway", "DRAIN-02", "A drain without the stop refuses new work.")
def _(request: Any) -> None:
    request.stop_accepting_new_requests = True


@request_of(
    "Drain",
    "drain_that_never_stops",
    "DRAIN-02",
    "A drain with the stop lets new work in.",
    options=_DRAINABLE,
)
def _(request: Any) -> None:
    request.stop_accepting_new_requests = False


@request_of("Drain", "drain_without_deadline", "DRAIN-03", "A drain's deadline is dropped.")
def _(request: Any) -> None:
    request.ClearField("deadline_ms")


@request_of("Drain", "drain_aborts_nothing", "DRAIN-03", "A drain aborts nothing after its deadline.")
def _(request: Any) -> None:
    request.abort_after_deadline = False


@request_of("Drain", "drain_aborts_anyway", "DRAIN-03", "A drain aborts after its deadline unasked.")
def _(request: Any) -> None:
    request.abort_after_deadline = True


@servicer_of("one_drain_at_a_time", "DRAIN-04", "A second drain that runs beside the first is refused.")
def _(servicer: OpenEngineServicer) -> None:
    run = servicer.drains.run
    running: list[object] = []

    async def alone(request: Any) -> AsyncGenerator[lifecycle_pb2.DrainResponse, None]:
        if running:
            raise Rejected(grpc.StatusCode.FAILED_PRECONDITION, "a drain is running")
        running.append(request)
        try:
            async for response in run(request):
                yield response
        finally:
            running.remove(request)

    replace(servicer.drains, "run", alone)


@status_of(
    "Generate", "draining_is_a_precondition", "GEN-05", "A draining server refuses with FAILED_PRECONDITION.",
    options=_DRAINABLE,
)  # fmt: skip
def _(code: grpc.StatusCode) -> grpc.StatusCode:
    return grpc.StatusCode.FAILED_PRECONDITION if code is grpc.StatusCode.UNAVAILABLE else code


# ------------------------------------------------------------------------------------------------------ load


@response_of("GetLoad", "always_idle", "LOAD-01", "The load is 0 whatever runs.")
def _(load: Any) -> None:
    load.running_requests = 0


@response_of("GetLoad", "idle_is_unknown", "LOAD-01", "A measured zero is left out.")
def _(load: Any) -> None:
    if not load.queued_requests:
        load.ClearField("queued_requests")


@request_of("GetLoad", "no_ranks", "LOAD-02", "include_per_rank is dropped.")
def _(request: Any) -> None:
    request.include_per_rank = False


@response_of("GetLoad", "ranks_do_not_add_up", "LOAD-02", "The ranks' loads are not the total's.")
def _(load: Any) -> None:
    for rank in load.ranks:
        rank.total_kv_blocks += 1


@response_of("GetLoad", "blocks_of_another_size", "LOAD-03", "total_kv_blocks is not ModelInfo's.")
def _(load: Any) -> None:
    load.total_kv_blocks *= 2


@response_of("GetLoad", "stale_load", "LOAD-04", "The load's time stands still.")
def _(load: Any) -> None:
    load.timestamp_unix_nanos = 1_700_000_000_000_000_000


# -------------------------------------------------------------------------------------------- runtime events

_EVENTS = "SubscribeRuntimeEvents"


@request_of(_EVENTS, "events_unfiltered", "RTE-01", "Events of every type come whatever was asked for.")
def _(request: Any) -> None:
    del request.types[:]


@response_of(_EVENTS, "one_event_id", "RTE-02", "All events have the same id.")
def _(response: Any) -> None:
    response.runtime_event.event_id = "event"


@tampers(_EVENTS, "time_goes_back", "RTE-02", "Each event is older than the one before.")
class _TimeGoesBack(Tamper):
    newest = 0

    def response(self, response: Any) -> Iterable[Any]:
        self.newest = (self.newest or response.runtime_event.timestamp_unix_nanos) - 1
        response.runtime_event.timestamp_unix_nanos = self.newest
        return (response,)


@tampers(_EVENTS, "events_get_lost", "RTE-03", "Every other subscriber misses some events, and is not told.")
class _EventsGetLost(Tamper):
    calls: ClassVar = itertools.count()

    def __init__(self) -> None:
        self._loses = next(self.calls) % 2
        self._events = 0

    def response(self, response: Any) -> Iterable[Any]:
        self._events += 1
        return () if self._loses and self._events % 5 == 0 else (response,)


# ------------------------------------------------------------------------------------------------------ LoRA


@request_of("LoadLora", "any_lora_id", "LORA-01", "An adapter's id of 0 or less is given a better one.")
def _(request: Any) -> None:
    if request.HasField("adapter") and request.adapter.lora_id <= 0:
        request.adapter.lora_id = 4711


@response_of("LoadLora", "always_loaded_anew", "LORA-02", "already_loaded is never true.")
def _(response: Any) -> None:
    response.already_loaded = False


@status_of("LoadLora", "conflict_is_invalid", "LORA-03", "A conflicting adapter is INVALID_ARGUMENT.")
def _(code: grpc.StatusCode) -> grpc.StatusCode:
    return grpc.StatusCode.INVALID_ARGUMENT if code is grpc.StatusCode.ALREADY_EXISTS else code


@status_of("UnloadLora", "unloads_the_unknown", "LORA-04", "Unloading an unknown adapter succeeds.")
def _(code: grpc.StatusCode) -> grpc.StatusCode:
    if code is _NOT_FOUND:
        raise Answer(lora_pb2.UnloadLoraResponse())
    return code


@status_of(
    "ListLoras", "lists_nothing_when_disabled", "LORA-05", "Without LoRA ListLoras is an empty list.",
    settings={"lora": False},
)  # fmt: skip
def _(code: grpc.StatusCode) -> grpc.StatusCode:
    raise Answer(lora_pb2.ListLorasResponse())


@response_of("ListLoras", "lists_nothing", "LORA-06", "ListLoras is always empty.")
def _(response: Any) -> None:
    del response.adapters[:]


@request_of("Generate", "lora_ignored", "LORA-07", "The base model answers for every adapter.")
def _(request: Any) -> None:
    request.ClearField("lora_name")


@engine_of("lazy_lora", "LORA-08", "A directory without a valid adapter is loaded.")
def _(engine: ReferenceEngine) -> None:
    load = engine.load_lora

    async def lenient(lora: Lora) -> None:
        try:
            await load(lora)
        except Rejected:
            engine._loras[lora.name] = LoadedLora(b"", lora_bias(b""))

    replace(engine, "load_lora", lenient)


@engine_of("old_weights", "LORA-09", "A name that was loaded before keeps its first weights.")
def _(engine: ReferenceEngine) -> None:
    load = engine.load_lora
    first: dict[str, LoadedLora] = {}

    async def remembering(lora: Lora) -> None:
        await load(lora)
        engine._loras[lora.name] = first.setdefault(lora.name, engine._loras[lora.name])

    replace(engine, "load_lora", remembering)


@servicer_of("unloads_what_is_used", "LORA-09", "UnloadLora does not wait for the requests of the adapter.")
def _(servicer: OpenEngineServicer) -> None:
    opened = servicer.opened

    def open_hasty(description: EngineDescription) -> None:
        opened(description)
        registry = servicer._loras

        async def claim_at_once(name: str) -> Any:
            entry = registry._entries[name]
            entry.settled.clear()
            return entry

        replace(registry, "_claim_unused", claim_at_once)

    replace(servicer, "opened", open_hasty)


@tampers(
    ("LoadLora", "UnloadLora"), "one_change_at_a_time", "LORA-10",
    "A change of an adapter beside another change of it is ABORTED.",
)  # fmt: skip
class _OneChangeAtATime(Tamper):
    under_way: ClassVar[set[str]] = set()
    _name = ""

    def request(self, request: Any) -> None:
        name = request.adapter.lora_name if hasattr(request, "adapter") else request.lora_name
        if name in self.under_way:
            raise Refuse(grpc.StatusCode.ABORTED, "lora_name: another change is under way")
        self._name = name
        self.under_way.add(name)

    def response(self, response: Any) -> Iterable[Any]:
        self.under_way.discard(self._name)
        return (response,)

    def refusal(self, code: grpc.StatusCode, details: str) -> tuple[grpc.StatusCode, str]:
        self.under_way.discard(self._name)
        return code, details
