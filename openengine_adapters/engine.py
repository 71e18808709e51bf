"""The port: what an engine must offer so that the core can serve the contract over it.

An adapter hands over plain dataclasses and never builds a response; only the core does. Requests reach the
adapter as the validated protobuf message together with what the core resolved. Abilities that not every
engine has are small protocols of their own, found with `isinstance`.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from openengine.v1 import (
    discovery_pb2,
    generate_pb2,
    inputs_pb2,
    kv_pb2,
    model_pb2,
    observability_pb2,
    tasks_pb2,
)

# ----------------------------------------------------------------------------------------------- description


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobSupport:
    """Which candidates an engine can return beside the chosen token.

    `max_top_n` is the largest N (None: up to the vocabulary, 0: no top-N selection); `max_token_ids` the most
    explicit ids (0: none); `all` the whole vocabulary.
    """

    max_top_n: int | None = None
    max_token_ids: int = 0
    all: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationSupport:
    """What Generate takes on this engine as it runs now; discovery and validation both read it (MODEL-07)."""

    text_input: bool = True
    token_ids_input: bool = True
    prompt_logprobs: LogprobSupport | None = None
    output_logprobs: LogprobSupport | None = None
    separate_candidates: bool = True  # prompt and output selections may differ (RESP-07)
    guided_modes: frozenset[model_pb2.GuidedDecodingMode.ValueType] = frozenset()
    guided_backend: str = ""
    max_num_sequences: int = 1
    greedy_sequences: bool = True  # num_sequences > 1 with temperature 0 (SAMP-05)
    temperature_range: tuple[float, float] = (0.0, float("inf"))  # for a temperature that is not 0
    seed: bool = True
    priority: bool = False
    stop_in_output: bool = True
    cache_salt: bool = False
    prefix_cache_bypass: bool = False
    prefill_samples: bool = False  # a prefill engine draws the first token itself, unseen
    modalities: frozenset[inputs_pb2.Modality.ValueType] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSupport:
    """What one of Embed, Classify and Score takes; fields that a task has no use for stay at their default.

    The first granularity is the model's default. Numbers are the largest accepted (CAP-03). `native_scoring`
    False is a Score that takes label tokens only, as on a generation engine.
    """

    input_types: tuple[tasks_pb2.TaskInputType.ValueType, ...]
    granularities: tuple[tasks_pb2.TaskOutputGranularity.ValueType, ...]
    semantics: tuple[tasks_pb2.TaskValueSemantics.ValueType, ...] = ()
    encodings: tuple[tasks_pb2.EmbeddingEncoding.ValueType, ...] = ()
    normalizations: tuple[tasks_pb2.ScoreNormalization.ValueType, ...] = ()
    modalities: tuple[inputs_pb2.Modality.ValueType, ...] = ()
    dimension: int | None = None
    max_batch_size: int | None = None
    max_groups: int | None = None
    max_candidates_per_group: int | None = None
    max_label_token_ids: int | None = None
    max_output_values: int | None = None
    priority: bool = False
    lora: bool = False
    normalization: bool = False
    dimension_override: bool = False
    native_scoring: bool = True
    label_token_scoring: bool = False
    instruction: bool = False
    higher_is_better: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallelism:
    """Sizes and ranks of the running engine; None is "cannot tell" (DISC-09)."""

    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int | None = None
    data_parallel_size: int | None = None
    data_parallel_rank: int | None = None
    data_parallel_start_rank: int | None = None

    @property
    def ranks(self) -> range:
        """The data-parallel ranks that this server answers for."""
        start = self.data_parallel_start_rank or 0
        return range(start, start + (self.data_parallel_size or 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class KvConnector:
    """The KV transfer side of a disaggregated engine; `enabled` False is an engine without one (KVC-01)."""

    enabled: bool = False
    transfer_backend: str = ""
    local_endpoints: tuple[tuple[str, int, str], ...] = ()  # host, port, protocol
    supported_protocols: tuple[str, ...] = ()
    supports_remote_prefill: bool | None = None
    supports_decode_pull: bool | None = None
    supports_abort_cleanup: bool | None = None
    supports_drain: bool | None = None
    schema_version: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDescription:
    """Who the running engine is and what it takes. Numbers that it cannot report are None."""

    engine_name: str
    engine_version: str
    model_id: str
    vocab_size: int
    eos_token_ids: frozenset[int] = frozenset()
    role: discovery_pb2.EngineRole.ValueType = discovery_pb2.ENGINE_ROLE_AGGREGATED
    served_model_name: str = ""
    served_model_aliases: tuple[str, ...] = ()
    parallelism: Parallelism = field(default_factory=Parallelism)
    kv_connector: KvConnector = field(default_factory=KvConnector)
    max_context_length: int | None = None
    max_output_tokens: int | None = None
    kv_block_size: int | None = None
    total_kv_blocks: int | None = None
    max_running_requests: int | None = None
    max_batched_tokens: int | None = None
    tokenizer_modes: tuple[str, ...] = ()
    reasoning_parser: str = ""
    tool_call_parser: str = ""
    generation: GenerationSupport | None = None
    embed: TaskSupport | None = None
    classify: TaskSupport | None = None
    score: TaskSupport | None = None
    lora: bool = False

    @property
    def model_names(self) -> frozenset[str]:
        """Every name that a request may use for the model (MODEL-02)."""
        return frozenset({self.model_id, self.served_model_name, *self.served_model_aliases}) - {""}


# --------------------------------------------------------------------------------------------------- requests


@dataclass(frozen=True, slots=True)
class Lora:
    """A loaded adapter as the caller named it: `path` is an absolute directory."""

    id: int
    name: str
    path: str


@dataclass(frozen=True, slots=True)
class Media:
    """One media input, fetched but not decoded: `data` are the file's bytes, never empty.

    `field` is its place in the request, for refusals. `uuid`, when set, is the caller's name for this content.
    """

    modality: inputs_pb2.Modality.ValueType
    data: bytes
    field: str
    mime_type: str = ""
    uuid: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateCall:
    """One validated Generate request; `media` is the request's own, in order.

    `id` is ours, unique in the process and of one fixed length, so that engines which match ids by prefix
    cannot hit a neighbour (ABORT-04). With `keep_stop` the engine leaves a matched stop in the text, because
    the caller wants it or because the core cuts it out itself; without, it leaves the stop token's text out.
    """

    id: str
    request: generate_pb2.GenerateRequest
    keep_stop: bool = False
    lora: Lora | None = None
    trace_headers: Mapping[str, str] = field(default_factory=dict)
    media: Sequence[Media] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskCall:
    """One item of an Embed or Classify call, or one group of a Score call, with what the whole call shares.

    `id` as in `GenerateCall`. `place` is the item's or group's path in the request, for refusals: ``inputs[3]``.
    `media` holds the media of each multimodal input, in order, by its item id. `at_once` is how many of a group's
    candidates may be in the engine together.
    """

    id: str
    place: str = ""
    at_once: int = 1
    priority: int | None = None
    lora: Lora | None = None
    trace_headers: Mapping[str, str] = field(default_factory=dict)
    media: Mapping[str, Sequence[Media]] = field(default_factory=dict)

    def part_id(self, index: int) -> str:
        """The id of the call's part `index`, for a group's candidates; as long as every other id."""
        return f"{self.id[:24]}{index:08x}"


# ---------------------------------------------------------------------------------------------------- outputs


@dataclass(slots=True)
class Candidate:
    """One alternative at a position; `rank` 1 is the most likely, None where the engine has no rank."""

    token_id: int
    logprob: float
    rank: int | None = None


@dataclass(slots=True)
class TokenScore:
    """The log-probability (natural logarithm) of one token, with the candidates asked for, in order."""

    logprob: float
    rank: int | None = None
    candidates: Sequence[Candidate] = ()


class FinishKind(enum.Enum):
    """Why an output ended. A failure is not a finish: the stream raises `EngineFailure` (STREAM-09)."""

    EOS = enum.auto()
    STOP_TOKEN = enum.auto()
    STOP_TEXT = enum.auto()
    LENGTH = enum.auto()
    CANCELLED = enum.auto()


@dataclass(slots=True)
class Finish:
    """The end of one output; `token_id` goes with EOS and STOP_TOKEN, `text` with STOP_TEXT (STOP-04)."""

    kind: FinishKind
    token_id: int = 0
    text: str = ""
    message: str = ""
    reasoning_tokens: int | None = None


@dataclass(slots=True)
class Delta:
    """What one output gained since its last delta; never cumulative.

    `token_ids` holds every sampled token, a stop token and EOS included. `scores`, when log-probabilities were
    asked for, and `token_texts`, where a token's own text is known better than the vocabulary tells, run parallel
    to it.
    """

    index: int
    token_ids: Sequence[int]
    text: str
    scores: Sequence[TokenScore] | None = None
    finish: Finish | None = None
    token_texts: Sequence[str | None] | None = None


@dataclass(slots=True)
class PromptScores:
    """The prompt's tokens from the first asked position on; a score is None at the prompt's first token."""

    token_ids: Sequence[int]
    scores: Sequence[TokenScore | None]


@dataclass(slots=True)
class Step:
    """What a request gained in one scheduler step. `session` ends a prefill (PD-01)."""

    deltas: Sequence[Delta] = ()
    prompt_tokens: int = 0
    cached_prompt_tokens: int | None = None
    prompt: PromptScores | None = None
    session: kv_pb2.KvSessionRef | None = None


@dataclass(slots=True)
class Tensor:
    """A row-major float32 result of one task item, with what the engine counted for it."""

    shape: Sequence[int]
    values: Sequence[float]
    token_ids: Sequence[int] = ()
    input_tokens: int = 0
    cached_input_tokens: int | None = None
    indices: Sequence[int] | None = None  # sparse: flattened, strictly increasing


@dataclass(slots=True, kw_only=True)
class RankLoad:
    """The load of one data-parallel rank; None is "not measured", 0 is a measured zero (LOAD-01)."""

    rank: int = 0
    running_requests: int | None = None
    queued_requests: int | None = None
    used_kv_blocks: int | None = None
    total_kv_blocks: int | None = None
    running_tokens: int | None = None
    waiting_tokens: int | None = None
    prefill_batch_size: int | None = None
    decode_batch_size: int | None = None


@dataclass(slots=True)
class LoadSnapshot:
    """The engine's own view after its last step. `taken_at` is Unix time in nanoseconds."""

    ranks: Sequence[RankLoad]
    taken_at: int
    attributes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class KvEventPublisher:
    """One native ZMQ publisher of KV events. `endpoint` and `replay_endpoint` are what a local client connects to.

    `every_interface` says that it listens on all of them, so that others reach it under this machine's name.
    """

    rank: int
    endpoint: str
    replay_endpoint: str = ""
    topic: str = ""
    buffer_steps: int | None = None
    hwm: int | None = None
    max_queue_size: int | None = None
    every_interface: bool = False


@dataclass(frozen=True, slots=True)
class RuntimeEvent:
    """One event for planners; `taken_at` is Unix time in nanoseconds. Attribute keys: docs/events.md."""

    type: observability_pb2.RuntimeEventType.ValueType
    taken_at: int
    attributes: Mapping[str, str]


# --------------------------------------------------------------------------------------------------- the port


class Engine(Protocol):
    """An engine that runs in this process or in children of it."""

    async def start(self) -> EngineDescription:
        """Start the engine and return once it can take requests. Raises `StartupError`."""
        ...

    async def stop(self) -> None:
        """Stop the engine and everything that it started. Safe to call twice, and after a failed start."""
        ...

    def check(self) -> None:
        """Raise `EngineDied` when the engine is gone. Local and cheap: called every second."""
        ...

    def steps(self) -> int:
        """A number that grows while the engine makes progress; a hang shows as one that does not (ERR-07)."""
        ...

    def unfinished(self) -> int:
        """Requests that the engine still has work for; without any, standing still is no hang."""
        ...

    async def generate(self, call: GenerateCall) -> AsyncGenerator[Step, None]:
        """Return the request's stream once the engine has admitted it (GEN-08).

        Raises `Rejected` when the engine refuses it. The stream raises `EngineFailure` for a failure after
        that, ends after the last output's finish, and frees the engine's slot when it is closed early.
        """
        ...

    async def abort(self, call_id: str) -> None:
        """End that call's streams with CANCELLED finishes within a second; unknown ids are ignored."""
        ...

    async def load(self) -> LoadSnapshot:
        """The load after the last step, from memory: never waits for the engine (LOAD-04)."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of these ids as the engine would stream it, special tokens left out."""
        ...

    def token_text(self, token_id: int) -> str:
        """The text of one token by itself, special tokens included."""
        ...


class StartupError(Exception):
    """The engine could not start; the message is one sentence for the operator."""


@runtime_checkable
class Embeds(Protocol):
    """An engine that serves Embed. One call an item; the core bounds how many run at once.

    For all three tasks: the core cancels a call to end it (abort, client gone, a sibling failed), and the
    adapter then frees the engine's work before the cancellation leaves it (TASK-08, TASK-09, TASK-15).
    Options arrive with the granularity filled in. Refusals raise `Rejected`, failures `EngineFailure`.
    """

    async def embed(
        self, call: TaskCall, item: tasks_pb2.TaskInput, options: tasks_pb2.EmbedOptions
    ) -> Tensor:
        """Embed one item; another absent option is the model's default."""
        ...


@dataclass(slots=True)
class Classification:
    """One classified item: what its values mean, and the label of each class when the model names them."""

    scores: Tensor
    semantics: tasks_pb2.TaskValueSemantics.ValueType
    labels: Sequence[str] = ()


@runtime_checkable
class Classifies(Protocol):
    """An engine that serves Classify."""

    async def classify(
        self, call: TaskCall, item: tasks_pb2.TaskInput, options: tasks_pb2.ClassifyOptions
    ) -> Classification:
        """Classify one item; absent semantics are the model's default."""
        ...


@dataclass(slots=True)
class GroupScores:
    """The scores of one group, a tensor for each candidate in the order asked."""

    candidates: Sequence[Tensor]
    semantics: tasks_pb2.TaskValueSemantics.ValueType
    normalization: tasks_pb2.ScoreNormalization.ValueType
    higher_is_better: bool | None = None


@runtime_checkable
class Scores(Protocol):
    """An engine that serves Score: one query against its candidates as one batch (SCO-07)."""

    async def score(
        self, call: TaskCall, group: tasks_pb2.ScoreGroup, options: tasks_pb2.ScoreOptions
    ) -> GroupScores:
        """Score one group; `part_id` names its candidates in the engine."""
        ...


@runtime_checkable
class HostsLora(Protocol):
    """An engine that loads and unloads LoRA adapters while it runs."""

    def static_loras(self) -> Sequence[Lora]:
        """The adapters given at start-up."""
        ...

    async def load_lora(self, lora: Lora) -> None:
        """Check the adapter's files against the model and load it. Raises `Rejected`, leaving nothing behind."""
        ...

    async def lora_unused(self, lora: Lora) -> None:
        """Return once no KV session needs the adapter any more; their calls are over, so that the core can't tell."""
        ...

    async def unload_lora(self, lora: Lora) -> None:
        """Free the adapter in the engine; nothing uses it any more."""
        ...


@runtime_checkable
class PublishesKvEvents(Protocol):
    """An engine whose KV events are switched on."""

    def kv_event_publishers(self) -> Sequence[KvEventPublisher]:
        """What is really bound, one for each data-parallel rank; empty when switched off."""
        ...


@runtime_checkable
class RunsRanks(Protocol):
    """An engine whose data-parallel ranks make steps of their own, so that those of one hide the hang of another."""

    def ranks_at_work(self) -> Mapping[int, int]:
        """A number for each rank that has unfinished requests, which grows while that rank makes progress (ERR-07)."""
        ...


@runtime_checkable
class EmitsRuntimeEvents(Protocol):
    """An engine that tells what it does, step by step."""

    def observe(self, sink: Callable[[RuntimeEvent], None] | None) -> None:
        """Send events to `sink` from now on, on the event loop; None stops them and their cost."""
        ...


@runtime_checkable
class HandsOffKv(Protocol):
    """A prefill or decode engine (PD-01 … PD-07)."""

    def check_session(self, session: kv_pb2.KvSessionRef) -> None:
        """Check hand-off parameters completely before they reach the engine. Raises `Rejected` (PD-07)."""
        ...

    async def release_session(self, session_id: str) -> bool | None:
        """End a session: True when it was open, False when it had ended, None when it is unknown."""
        ...

    async def end_sessions(self) -> None:
        """End every session that no decode server is attached to: a drain is over (PD-04)."""
        ...

    def open_sessions(self) -> int:
        """Sessions whose KV blocks are still held."""
        ...
