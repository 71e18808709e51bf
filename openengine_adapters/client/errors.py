"""What a call can end in when it does not succeed. Every class here is a `ClientError`.

The contract gives each failure one transport: a status before the server accepted the request
(`RpcRejected`), one terminal event after that (`EngineError`). The rest says that no proper answer came.
"""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio
from google.protobuf import json_format

from openengine.v1 import errors_pb2, generate_pb2
from openengine_adapters.client.messages import enum_name

_NO_CONNECTION = "failed to connect to all addresses"  # how gRPC begins when no attempt succeeded
_CUT_OFF = ("Stream removed", "Cancelling all calls", "Socket closed")  # and when a connection closed


class ClientError(Exception):
    """Anything that kept a call from succeeding."""


class Unreachable(ClientError):
    """No connection to the server; nothing was sent."""

    def __init__(self, target: str, reason: str) -> None:
        super().__init__(f"cannot reach {target}: {reason}")
        self.target = target
        self.reason = reason


class Incompatible(ClientError):
    """The server speaks another revision of the contract, or none: nothing is sent to it (DISC-11)."""

    def __init__(self, target: str, theirs: str, ours: str) -> None:
        super().__init__(f"{target} is not compatible: server {theirs}; this client {ours}")
        self.target = target
        self.theirs = theirs
        self.ours = ours


class RpcRejected(ClientError):
    """The server answered with a status: it did not accept the request, or a unary call failed."""

    def __init__(self, rpc: str, code: grpc.StatusCode, message: str) -> None:
        super().__init__(f"{rpc} rejected: {_status_text(code, message)}")
        self.rpc = rpc
        self.code = code
        self.message = message


class TimedOut(ClientError):
    """The call's own deadline ran out; the server was told to stop."""

    def __init__(self, rpc: str, timeout: float | None) -> None:
        super().__init__(f"{rpc} did not end {_within(timeout)}")
        self.rpc = rpc
        self.timeout = timeout


class ConnectionLost(ClientError):
    """The connection broke while the call ran: what the server did with the request is unknown."""

    def __init__(self, rpc: str, reason: str) -> None:
        super().__init__(f"{rpc} was cut off: {reason}")
        self.rpc = rpc
        self.reason = reason


class ContractViolation(ClientError):
    """The server sent something that the contract rules out, such as a stream without an end."""


class EngineError(ClientError):
    """The failure of a request that the server had accepted: the terminal event of its stream.

    `retryable` says whether the unchanged request can succeed later, `retry_after_ms` after how long.
    """

    def __init__(self, error: errors_pb2.EngineError, usage: generate_pb2.Usage | None = None) -> None:
        self.code = enum_name(errors_pb2.ErrorCode, error.code)
        super().__init__(f"{self.code}: {error.message}" if error.message else self.code)
        self.message = error.message
        self.retryable = error.retryable
        self.retry_after_ms = error.retry_after_ms if error.HasField("retry_after_ms") else None
        self.details: dict[str, Any] = json_format.MessageToDict(error.details)
        self.usage = usage


def from_status(
    error: grpc.aio.AioRpcError,
    began: bool,
    *,
    channel: grpc.aio.Channel,
    target: str,
    rpc: str,
    timeout: float | None,
) -> ClientError:
    """Return what a non-OK status means. `began`: an event of the call's stream had arrived before.

    gRPC reports a refused connection, a broken one and a server that says UNAVAILABLE alike. The channel's
    state tells them apart: it is READY only while the connection lives, give or take a moment.
    """
    code, message = error.code(), error.details() or ""
    state = channel.get_state()
    connected = state is grpc.ChannelConnectivity.READY
    connecting = state in (grpc.ChannelConnectivity.CONNECTING, grpc.ChannelConnectivity.TRANSIENT_FAILURE)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        if connecting and not began:
            return Unreachable(target, f"no connection {_within(timeout)}")
        return TimedOut(rpc, timeout)
    if code is grpc.StatusCode.UNAVAILABLE and not began and message.startswith(_NO_CONNECTION):
        return Unreachable(target, message)  # the channel may have connected since
    if code is grpc.StatusCode.UNAVAILABLE and message.startswith(_CUT_OFF):
        return ConnectionLost(rpc, message)
    if code is grpc.StatusCode.UNAVAILABLE and not connected:
        return ConnectionLost(rpc, message) if began or not connecting else Unreachable(target, message)
    return ConnectionLost(rpc, _status_text(code, message)) if began else RpcRejected(rpc, code, message)


def _status_text(code: grpc.StatusCode, message: str) -> str:
    return f"{code.name}: {message}" if message else code.name


def _within(timeout: float | None) -> str:
    return f"within {timeout:g} s" if timeout else "in time"
