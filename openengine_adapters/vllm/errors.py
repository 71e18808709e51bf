"""vLLM's exceptions in the contract's terms."""

from __future__ import annotations

import logging
from collections.abc import Callable

import grpc
from vllm.exceptions import GracefulHTTPError, LoRAAdapterNotFoundError, VLLMClientError, VLLMValidationError
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from openengine.v1 import generate_pb2
from openengine_adapters.core.errors import EngineDied, EngineFailure, Rejected

log = logging.getLogger(__name__)

_FIELDS = {
    "temperature": "sampling.temperature",
    "top_p": "sampling.top_p",
    "logprobs": "response.output_candidates",
    "prompt_logprobs": "response.prompt_candidates",
    "logprob_token_ids": "response.output_candidates.token_ids",
    "stop_token_ids": "stopping.conditions",
    "max_tokens": "stopping.max_tokens",
}
"""vLLM's parameter names and the request's fields that they come from."""


def before_acceptance(error: Exception, request: generate_pb2.GenerateRequest) -> Exception:
    """What `generate` raises when vLLM refused the request."""
    return _refusal(error, lambda cause: _field(cause, request))


def task_refusal(error: Exception, place: str) -> Exception:
    """What a task raises when vLLM refused, or failed, its input at `place`."""
    return _refusal(error, lambda cause: place)


def _refusal(error: Exception, field_of: Callable[[BaseException], str]) -> Exception:
    if isinstance(error, EngineDeadError):
        return EngineDied()
    if isinstance(error, GracefulHTTPError):
        return Rejected(grpc.StatusCode.RESOURCE_EXHAUSTED, error.message)
    if isinstance(error, LoRAAdapterNotFoundError):
        return Rejected(grpc.StatusCode.NOT_FOUND, _first_line(error), field="lora_name")
    if isinstance(error, VLLMClientError):
        return Rejected(grpc.StatusCode.INVALID_ARGUMENT, _first_line(error), field=field_of(error))
    cause = error.__cause__ if isinstance(error, EngineGenerateError) else error
    if isinstance(cause, (ValueError, TypeError, OverflowError)):
        return Rejected(grpc.StatusCode.INVALID_ARGUMENT, _first_line(cause), field=field_of(cause))
    return error


def after_acceptance(error: Exception) -> Exception:
    """What a running stream raises for `error`."""
    if isinstance(error, EngineDeadError):
        return EngineDied()
    if isinstance(error, EngineGenerateError):
        log.warning("vLLM failed a request", exc_info=error)
        return EngineFailure("the engine failed while it generated")
    return error


def _field(error: BaseException, request: generate_pb2.GenerateRequest) -> str:
    parameter = error.parameter if isinstance(error, VLLMValidationError) else None
    if parameter in _FIELDS:
        return _FIELDS[parameter]
    guide = request.guided.WhichOneof("guide")
    if guide is not None and "context length" not in str(error):
        return f"guided.{guide}"
    return request.WhichOneof("input") or "input"


def _first_line(error: BaseException) -> str:
    """One short line without vLLM's advice on its own flags; never the prompt."""
    message = error.args[0] if error.args and isinstance(error.args[0], str) else type(error).__name__
    return message.splitlines()[0][:300] if message else type(error).__name__
