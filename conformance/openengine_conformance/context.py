# SPDX-License-Identifier: Apache-2.0
"""What a case gets: typed calls that record what was exchanged, and a promise to clean up."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
from google.protobuf.message import Message

from openengine.v1 import generate_pb2, lifecycle_pb2, observability_pb2
from openengine_conformance.case import Case
from openengine_conformance.checks import Failure, Refused, expect, expect_clean_status, shorten
from openengine_conformance.connection import Connection
from openengine_conformance.exchange import Exchange
from openengine_conformance.offer import Offer
from openengine_conformance.options import Options
from openengine_conformance.stream import Stream
from openengine_conformance.subscription import Subscription

if TYPE_CHECKING:
    from openengine.v1.service_pb2_grpc import OpenEngineAsyncStub

Req = TypeVar("Req", bound=Message)
Res = TypeVar("Res", bound=Message)
T = TypeVar("T")

UnaryRpc = grpc.aio.UnaryUnaryMultiCallable[Req, Res]
StreamRpc = grpc.aio.UnaryStreamMultiCallable[Req, Res]

TEXT_PROMPT = "The quick brown fox jumps over the lazy"
SAFE_IDS = range(33, 127)
"""Token ids that are ordinary tokens of every usual vocabulary, byte-level ones included."""

POLL_INTERVAL = 0.02
CLEANUP_TIMEOUT = 10.0
LONG_OUTPUT = 4000


class Session:
    """One run against one server: its connection, what it offers, and what the cases learnt together."""

    def __init__(self, options: Options, connection: Connection, offer: Offer) -> None:
        self.options = options
        self.connection = connection
        self.offer = offer
        self.run_id = secrets.token_hex(3)
        self._known: dict[str, Any] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._numbers = itertools.count(1)

    def number(self) -> int:
        """Return a number that no other call returned."""
        return next(self._numbers)

    async def learn(self, key: str, find_out: Callable[[], Awaitable[T]]) -> T:
        """Return what `find_out` found under `key`, asking only once in a run."""
        async with self._locks.setdefault(key, asyncio.Lock()):
            if key not in self._known:
                self._known[key] = await find_out()
            found: T = self._known[key]
            return found


class Context:
    """One run of one case."""

    def __init__(self, session: Session, case: Case) -> None:
        self.session = session
        self.options: Options = session.options
        self.offer: Offer = session.offer
        self.connection = session.connection
        self.exchanges: list[Exchange] = []
        self._case = case
        self._cleanup: list[Callable[[], Awaitable[object]]] = []

    @property
    def rpc(self) -> OpenEngineAsyncStub:
        """The service's methods, to be handed to `call`, `refused` and `subscribe`."""
        return self.connection.rpc

    # ------------------------------------------------------------------------------------------- requests

    def new_id(self) -> str:
        """Return a request id that was never used."""
        return f"{self._case.id}-{self.session.run_id}-{self.session.number()}"

    def request(
        self,
        prompt: str | Sequence[int] | None = None,
        *,
        max_tokens: int | None = 8,
        temperature: float | None = 0.0,
        **fields: Any,
    ) -> generate_pb2.GenerateRequest:
        """Return a greedy request for a few tokens; `fields` are further fields of GenerateRequest."""
        request = generate_pb2.GenerateRequest(request_id=self.new_id(), model=self.offer.model)
        if prompt is None:
            prompt = TEXT_PROMPT if self.offer.info.supports_text_input else list(SAFE_IDS)[:12]
        if isinstance(prompt, str):
            request.prompt = prompt
        else:
            request.token_ids.ids.extend(prompt)
        if max_tokens is not None:
            request.stopping.max_tokens = max_tokens
        if temperature is not None:
            request.sampling.temperature = temperature
        request.MergeFrom(generate_pb2.GenerateRequest(**fields))
        return request

    def copy(self, request: generate_pb2.GenerateRequest) -> generate_pb2.GenerateRequest:
        """Return the same request under a new id."""
        twin = generate_pb2.GenerateRequest()
        twin.CopyFrom(request)
        twin.request_id = self.new_id()
        return twin

    def steady(
        self, prompt: str | Sequence[int] | None = None, **fields: Any
    ) -> generate_pb2.GenerateRequest:
        """Return a request that runs past EOS to `max_tokens`, so that its length is known."""
        request = self.request(prompt, **fields)
        request.stopping.ignore_eos = True
        return request

    def endless(
        self, prompt: str | Sequence[int] | None = None, **fields: Any
    ) -> generate_pb2.GenerateRequest:
        """Return a request that runs longer than any case, to be aborted."""
        context = self.offer.info.max_context_length
        length = min(LONG_OUTPUT, context - 64) if context > 128 else 512
        return self.steady(prompt, max_tokens=length, **fields)

    def unique_prompt(self, tokens: int) -> str | list[int]:
        """Return a prompt of about `tokens` tokens that no cache has seen."""
        source = random.Random(f"{self.session.run_id}{self.session.number()}")
        if self.offer.info.supports_token_ids_input:
            return [source.choice(SAFE_IDS) for _ in range(tokens)]
        letters = "abcdefghijklmnopqrstuvwxyz"
        return " ".join("".join(source.choices(letters, k=4)) for _ in range(tokens))

    # ---------------------------------------------------------------------------------------------- calls

    async def call(self, rpc: UnaryRpc[Req, Res], request: Req, *, timeout: float | None = None) -> Res:
        """Make a unary call. Raises `Refused` for a status."""
        exchange = self._record(request)
        try:
            response = await rpc(request, timeout=timeout or self._limit(), metadata=self.connection.metadata)
        except grpc.aio.AioRpcError as error:
            details = error.details() or ""
            exchange.ended(f"{error.code().name}: {details}")
            expect_clean_status(error.code(), details)
            raise Refused(error.code(), details) from None
        except asyncio.CancelledError:
            exchange.ended("no answer before the case's deadline")
            raise
        exchange.saw(response)
        exchange.ended("OK")
        return response

    async def refused(
        self,
        rpc: UnaryRpc[Req, Res] | StreamRpc[Req, Res],
        request: Req,
        *codes: grpc.StatusCode,
        names: str = "",
        rule: str = "",
    ) -> str:
        """Require that the call is refused with one of `codes` before any response; return its message.

        `names` is a field (or several, split by "|") of which the message must name one.
        """
        call = rpc(request, timeout=self._limit(), metadata=self.connection.metadata)
        exchange = self._record(request)
        allowed = " or ".join(code.name for code in codes)
        response: object
        try:
            response = await call if isinstance(call, grpc.aio.UnaryUnaryCall) else await call.read()
        except grpc.aio.AioRpcError:
            response = grpc.aio.EOF
        if isinstance(response, Message):
            exchange.saw(response)
            exchange.ended("answered; cancelled by the suite")
            call.cancel()
            if "error" in response.DESCRIPTOR.fields_by_name and response.HasField("error"):
                raise Failure(f"the refusal came as an EngineError after acceptance, not as {allowed}", rule)
            raise Failure(f"the request was served, not rejected with {allowed}", rule)
        code, details = await call.code(), await call.details() or ""
        exchange.ended(f"{code.name}: {details}")
        if code is grpc.StatusCode.OK:
            raise Failure(f"the call ended OK without a response, not with {allowed}", rule)
        if code not in codes:
            raise Failure(f"the status is {code.name} ({shorten(details)}), not {allowed}", rule)
        if request.DESCRIPTOR.full_name.startswith("openengine."):
            expect_clean_status(code, details)
        wanted = [name for name in names.split("|") if name]
        if wanted and not any(name in details for name in wanted):
            raise Failure(f"the message names no {' or '.join(wanted)}: {shorten(details)}", rule)
        return details

    def open(
        self,
        request: generate_pb2.GenerateRequest,
        *,
        timeout: float | None = None,
        via: Connection | None = None,
        offer: Offer | None = None,
        metadata: Sequence[tuple[str, str]] = (),
    ) -> Stream:
        """Send a Generate request and return its stream, to be read by the case."""
        connection = via or self.connection
        exchange = self._record(request)
        call = connection.rpc.Generate(
            request, timeout=timeout or self._limit(), metadata=[*connection.metadata, *metadata]
        )
        stream = Stream(call, request, (offer or self.offer).role, exchange)

        async def close() -> None:
            if stream.open:
                stream.cancel()
                exchange.ended("cancelled at the case's end")
            if stream.session is not None:
                # A prefilled session holds memory until somebody fetches or ends it.
                request = lifecycle_pb2.AbortRequest(kv_session=stream.session)
                with contextlib.suppress(grpc.aio.AioRpcError):
                    await connection.rpc.Abort(request, timeout=CLEANUP_TIMEOUT, metadata=connection.metadata)

        self.defer(close)
        return stream

    async def generate(self, request: generate_pb2.GenerateRequest, **how: Any) -> Stream:
        """Send a Generate request, read the whole stream, and require that it broke no rule."""
        return await self.open(request, **how).rest()

    async def generate_all(self, *requests: generate_pb2.GenerateRequest) -> list[Stream]:
        """Run several requests at the same time."""
        return list(await asyncio.gather(*(self.generate(request) for request in requests)))

    async def started(self, request: generate_pb2.GenerateRequest) -> Stream:
        """Send a request and return when its first token came."""
        stream = self.open(request)
        await stream.wait_tokens()
        return stream

    def subscribe(
        self, rpc: StreamRpc[Req, Res], request: Req, *, via: Connection | None = None
    ) -> Subscription[Res]:
        """Open a server stream other than Generate."""
        exchange = self._record(request)
        connection = via or self.connection
        call = rpc(request, timeout=self._limit(), metadata=connection.metadata)
        subscription = Subscription(call, exchange)
        self.defer(subscription.close)
        return subscription

    async def raw(self, method: str, payload: bytes) -> Refused | None:
        """Send arbitrary bytes to a method; return the status that it ends with, None for OK."""
        exchange = self._record(payload, method)
        path = f"/openengine.v1.OpenEngine/{method}"
        # Without serializers bytes go in and come out.
        method_of_bytes: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = (
            self.connection.channel.unary_stream(path)
        )
        call = method_of_bytes(payload, timeout=self._limit(), metadata=self.connection.metadata)
        with contextlib.suppress(grpc.aio.AioRpcError):
            while await call.read() is not grpc.aio.EOF:
                exchange.count += 1
        code, details = await call.code(), await call.details() or ""
        exchange.ended(f"{code.name}: {details}")
        return None if code is grpc.StatusCode.OK else Refused(code, details)

    # ---------------------------------------------------------------------------------------- short forms

    async def load(self, *, per_rank: bool = False) -> observability_pb2.LoadInfo:
        """Return the server's load."""
        return await self.call(self.rpc.GetLoad, observability_pb2.GetLoadRequest(include_per_rank=per_rank))

    async def abort(self, request_id: str) -> int:
        """Abort one request and return the status of the answer."""
        answer = await self.call(self.rpc.Abort, lifecycle_pb2.AbortRequest(request_id=request_id))
        return answer.status

    async def still_serves(self, rule: str = "") -> None:
        """Require that a plain request is served after what the case did."""
        try:
            await self.generate(self.request(max_tokens=2))
        except Refused as refused:
            raise Failure(f"the server does not serve a plain request afterwards: {refused}", rule) from None

    async def idle(self) -> bool:
        """Whether the server reports no request, running or queued."""
        load = await self.load()
        expect(
            load.HasField("running_requests"),
            "running_requests is absent: nobody can tell a free slot",
            "LOAD-01",
        )
        return load.running_requests == 0 and load.queued_requests == 0

    async def until(
        self,
        condition: Callable[[], Awaitable[object]],
        what: str,
        rule: str = "",
        *,
        within: float,
        every: float = POLL_INTERVAL,
    ) -> None:
        """Poll until `condition` holds; fail when it does not `within` that many seconds."""
        end = time.monotonic() + within
        while not await condition():
            expect(time.monotonic() < end, f"{what} within {within:g} s", rule)
            await asyncio.sleep(every)

    # ------------------------------------------------------------------------------------------- clean-up

    def defer(self, undo: Callable[[], Awaitable[object]]) -> None:
        """Run `undo` when the case has ended, however it ended; the last one registered runs first."""
        self._cleanup.append(undo)

    @contextlib.asynccontextmanager
    async def connect(self, target: str = "", *, tiny_window: bool = False) -> AsyncIterator[Connection]:
        """Open another channel, to this server unless `target` names one."""
        connection = Connection(target or self.options.target, self.options.access, tiny_window=tiny_window)
        try:
            yield connection
        finally:
            await connection.close()

    async def clean_up(self) -> list[str]:
        """Undo what the case did, and return what could not be undone."""
        problems = []
        while self._cleanup:
            undo = self._cleanup.pop()
            try:
                async with asyncio.timeout(CLEANUP_TIMEOUT):
                    await undo()
            except (Exception, asyncio.CancelledError) as error:  # the next undo must still run
                problems.append(f"clean-up failed: {error!r}")
        return problems

    def _record(self, request: Message | bytes, method: str = "") -> Exchange:
        name = method or type(request).__name__.removesuffix("Request")
        exchange = Exchange(name, request)
        self.exchanges.append(exchange)
        return exchange

    def _limit(self) -> float:
        # A little more than the case has: the case's own deadline, which says more, comes first.
        return (self._case.timeout or 0) + self.options.timeout + 5
