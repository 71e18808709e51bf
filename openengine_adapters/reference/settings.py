"""Everything that can be set about a reference engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from openengine.v1 import discovery_pb2
from openengine_adapters.engine import Lora

MODEL_ID = "reference-toy"
BLOCK_SIZE = 16
"""Tokens in a block of the prefix cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """Failures on purpose; None never happens.

    `fail_after` counts the tokens of one request, after which that request fails. `die_after` and `hang_after` count
    the tokens of the whole engine.
    """

    fail_after: int | None = None
    die_after: int | None = None
    hang_after: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Sizes and behaviour of one engine.

    `speed` is tokens a second for each output, 0 as fast as Python goes; `latency` the least time in seconds before
    a request's first token. `max_running` and `max_waiting` bound the requests of one data-parallel rank,
    `step_tokens` the prompt tokens of one scheduler step. `session_ttl` is how many seconds a prefilled session waits
    for its decode engine.
    """

    model_id: str = MODEL_ID
    served_model_name: str = ""
    aliases: tuple[str, ...] = ()
    role: discovery_pb2.EngineRole.ValueType = discovery_pb2.ENGINE_ROLE_AGGREGATED
    host: str = "127.0.0.1"
    seed: int = 0
    speed: float = 0.0
    latency: float = 0.0
    max_context: int = 2048
    max_sequences: int = 8
    max_running: int = 8
    max_waiting: int = 128
    step_tokens: int = 1024
    kv_blocks: int = 1280
    data_parallel_size: int = 1
    kv_events: bool = True
    kv_buffer_steps: int = 10_000
    lora: bool = True
    loras: tuple[Lora, ...] = ()
    session_ttl: float = 30.0
    faults: Faults = field(default_factory=Faults)
