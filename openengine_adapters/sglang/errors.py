"""SGLang's refusals and failures in the contract's terms."""

from __future__ import annotations

import logging
import re
from http import HTTPStatus
from typing import Any

import fastapi
import grpc

from openengine.v1 import generate_pb2
from openengine_adapters.core.errors import EngineFailure, Rejected
from openengine_adapters.engine import Finish, FinishKind

log = logging.getLogger(__name__)

NOT_A_NUMBER = "NaN happened"
"""What SGLang reports as a matched stop string when the model computed no valid token."""

_ABORTED_WHILE_COMPILING = "Aborted by AbortReq."
_GUIDE_REFUSED = re.compile(r"Failed to compile \w+ grammar: ")
_GUIDE_SLOW = "Grammar preprocessing timed out"
_GUIDE_STUCK = "Grammar accept_token failed"
_SOURCE_PLACE = re.compile(r"^(\[[\d:]+\] \S+:\d+: )?(Check failed: .* is false: )?")


def before_acceptance(error: Exception, request: generate_pb2.GenerateRequest) -> Exception:
    """What `generate` raises for an exception that SGLang raised instead of taking the request."""
    if isinstance(error, fastapi.HTTPException):
        return _refusal(error.status_code, str(error.detail), request)
    if isinstance(error, ValueError):
        return _refusal(HTTPStatus.BAD_REQUEST, str(error), request)
    if request.media and isinstance(error, RuntimeError):
        # Whatever the model's processor stumbles over came with the request.
        log.info("media refused", exc_info=error)
        return Rejected(
            grpc.StatusCode.INVALID_ARGUMENT,
            "the model's processor does not take these media with this prompt",
            field="media",
        )
    return error


def task_refusal(error: Exception, place: str) -> Exception:
    """What a task raises when SGLang refused, or failed, its input at `place`."""
    if isinstance(error, fastapi.HTTPException):
        if error.status_code == HTTPStatus.SERVICE_UNAVAILABLE:
            return Rejected(
                grpc.StatusCode.RESOURCE_EXHAUSTED, f"{_line(str(error.detail))} Try again later."
            )
        log.warning("SGLang failed a task with status %d: %s", error.status_code, error.detail)
        return EngineFailure(f"{place}: the engine failed")
    if isinstance(error, ValueError):
        return Rejected(grpc.StatusCode.INVALID_ARGUMENT, _line(str(error)), field=place)
    return error


def after_acceptance(error: Exception) -> EngineFailure:
    """What a running stream raises for an exception that nobody expects of SGLang."""
    log.warning("SGLang failed a request", exc_info=error)
    return EngineFailure("the engine failed while it generated")


def aborted(reason: dict[str, Any], request: generate_pb2.GenerateRequest) -> Finish:
    """What SGLang's finish reason `abort` means: a caller's abort is a finish, all else is raised.

    Raises `Rejected` for what SGLang refused; after acceptance the core makes an EngineError of it.
    """
    message, status = str(reason.get("message") or ""), reason.get("status_code")
    if status is None or message == _ABORTED_WHILE_COMPILING:
        return Finish(FinishKind.CANCELLED)
    raise _refusal(int(status), message, request)


def _refusal(status: int, message: str, request: generate_pb2.GenerateRequest) -> Exception:
    guide = request.guided.WhichOneof("guide")
    if message.startswith(_GUIDE_STUCK):
        return EngineFailure(
            "the guide left no token to choose; it allows no such output, or stopping.min_tokens asks for more than it",
            details={"field": f"guided.{guide}", "sglang.status_code": int(status)},
        )
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        return Rejected(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{_line(message)} Try again later.")
    if status != HTTPStatus.BAD_REQUEST:
        log.warning("SGLang failed a request with status %d: %s", status, message)
        return EngineFailure(
            "the engine failed while it generated", details={"sglang.status_code": int(status)}
        )
    if guide is not None and _GUIDE_SLOW in message:
        why = "it takes too long to compile; make it simpler"
        return Rejected(grpc.StatusCode.INVALID_ARGUMENT, why, field=f"guided.{guide}")
    if guide is not None and (found := _GUIDE_REFUSED.match(message)):
        why = _line(message[found.end() :]) or "it does not compile"
        return Rejected(grpc.StatusCode.INVALID_ARGUMENT, why, field=f"guided.{guide}")
    return Rejected(
        grpc.StatusCode.INVALID_ARGUMENT, _line(message), field=request.WhichOneof("input") or "input"
    )


def not_a_number() -> EngineFailure:
    """The model's own arithmetic failed: no stop, whatever SGLang calls it."""
    return EngineFailure("the model computed no valid token", details={"sglang.finish_reason": NOT_A_NUMBER})


def _line(message: str) -> str:
    """The first line, without the place in SGLang's or a library's source."""
    text = _SOURCE_PLACE.sub("", message.strip())
    return text.splitlines()[0][:300] if text else ""
