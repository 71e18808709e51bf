"""A generation as a stream of typed events."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import grpc.aio

from openengine.v1 import generate_pb2, kv_pb2
from openengine_adapters.client.errors import ClientError, ContractViolation, EngineError
from openengine_adapters.client.messages import enum_name
from openengine_adapters.client.streams import ResponseStream


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """The prompt's tokens with their log-probabilities, when these were asked for."""

    tokens: Sequence[generate_pb2.TokenInfo]


@dataclass(frozen=True, slots=True)
class Tokens:
    """What one output gained: new token records and the text they bring, neither of it cumulative."""

    index: int
    text: str
    tokens: Sequence[generate_pb2.TokenInfo]


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of one output. `stop` is set when `reason` is STOP; `usage` comes with the last output."""

    index: int
    reason: str  # STOP, LENGTH, CANCELLED; UNSPECIFIED for one that this client does not know
    message: str
    stop: generate_pb2.StopMatch | None
    usage: generate_pb2.Usage | None


@dataclass(frozen=True, slots=True)
class PrefillReady:
    """A prefill engine's answer: hand `session` unchanged to a decode engine."""

    session: kv_pb2.KvSessionRef
    usage: generate_pb2.Usage | None


GenerateEvent: TypeAlias = PromptTokens | Tokens | Finished | PrefillReady


@dataclass(slots=True)
class Output:
    """One whole output."""

    text: str = ""
    tokens: list[generate_pb2.TokenInfo] = field(default_factory=list)
    finish: Finished | None = None


@dataclass(slots=True)
class Result:
    """A whole generation; `session` is set by a prefill engine."""

    outputs: list[Output]
    prompt: Sequence[generate_pb2.TokenInfo] = ()
    session: kv_pb2.KvSessionRef | None = None
    usage: generate_pb2.Usage | None = None


class Generation(ResponseStream[generate_pb2.GenerateResponse, GenerateEvent]):
    """One request's events, up to the end of its last output.

    Iteration raises `RpcRejected` when the server does not accept the request and `EngineError` when it fails
    after that. `usage` is there once the stream has ended.
    """

    def __init__(
        self,
        call: grpc.aio.UnaryStreamCall[Any, generate_pb2.GenerateResponse],
        failure: Callable[[grpc.aio.AioRpcError, bool], ClientError],
        request: generate_pb2.GenerateRequest,
    ) -> None:
        super().__init__(call, failure)
        sampling = request.sampling
        self.request_id = request.request_id
        self.num_sequences = sampling.num_sequences if sampling.HasField("num_sequences") else 1
        self.usage: generate_pb2.Usage | None = None
        self._finished: set[int] = set()

    async def collect(self) -> Result:
        """Read to the end and return everything that came."""
        result = Result([Output() for _ in range(self.num_sequences)])
        async for event in self:
            match event:
                case PromptTokens(tokens):
                    result.prompt = tokens
                case Tokens(index, text, tokens):
                    result.outputs[index].text += text
                    result.outputs[index].tokens.extend(tokens)
                case Finished(index):
                    result.outputs[index].finish = event
                case PrefillReady(session):
                    result.session = session
        result.usage = self.usage
        return result

    def _item(self, response: generate_pb2.GenerateResponse) -> GenerateEvent | None:
        if response.HasField("usage"):
            self.usage = response.usage
        match response.WhichOneof("event"):
            case "token":
                token = response.token
                return Tokens(self._index(token.output_index), token.text, token.tokens)
            case "finished":
                return self._finish(response.finished)
            case "prompt":
                return PromptTokens(response.prompt.tokens)
            case "prefill_ready":
                self._complete = True
                return PrefillReady(response.prefill_ready.kv_session, self.usage)
            case "error":
                self._complete = True
                raise EngineError(response.error, self.usage)
            case _:
                return None  # a kind of event that this client does not know

    def _finish(self, finished: generate_pb2.GenerationFinished) -> Finished:
        index = self._index(finished.output_index)
        self._finished.add(index)
        self._complete = len(self._finished) == self.num_sequences
        reason = enum_name(generate_pb2.FinishReason, finished.reason)
        stop = finished.stop_match if finished.HasField("stop_match") else None
        return Finished(index, reason, finished.message, stop, self.usage)

    def _index(self, index: int) -> int:
        if index >= self.num_sequences:
            raise ContractViolation(f"the server sent output {index} of a request for {self.num_sequences}")
        return index

    def _check_end(self) -> None:
        if not self._complete:
            ended = f"{len(self._finished)} of {self.num_sequences} outputs"
            raise ContractViolation(f"the server ended the stream after {ended}, without an error")
