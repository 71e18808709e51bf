"""The reference engine behind the port."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence

from openengine.v1 import discovery_pb2, kv_pb2, observability_pb2, tasks_pb2
from openengine_adapters.core.errors import EngineDied, EngineFailure, Rejected, invalid
from openengine_adapters.core.task_validation import check_input_length
from openengine_adapters.engine import (
    Classification,
    EngineDescription,
    GenerateCall,
    GroupScores,
    KvEventPublisher,
    LoadSnapshot,
    Lora,
    RuntimeEvent,
    StartupError,
    Step,
    TaskCall,
    Tensor,
)
from openengine_adapters.reference import tokenizer
from openengine_adapters.reference.background import Background
from openengine_adapters.reference.cache import Lease, Namespace
from openengine_adapters.reference.description import describe
from openengine_adapters.reference.generation import Generation, check_length
from openengine_adapters.reference.guided import compile_guide
from openengine_adapters.reference.loras import LoadedLora, read_adapter
from openengine_adapters.reference.model import ToyModel
from openengine_adapters.reference.prompts import Prompt, generation_prompt, task_prompt
from openengine_adapters.reference.rank import Rank
from openengine_adapters.reference.scheduler import Scheduler
from openengine_adapters.reference.sessions import Handle, SessionStore, fetch, read_session
from openengine_adapters.reference.settings import Settings
from openengine_adapters.reference.tasks import Result, TaskModel, TaskWork, instructed, joined, score_terms

log = logging.getLogger(__name__)


class ReferenceEngine:
    """Implements the port and every optional ability; see `Settings` for what can be set."""

    def __init__(self, settings: Settings | None = None) -> None:
        self._settings = settings or Settings()
        self._model = ToyModel(self._settings.seed)
        self._tasks = TaskModel(self._model)
        self._loras: dict[str, LoadedLora] = {}
        self._ranks: list[Rank] = []
        self._sessions: SessionStore | None = None
        self._background = Background(self._crashed)
        self._death: EngineDied | None = None
        self._generated = 0
        self._description: EngineDescription | None = None

    # ---------------------------------------------------------------------------------------------- lifecycle

    async def start(self) -> EngineDescription:
        """Start the step loops. Raises `StartupError`."""
        settings = self._settings
        log.warning("this is a test tool: its model is a toy, and its output means nothing")
        try:
            self._loras = {lora.name: read_adapter(lora) for lora in settings.loras}
        except Rejected as rejected:
            raise StartupError(f"a LoRA adapter cannot be loaded: {rejected}") from rejected
        if settings.role == discovery_pb2.ENGINE_ROLE_PREFILL:
            self._sessions = SessionStore(settings.session_ttl, self._transferred)
            await self._sessions.start("127.0.0.1")
        try:
            for number in range(settings.data_parallel_size):
                self._ranks.append(Rank(number, settings, self._counted))
        except OSError as error:
            raise StartupError(f"cannot bind the KV event sockets on {settings.host}: {error}") from error
        for rank in self._ranks:
            rank.start(self._background)
        self._description = describe(settings, self._sessions.address if self._sessions is not None else None)
        return self._description

    async def stop(self) -> None:
        """Stop everything. Safe to call twice, and after a failed start."""
        self._fail_all(EngineFailure("the engine stopped", retryable=True))
        if self._sessions is not None:
            await self._sessions.stop()
        await self._background.stop()
        for rank in self._ranks:
            rank.close()

    def check(self) -> None:
        """Raise `EngineDied` once it died."""
        if self._death is not None:
            raise self._death

    def steps(self) -> int:
        """Steps of all ranks."""
        return sum(scheduler.steps for scheduler in self._schedulers())

    def unfinished(self) -> int:
        """Requests queued or running."""
        return len({work.call_id for scheduler in self._schedulers() for work in scheduler.works()})

    # ------------------------------------------------------------------------------------------------ Generate

    async def generate(self, call: GenerateCall) -> AsyncGenerator[Step, None]:
        """Queue the request and return its stream. Raises `Rejected`."""
        self.check()
        request = call.request
        prompt = generation_prompt(call)
        check_length(prompt, request, self._settings.max_context)
        guide = compile_guide(request.guided) if request.HasField("guided") else None
        handle = read_session(request.kv.session) if request.kv.HasField("session") else None
        namespace, bias = self._namespace(call.lora, request.kv.cache_salt), self._bias(call.lora)
        if handle is not None and handle.prompt_digest != _handed_off(prompt, namespace):
            raise invalid(
                "kv.session", "belongs to another prompt or adapter; send the request that was prefilled"
            )
        rank = self._rank(
            request.kv.data_parallel_rank if request.kv.HasField("data_parallel_rank") else None
        )
        work = Generation(
            call,
            prompt,
            namespace,
            model=self._model,
            settings=self._settings,
            bias=bias,
            guide=guide,
            on_room=rank.scheduler.wake,
            open_session=None if self._sessions is None else self._session_opener(rank),
        )
        work.ready = handle is None
        stream = self._stream(rank.scheduler, work)
        await anext(stream)  # submits, so that closing the stream also frees a request that nobody ever read
        if handle is not None:
            self._background.run(self._fetch(handle, rank, work), name=f"reference-fetch-{call.id}")
        return stream

    async def abort(self, call_id: str) -> None:
        """End that call's works as cancelled."""
        for scheduler in self._schedulers():
            for work in scheduler.works():
                if work.call_id == call_id:
                    work.cancel()
                    scheduler.discard(work)

    async def _stream(self, scheduler: Scheduler, work: Generation) -> AsyncGenerator[Step, None]:
        scheduler.submit(work)
        try:
            yield Step()
            while (step := await work.outbox.take()) is not None:
                yield step
        finally:
            scheduler.discard(work)

    # ---------------------------------------------------------------------------------------------------- load

    async def load(self) -> LoadSnapshot:
        """The load of every rank, now."""
        return LoadSnapshot([scheduler.load() for scheduler in self._schedulers()], time.time_ns())

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of these ids, special tokens left out."""
        return tokenizer.decode(token_ids)

    def token_text(self, token_id: int) -> str:
        """The text of one token by itself."""
        return tokenizer.token_text(token_id)

    # --------------------------------------------------------------------------------------------------- tasks

    async def embed(
        self, call: TaskCall, item: tasks_pb2.TaskInput, options: tasks_pb2.EmbedOptions
    ) -> Tensor:
        """Embed one item."""
        prompt = self._task_prompt(call, item, call.place)
        bias = self._bias(call.lora)
        tensor, (cached,) = await self._run(call, [prompt], lambda: self._tasks.embed(prompt, options, bias))
        tensor.cached_input_tokens = cached
        return tensor

    async def classify(
        self, call: TaskCall, item: tasks_pb2.TaskInput, options: tasks_pb2.ClassifyOptions
    ) -> Classification:
        """Classify one item."""
        prompt = self._task_prompt(call, item, call.place)
        bias = self._bias(call.lora)
        found, (cached,) = await self._run(
            call, [prompt], lambda: self._tasks.classify(prompt, options, bias)
        )
        found.scores.cached_input_tokens = cached
        return found

    async def score(
        self, call: TaskCall, group: tasks_pb2.ScoreGroup, options: tasks_pb2.ScoreOptions
    ) -> GroupScores:
        """Score one group as one batch; each candidate is read behind the query."""
        terms = score_terms(options)
        query = instructed(self._task_prompt(call, group.query, f"{call.place}.query"), options.instruction)
        candidates, pairs = [], []
        for position, item in enumerate(group.candidates):
            place = f"{call.place}.candidates[{position}]"
            candidates.append(self._task_prompt(call, item, place))
            pairs.append(joined(query, candidates[-1]))
            self._check_length(pairs[-1], place)
        bias = self._bias(call.lora)

        def compute() -> GroupScores:
            if options.label_token_ids:
                return self._tasks.score_labels(pairs, options.label_token_ids, terms, bias)
            return self._tasks.score_pairs(query, candidates, terms, bias)

        scores, cached = await self._run(call, pairs, compute)
        for tensor, pair, hit in zip(scores.candidates, pairs, cached, strict=True):
            tensor.input_tokens, tensor.cached_input_tokens = len(pair.ids), hit
        return scores

    def _task_prompt(self, call: TaskCall, item: tasks_pb2.TaskInput, place: str) -> Prompt:
        prompt = task_prompt(call, item, place)
        self._check_length(prompt, place)
        return prompt

    def _check_length(self, prompt: Prompt, place: str) -> None:
        assert self._description is not None  # requests come after `start`
        check_input_length(place, len(prompt.ids), self._description)

    async def _run(
        self, call: TaskCall, prompts: Sequence[Prompt], compute: Callable[[], Result]
    ) -> tuple[Result, list[int]]:
        """Run one task item; returns its result and each prompt's cached tokens."""
        self.check()
        scheduler = self._rank(None).scheduler
        work = TaskWork(call, self._namespace(call.lora, ""), prompts, compute)
        scheduler.submit(work)
        try:
            return await work.result, work.cached
        finally:
            scheduler.discard(work)

    # ---------------------------------------------------------------------------------------------------- LoRA

    def static_loras(self) -> Sequence[Lora]:
        """The adapters given at start-up."""
        return self._settings.loras

    async def load_lora(self, lora: Lora) -> None:
        """Read an adapter. Raises `Rejected`."""
        self._loras[lora.name] = read_adapter(lora)

    async def lora_unused(self, lora: Lora) -> None:
        """Sessions hold no adapter here."""

    async def unload_lora(self, lora: Lora) -> None:
        """Forget an adapter, and what it cached."""
        digest = self._loras.pop(lora.name).digest
        for scheduler in self._schedulers():
            scheduler.cache.forget_lora(digest)
            scheduler.wake()

    def _namespace(self, lora: Lora | None, salt: str) -> Namespace:
        if lora is None:
            return Namespace(salt)
        return Namespace(salt, lora.id, lora.name, self._loras[lora.name].digest)

    def _bias(self, lora: Lora | None) -> Sequence[float] | None:
        return None if lora is None else self._loras[lora.name].bias

    # ------------------------------------------------------------------------------------------ KV and sessions

    def kv_event_publishers(self) -> Sequence[KvEventPublisher]:
        """The publisher of each rank; none when switched off."""
        return [publisher for rank in self._ranks for publisher in rank.publishers()]

    def observe(self, sink: Callable[[RuntimeEvent], None] | None) -> None:
        """Send runtime events to `sink` from now on."""
        for scheduler in self._schedulers():
            scheduler.sink = sink

    def check_session(self, session: kv_pb2.KvSessionRef) -> None:
        """Check a session reference. Raises `Rejected`."""
        read_session(session)

    async def release_session(self, session_id: str) -> bool | None:
        """End a session: True when it was open, False when it had ended, None when it is unknown."""
        return None if self._sessions is None else self._sessions.release(session_id)

    async def end_sessions(self) -> None:
        """End every session."""
        if self._sessions is not None:
            self._sessions.end_all()

    def open_sessions(self) -> int:
        """Sessions that no decode engine has fetched yet."""
        return 0 if self._sessions is None else len(self._sessions)

    def _session_opener(self, rank: Rank) -> Callable[[Generation, Lease], kv_pb2.KvSessionRef]:
        def open_session(work: Generation, lease: Lease) -> kv_pb2.KvSessionRef:
            assert self._sessions is not None  # only a prefill engine asks
            digest = _handed_off(work.prompt, work.namespace)
            return self._sessions.open(lease, work.state, digest, len(work.prompt.ids), rank.number)

        return open_session

    async def _fetch(self, handle: Handle, rank: Rank, work: Generation) -> None:
        """Fetch what the request waits for, then let it run."""
        began = time.perf_counter_ns()
        try:
            state = await fetch(handle)
        except EngineFailure as failure:
            work.fail(failure)
            rank.scheduler.discard(work)
            self._transferred("failed", rank.number, handle.session_id, 0)
            return
        work.attach(state)
        rank.scheduler.wake()
        duration_us = (time.perf_counter_ns() - began) // 1000
        self._transferred("transferred", rank.number, handle.session_id, len(state), duration_us)

    def _transferred(self, event: str, rank: int, session_id: str, size: int, duration_us: int = 0) -> None:
        self._ranks[rank].scheduler.emit(
            observability_pb2.RUNTIME_EVENT_TYPE_TRANSFER,
            {"event": event, "bytes": size, "duration_us": duration_us, "reference.session_id": session_id},
        )

    # ------------------------------------------------------------------------------------------------- helpers

    def _schedulers(self) -> list[Scheduler]:
        return [rank.scheduler for rank in self._ranks]

    def _rank(self, number: int | None) -> Rank:
        """The rank asked for, otherwise the one with the least to do."""
        if number is not None:
            return self._ranks[number]
        return min(self._ranks, key=lambda rank: len(rank.scheduler.works()))

    def _counted(self, tokens: int) -> None:
        """Count generated tokens; die or hang when it is time to."""
        self._generated += tokens
        faults = self._settings.faults
        if faults.die_after is not None and self._generated >= faults.die_after:
            self._die(EngineDied(f"the engine died on purpose after {self._generated} tokens"))
        elif faults.hang_after is not None and self._generated >= faults.hang_after:
            for scheduler in self._schedulers():
                scheduler.hung = True

    def _crashed(self, error: BaseException) -> None:
        log.error("the engine crashed", exc_info=error)
        self._die(EngineDied())

    def _die(self, death: EngineDied) -> None:
        if self._death is None:
            self._death = death
            self._fail_all(death)

    def _fail_all(self, failure: EngineFailure) -> None:
        for scheduler in self._schedulers():
            for work in scheduler.works():
                work.fail(failure)
                scheduler.discard(work)


def _handed_off(prompt: Prompt, namespace: Namespace) -> str:
    """What a session's prompt must be equal in: its tokens, its media and the adapter."""
    return f"{prompt.digest()}:{namespace.lora_digest.hex()}"
