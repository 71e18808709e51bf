# SPDX-License-Identifier: Apache-2.0
"""A Generate stream as a case reads it: event by event or whole, always under the stream's rules."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import NoReturn

import grpc

from openengine.v1 import errors_pb2, generate_pb2, kv_pb2
from openengine_conformance.checks import Failure, Refused, expect_clean_status
from openengine_conformance.exchange import Exchange
from openengine_conformance.stream_rules import StreamRules, Violation

Call = grpc.aio.UnaryStreamCall[generate_pb2.GenerateRequest, generate_pb2.GenerateResponse]


@dataclass
class Output:
    """What came for one output index."""

    records: list[generate_pb2.TokenInfo] = field(default_factory=list)
    pieces: list[tuple[int, str]] = field(default_factory=list)  # records so far and text, for each delta
    finished: generate_pb2.GenerationFinished | None = None

    @property
    def ids(self) -> list[int]:
        """The token ids, in order."""
        return [record.token_id for record in self.records]

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(text for _, text in self.pieces)

    def text_of(self, records: int) -> str:
        """The text of the deltas that hold the first `records` records."""
        return "".join(text for count, text in self.pieces if count <= records)


class Stream:
    """One Generate call. `headers_at`, `first_at` and `ended_at` are seconds after it was sent."""

    def __init__(
        self, call: Call, request: generate_pb2.GenerateRequest, role: int, exchange: Exchange
    ) -> None:
        self.request = request
        self.exchange = exchange
        self.responses: list[generate_pb2.GenerateResponse] = []
        self.outputs: dict[int, Output] = {}
        self.prompt: generate_pb2.PromptOutput | None = None
        self.session: kv_pb2.KvSessionRef | None = None
        self.error: errors_pb2.EngineError | None = None
        self.usage: generate_pb2.Usage | None = None
        self.status: grpc.StatusCode | None = None
        self.details = ""
        self.headers_at: float | None = None
        self.first_at: float | None = None
        self.ended_at: float | None = None
        self._call = call
        self._rules = StreamRules(request, role)
        self._began = time.monotonic()
        self._cancelled = False

    @property
    def id(self) -> str:
        """The request's id."""
        return self.request.request_id

    @property
    def first(self) -> Output:
        """Output 0."""
        return self.outputs.setdefault(0, Output())

    @property
    def finish(self) -> generate_pb2.GenerationFinished:
        """How output 0 finished."""
        if self.first.finished is None:
            raise Failure("output 0 has no GenerationFinished")
        return self.first.finished

    @property
    def violations(self) -> list[Violation]:
        """The stream rules broken so far."""
        return self._rules.violations

    async def accepted(self) -> None:
        """Wait until the server accepted the request, which its initial metadata tells. Raises `Refused`."""
        await self._call.initial_metadata()
        if self.headers_at is None:
            self.headers_at = time.monotonic() - self._began
            self.exchange.saw_headers()
        if not self.responses and self._call.done() and await self._call.code() is not grpc.StatusCode.OK:
            await self._end()
            self._raise_refused()

    async def read(self) -> generate_pb2.GenerateResponse | None:
        """Return the next response, None at the end. Raises `Refused` for a status before any response."""
        if self.status is not None:
            return None
        try:
            response = await self._call.read()
        except grpc.aio.AioRpcError:
            response = grpc.aio.EOF
        except asyncio.CancelledError:
            # grpc raises this for a call that was cancelled, and asyncio for a task that is.
            if not self._cancelled:
                raise
            response = grpc.aio.EOF
        if not isinstance(response, generate_pb2.GenerateResponse):
            await self._end()
            if not self.responses and self.status is not grpc.StatusCode.OK:
                self._raise_refused()
            return None
        self._take(response)
        return response

    async def wait_tokens(self, count: int = 1, index: int | None = None) -> None:
        """Read until `count` token records came, of one output or of any; fails when the stream ends first."""
        while self._records(index) < count:
            if await self.read() is None:
                raise Failure(f"the stream ended before token {count} came: {self._how_it_ended()}")

    async def rest(self) -> Stream:
        """Read to the end, and fail if the stream broke a rule or ended with an EngineError."""
        await self.drain()
        self.check()
        if self.error is not None:
            code = errors_pb2.ErrorCode.Name(self.error.code)
            raise Failure(f"the request ended with EngineError {code}: {self.error.message}")
        if self.status is not grpc.StatusCode.OK and not self._cancelled:
            raise Failure(f"the stream ended with status {self._how_it_ended()}")
        return self

    async def outcome(self) -> grpc.StatusCode:
        """Read to the end and return the status; a stream that was accepted must keep the rules."""
        try:
            await self.drain()
        except Refused as refused:
            return refused.code
        self.check()
        return self.status or grpc.StatusCode.UNKNOWN

    async def drain(self) -> Stream:
        """Read to the end without judging it."""
        while await self.read() is not None:
            pass
        return self

    def check(self, rule: str = "") -> None:
        """Fail for the first broken rule of the stream, or for the first breach of `rule`."""
        for violation in self.violations:
            if not rule or violation.rule == rule:
                raise Failure(violation.problem, violation.rule)

    def cancel(self) -> None:
        """Cancel the call as a client that goes away does."""
        self._cancelled = True
        self._call.cancel()

    @property
    def open(self) -> bool:
        """Whether the call still runs."""
        return not self._call.done()

    def _take(self, response: generate_pb2.GenerateResponse) -> None:
        if self.first_at is None:
            self.first_at = time.monotonic() - self._began
        self.responses.append(response)
        self.exchange.saw(response)
        self._rules.see(response)
        match response.WhichOneof("event"):
            case "prompt":
                self.prompt = response.prompt
            case "token":
                output = self.outputs.setdefault(response.token.output_index, Output())
                output.records.extend(response.token.tokens)
                output.pieces.append((len(output.records), response.token.text))
            case "finished":
                self.outputs.setdefault(response.finished.output_index, Output()).finished = response.finished
            case "prefill_ready":
                self.session = response.prefill_ready.kv_session
            case "error":
                self.error = response.error
        if response.HasField("usage"):
            self.usage = response.usage

    async def _end(self) -> None:
        self.status = await self._call.code()
        self.details = await self._call.details() or ""
        self.ended_at = time.monotonic() - self._began
        self.exchange.ended(self._how_it_ended())
        own = self.status is grpc.StatusCode.DEADLINE_EXCEEDED or self._cancelled
        self._rules.end(self.status is grpc.StatusCode.OK, self._how_it_ended(), caused_by_client=own)

    def _how_it_ended(self) -> str:
        status = self.status or grpc.StatusCode.OK
        return f"{status.name}: {self.details}" if self.details else status.name

    def _records(self, index: int | None) -> int:
        if index is not None:
            return len(self.outputs[index].records) if index in self.outputs else 0
        return sum(len(output.records) for output in self.outputs.values())

    def _raise_refused(self) -> NoReturn:
        code = self.status or grpc.StatusCode.UNKNOWN
        expect_clean_status(code, self.details)
        raise Refused(code, self.details)
