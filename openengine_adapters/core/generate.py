"""Generate, from the request to the last response.

Validate, claim the id, let the engine admit the request, send the initial metadata - from here on the request
is accepted (GEN-08) - and stream. What fails before is a status, what fails after is one EngineError (ERR-01).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import AsyncGenerator, Mapping

import grpc

from openengine.v1 import discovery_pb2, generate_pb2
from openengine_adapters.core.errors import EngineDied, EngineFailure, Rejected, unexpected
from openengine_adapters.core.lora import LoraRegistry
from openengine_adapters.core.media import MediaLoader
from openengine_adapters.core.requests import ActiveRequest, RequestTable
from openengine_adapters.core.stops import StopFilter
from openengine_adapters.core.stream import ResponseStream
from openengine_adapters.core.validation import stop_texts, wants_several
from openengine_adapters.engine import Engine, EngineDescription, FinishKind, GenerateCall, Lora, Step

log = logging.getLogger(__name__)

GenerateContext = grpc.aio.ServicerContext[generate_pb2.GenerateRequest, generate_pb2.GenerateResponse]

REREAD_S = 0.5
"""How often, in seconds, a stalled reader is looked after."""

TRACE_KEYS = ("traceparent", "tracestate")


async def run_generate(
    engine: Engine,
    description: EngineDescription,
    requests: RequestTable,
    loras: LoraRegistry,
    media: MediaLoader,
    request: generate_pb2.GenerateRequest,
    context: GenerateContext,
) -> None:
    """Serve one validated request. Raises `Rejected` before acceptance, and nothing after it."""
    try:
        await _serve(engine, description, requests, loras, media, request, context)
    except _Stalled as stalled:
        # The id and the engine's slot are free by now; what is left is a few words for the reader.
        await _write_once_read(context, stalled.last)


async def _serve(
    engine: Engine,
    description: EngineDescription,
    requests: RequestTable,
    loras: LoraRegistry,
    media: MediaLoader,
    request: generate_pb2.GenerateRequest,
    context: GenerateContext,
) -> None:
    with requests.claim(request.request_id) as active:
        async with loras.use(request.lora_name) as lora:
            call = _call(active, request, lora, context)
            responder = _Responder(engine, description, requests, request, active, context)
            try:
                stream = await _admit(engine, call, requests, active, media)
                async with contextlib.aclosing(stream):
                    await context.send_initial_metadata(())
                    await responder.run(stream)
            finally:
                if not responder.complete:
                    # Closing a generator that never ran frees nothing, nor does cancelling an admission halfway.
                    await engine.abort(call.id)


async def _admit(
    engine: Engine, call: GenerateCall, requests: RequestTable, active: ActiveRequest, loader: MediaLoader
) -> AsyncGenerator[Step, None]:
    aborted = Rejected(grpc.StatusCode.CANCELLED, "the request was aborted before it was accepted")
    try:
        if call.request.media:
            media = await loader.for_request().load("media", call.request.media)
            call = dataclasses.replace(call, media=media)
        if active.aborted:
            raise aborted
        stream = await engine.generate(call)
    except EngineDied as death:
        requests.report_death(active, death)
        raise Rejected(grpc.StatusCode.UNAVAILABLE, str(death)) from death
    except EngineFailure as failure:
        raise Rejected(grpc.StatusCode.INTERNAL, str(failure)) from failure
    except asyncio.CancelledError:
        if active.aborted:
            raise aborted from None
        if active.failure is not None:
            raise Rejected(grpc.StatusCode.UNAVAILABLE, str(active.failure)) from None
        raise
    if active.aborted:
        raise aborted
    return stream


def _call(
    active: ActiveRequest, request: generate_pb2.GenerateRequest, lora: Lora | None, context: GenerateContext
) -> GenerateCall:
    include = request.stopping.include_stop_in_output
    return GenerateCall(
        id=active.call_id,
        request=request,
        keep_stop=include or bool(stop_texts(request.stopping)),
        lora=lora,
        trace_headers=trace_headers(request.metadata, context),
    )


def trace_headers(metadata: Mapping[str, str], context: GenerateContext) -> dict[str, str]:
    """W3C trace context, from the request's metadata or from gRPC's (GEN-07)."""
    headers = {key: metadata[key] for key in TRACE_KEYS if key in metadata}
    for key, value in context.invocation_metadata() or ():
        if key in TRACE_KEYS and isinstance(value, str):
            headers.setdefault(key, value)
    return headers


class _Responder:
    """Writes one accepted request's responses and makes sure that the last one ends it."""

    def __init__(
        self,
        engine: Engine,
        description: EngineDescription,
        requests: RequestTable,
        request: generate_pb2.GenerateRequest,
        active: ActiveRequest,
        context: GenerateContext,
    ) -> None:
        prefill = description.role == discovery_pb2.ENGINE_ROLE_PREFILL
        outputs = 0 if prefill else wants_several(request.sampling)
        stops = stop_texts(request.stopping)
        filters: dict[int, StopFilter] = {}
        if stops and not request.stopping.include_stop_in_output:
            filters = {index: StopFilter(stops, engine.decode) for index in range(outputs)}
        self._responses = ResponseStream(
            request.request_id,
            outputs,
            engine.token_text,
            wants_prompt=request.response.return_prompt_logprobs,
            drop_stop_token=not request.stopping.include_stop_in_output,
            filters=filters,
        )
        self.complete = False
        self._requests = requests
        self._active = active
        self._context = context
        self._engine = engine
        self._clock = asyncio.get_running_loop().time

    async def run(self, stream: AsyncGenerator[Step, None]) -> None:
        """Stream until the engine is done, or until something ends the request from outside."""
        responses = self._responses
        try:
            async for step in stream:
                given_up = self._take_cancellations(step)
                for response in responses.push(step):
                    await self._write(response)
                if given_up:
                    self._engine.check()
                    raise EngineFailure("the engine gave the request up", retryable=True)
                if self._active.failure is not None and not responses.ended:
                    raise self._active.failure
                if responses.ended:
                    self.complete = True
                    return
            last = responses.cancel() if self._active.aborted else responses.close()
        except EngineFailure as failure:
            if isinstance(failure, EngineDied):
                self._requests.report_death(self._active, failure)
            last = responses.fail(failure)
        except Rejected as late:
            last = responses.fail(late.as_failure())
        except Exception:
            last = responses.fail(unexpected("Generate"))
        except asyncio.CancelledError:
            failure_outside = self._active.failure
            if failure_outside is None:
                raise
            _uncancel()
            last = responses.cancel() if self._active.aborted else responses.fail(failure_outside)
            if self._active.writing_since is not None:
                raise _Stalled(last) from None
        for response in last:
            await self._write(response)

    def _take_cancellations(self, step: Step) -> bool:
        """Take away the CANCELLED finishes that nobody asked for: an engine that goes down ends its requests so.

        They are failures (STREAM-09); what the step has beside them is still the caller's.
        """
        if self._active.aborted:
            return False
        cancelled = [
            delta
            for delta in step.deltas
            if delta.finish is not None and delta.finish.kind is FinishKind.CANCELLED
        ]
        for delta in cancelled:
            delta.finish = None
        return bool(cancelled)

    async def _write(self, response: generate_pb2.GenerateResponse) -> None:
        self._active.writing_since = self._clock()
        await self._context.write(response)
        self._active.writing_since = None


class _Stalled(Exception):
    """The reader stopped reading; `last` is what it gets if it ever reads again."""

    def __init__(self, last: list[generate_pb2.GenerateResponse]) -> None:
        super().__init__("the client stopped reading")
        self.last = last


async def _write_once_read(context: GenerateContext, last: list[generate_pb2.GenerateResponse]) -> None:
    """End the stream properly once the reader takes the message that it left lying, or until it is gone.

    gRPC refuses a second write while one is pending. It cancels this task when the client disconnects.
    """
    for response in last:
        while True:
            try:
                await context.write(response)
                break
            except grpc.aio.InternalError:
                await asyncio.sleep(REREAD_S)


def _uncancel() -> None:
    """The cancellation was ours (`ActiveRequest.interrupt`) and has been dealt with."""
    task = asyncio.current_task()
    if task is not None:
        task.uncancel()
