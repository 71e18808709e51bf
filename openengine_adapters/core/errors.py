"""The error model: one failure, one transport (ERR-01).

`Rejected` is a failure before acceptance and becomes a gRPC status. `EngineFailure` is a failure after
acceptance and becomes the one terminal `EngineError` of its stream.
"""

from __future__ import annotations

import logging
import uuid
from typing import Any

import grpc
from google.protobuf import struct_pb2

from openengine.v1 import errors_pb2

log = logging.getLogger(__name__)

Code = errors_pb2.ErrorCode

_STATUS_TO_ERROR_CODE: dict[grpc.StatusCode, errors_pb2.ErrorCode.ValueType] = {
    grpc.StatusCode.INVALID_ARGUMENT: errors_pb2.ERROR_CODE_INVALID_ARGUMENT,
    grpc.StatusCode.OUT_OF_RANGE: errors_pb2.ERROR_CODE_INVALID_ARGUMENT,
    grpc.StatusCode.UNIMPLEMENTED: errors_pb2.ERROR_CODE_UNSUPPORTED_FEATURE,
    grpc.StatusCode.FAILED_PRECONDITION: errors_pb2.ERROR_CODE_UNSUPPORTED_FEATURE,
    grpc.StatusCode.NOT_FOUND: errors_pb2.ERROR_CODE_REQUEST_NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS: errors_pb2.ERROR_CODE_DUPLICATE_REQUEST,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors_pb2.ERROR_CODE_OVERLOADED,
    grpc.StatusCode.CANCELLED: errors_pb2.ERROR_CODE_CANCELLED,
}


class Rejected(Exception):
    """A request refused before acceptance: a gRPC status and no event.

    `field` is the request's own path (``sampling.top_p``); the message begins with it, so that a caller can
    find what to change. `limit` and `value` are what was allowed and what came.
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        reason: str,
        *,
        field: str = "",
        limit: object = None,
        value: object = None,
    ) -> None:
        super().__init__(f"{field}: {reason}" if field else reason)
        self.code = code
        self.reason = reason
        self.field = field
        self.limit = limit
        self.value = value

    def as_failure(self) -> EngineFailure:
        """Return the same refusal for an engine that reports it only after acceptance."""
        details = {"field": self.field, "reason": self.reason, "limit": self.limit, "value": self.value}
        return EngineFailure(
            str(self),
            code=_STATUS_TO_ERROR_CODE.get(self.code, errors_pb2.ERROR_CODE_INTERNAL),
            retryable=self.code in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE),
            details={key: value for key, value in details.items() if value not in (None, "")},
        )


def invalid(field: str, reason: str, *, limit: object = None, value: object = None) -> Rejected:
    """INVALID_ARGUMENT for one field of the request."""
    return Rejected(grpc.StatusCode.INVALID_ARGUMENT, reason, field=field, limit=limit, value=value)


class EngineFailure(Exception):
    """A failure after acceptance: the stream's one terminal EngineError (STREAM-05).

    `retryable` says whether the unchanged request can succeed later; `retry_after_ms` is sent only then
    (ERR-02). `details` has the keys field, reason, limit, value, or engine-specific ones that begin with the
    engine's name and a dot (ERR-03).
    """

    def __init__(
        self,
        message: str,
        *,
        code: errors_pb2.ErrorCode.ValueType = errors_pb2.ERROR_CODE_INTERNAL,
        retryable: bool = False,
        retry_after_ms: int | None = None,
        details: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.retryable = retryable
        self.retry_after_ms = retry_after_ms if retryable else None
        self.details = details or {}

    def to_proto(self) -> errors_pb2.EngineError:
        """Return the contract's message for this failure."""
        error = errors_pb2.EngineError(code=self.code, message=str(self), retryable=self.retryable)
        if self.retry_after_ms is not None:
            error.retry_after_ms = self.retry_after_ms
        if self.details:
            error.details.CopyFrom(_struct(self.details))
        return error


class EngineDied(EngineFailure):
    """The engine's process is gone or no longer makes progress (ERR-04, ERR-07)."""

    def __init__(
        self, message: str = "the engine died; its requests are lost, retry on another replica"
    ) -> None:
        super().__init__(message, retryable=True)


def _struct(values: dict[str, Any]) -> struct_pb2.Struct:
    plain = {
        k: v if isinstance(v, (str, bool, int, float, dict, list)) else str(v) for k, v in values.items()
    }
    struct = struct_pb2.Struct()
    struct.update(plain)
    return struct


def unexpected(what: str) -> EngineFailure:
    """Log the exception that is being handled under an id, and return what the caller is told of it (ERR-06)."""
    error_id = uuid.uuid4().hex[:12]
    log.exception("%s failed unexpectedly", what, extra={"error_id": error_id})
    return EngineFailure(f"an unexpected error; the server's log has it under id {error_id}")
