"""Where a mutant takes hold: the messages of one RPC, the engine behind the port, or the servicer's helpers.

A mutant is registered by one of the decorators below. Each takes the mutant's name, the requirement that it breaks,
and a sentence that says how.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc

from openengine_adapters.core.servicer import OpenEngineServicer
from openengine_adapters.engine import Step
from openengine_adapters.reference.engine import ReferenceEngine
from openengine_adapters.reference.generation import Generation
from openengine_adapters.reference.scheduler import Scheduler

Handler = Callable[[Any, Any], Awaitable[Any]]


class Tamper:
    """What a mutant does to one call; as it stands, nothing."""

    def request(self, request: Any) -> None:
        """Change the request in place, before the server sees it; may raise `Refuse`."""

    def response(self, response: Any) -> Iterable[Any]:
        """Return what is sent instead of a response; may raise `Refuse`."""
        return (response,)

    def refusal(self, code: grpc.StatusCode, details: str) -> tuple[grpc.StatusCode, str]:
        """Return the status that a refused call gets instead; may raise `Answer`."""
        return code, details

    def end(self) -> Iterable[Any]:
        """Return what is sent after the last response of a stream."""
        return ()

    sends_headers = True
    """Whether the initial metadata goes out when the server sends it."""


class Refuse(Exception):
    """Ends the call with a status instead of a response."""

    def __init__(self, code: grpc.StatusCode, details: str = "") -> None:
        super().__init__(details)
        self.code = code
        self.details = details


class Answer(Exception):
    """Answers the call instead of refusing it."""

    def __init__(self, response: Any) -> None:
        super().__init__()
        self.response = response


@dataclass(frozen=True)
class Mutant:
    """A way to break one requirement.

    `settings` are the engine settings under which it shows, `options` further options of the suite for it.
    """

    name: str
    breaks: str
    sentence: str
    on_engine: Callable[[ReferenceEngine], None] | None = None
    on_servicer: Callable[[OpenEngineServicer], None] | None = None
    on_rpc: Mapping[str, Callable[[], Tamper]] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    def spoil_engine(self, engine: ReferenceEngine) -> ReferenceEngine:
        """Spoil an engine that was not started yet, and return it."""
        if self.on_engine is not None:
            self.on_engine(engine)
        return engine

    def servicer_type(self) -> type[OpenEngineServicer]:
        """A servicer that is spoilt from its making on."""

        class Spoilt(OpenEngineServicer):
            def __init__(servicer, *arguments: Any, **options: Any) -> None:  # self is the mutant
                super().__init__(*arguments, **options)
                self.spoil_servicer(servicer)

        return Spoilt

    def spoil_servicer(self, servicer: OpenEngineServicer) -> OpenEngineServicer:
        """Spoil a servicer that no server has yet, and return it."""
        if self.on_servicer is not None:
            self.on_servicer(servicer)
        for rpc, tamper in self.on_rpc.items():
            setattr(servicer, rpc, _tampered(getattr(servicer, rpc), tamper))
        return servicer


MUTANTS: dict[str, Mutant] = {}
"""Every mutant by its name."""


def register(mutant: Mutant) -> None:
    """Add a mutant."""
    if mutant.name in MUTANTS:
        raise ValueError(f"two mutants are called {mutant.name}")
    MUTANTS[mutant.name] = mutant


# --------------------------------------------------------------------------------------------- registration

Extra = Mapping[str, Any] | None


def tampers(
    rpc: str | tuple[str, ...], name: str, breaks: str, sentence: str, **more: Any
) -> Callable[[type[Tamper]], type[Tamper]]:
    """Register a `Tamper`, made anew for each call of `rpc`."""

    def decorate(tamper: type[Tamper]) -> type[Tamper]:
        rpcs = (rpc,) if isinstance(rpc, str) else rpc
        register(Mutant(name, breaks, sentence, on_rpc=dict.fromkeys(rpcs, tamper), **more))
        return tamper

    return decorate


def request_of(
    rpc: str | tuple[str, ...], name: str, breaks: str, sentence: str, **more: Any
) -> Callable[[Callable[[Any], None]], None]:
    """Register a function that changes requests in place."""

    def decorate(change: Callable[[Any], None]) -> None:
        class Changed(Tamper):
            def request(self, request: Any) -> None:
                change(request)

        tampers(rpc, name, breaks, sentence, **more)(Changed)

    return decorate


def response_of(
    rpc: str | tuple[str, ...], name: str, breaks: str, sentence: str, **more: Any
) -> Callable[[Callable[[Any], Any]], None]:
    """Register a function that changes responses in place, or returns those to be sent instead."""

    def decorate(change: Callable[[Any], Any]) -> None:
        class Changed(Tamper):
            def response(self, response: Any) -> Iterable[Any]:
                instead = change(response)
                return (response,) if instead is None else instead

        tampers(rpc, name, breaks, sentence, **more)(Changed)

    return decorate


def status_of(
    rpc: str | tuple[str, ...], name: str, breaks: str, sentence: str, **more: Any
) -> Callable[[Callable[[grpc.StatusCode], grpc.StatusCode]], None]:
    """Register a function from the status of a refusal to another one; it may raise `Answer`."""

    def decorate(change: Callable[[grpc.StatusCode], grpc.StatusCode]) -> None:
        class Changed(Tamper):
            def refusal(self, code: grpc.StatusCode, details: str) -> tuple[grpc.StatusCode, str]:
                return change(code), details

        tampers(rpc, name, breaks, sentence, **more)(Changed)

    return decorate


def engine_of(
    name: str, breaks: str, sentence: str, **more: Any
) -> Callable[[Callable[[ReferenceEngine], None]], None]:
    """Register a function that spoils the engine."""

    def decorate(spoil: Callable[[ReferenceEngine], None]) -> None:
        register(Mutant(name, breaks, sentence, on_engine=spoil, **more))

    return decorate


def servicer_of(
    name: str, breaks: str, sentence: str, **more: Any
) -> Callable[[Callable[[OpenEngineServicer], None]], None]:
    """Register a function that spoils the servicer's helpers."""

    def decorate(spoil: Callable[[OpenEngineServicer], None]) -> None:
        register(Mutant(name, breaks, sentence, on_servicer=spoil, **more))

    return decorate


def work_of(
    name: str, breaks: str, sentence: str, **more: Any
) -> Callable[[Callable[[Generation], None]], None]:
    """Register a function that spoils each Generate request in the engine, before it is queued."""

    def decorate(spoil: Callable[[Generation], None]) -> None:
        def spoil_engine(engine: ReferenceEngine) -> None:
            stream = engine._stream

            def spoilt(scheduler: Scheduler, work: Generation) -> AsyncGenerator[Step, None]:
                spoil(work)
                return stream(scheduler, work)

            replace(engine, "_stream", spoilt)

        register(Mutant(name, breaks, sentence, on_engine=spoil_engine, **more))

    return decorate


def replace(target: object, name: str, value: object) -> None:
    """Put another method into one object."""
    setattr(target, name, value)


# -------------------------------------------------------------------------------------------------- tampering


class _Context:
    """The call's context, with the tamper between it and the handler."""

    def __init__(self, context: Any, tamper: Tamper) -> None:
        self._context = context
        self._tamper = tamper

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def write(self, response: Any) -> None:
        for instead in self._tamper.response(response):
            await self._context.write(instead)

    async def abort(self, code: grpc.StatusCode, details: str = "", *more: Any) -> None:
        code, details = self._tamper.refusal(code, details)
        await self._context.abort(code, details, *more)

    async def send_initial_metadata(self, metadata: Any) -> None:
        if self._tamper.sends_headers:
            await self._context.send_initial_metadata(metadata)


def _tampered(handler: Handler, make: Callable[[], Tamper]) -> Handler:
    async def call(request: Any, context: Any) -> Any:
        tamper = make()
        try:
            tamper.request(request)
            answer = await handler(request, _Context(context, tamper))
            if answer is not None:
                (instead,) = tamper.response(answer)
                return instead
            for extra in tamper.end():
                await context.write(extra)
        except Answer as answered:
            return answered.response
        except Refuse as refused:
            await context.abort(refused.code, refused.details)
        return None

    return call
