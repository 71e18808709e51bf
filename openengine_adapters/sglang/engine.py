"""SGLang's runtime behind the port.

The runtime lives in this process, as SGLang's own servers have it: its tokenizer manager on our event loop, its
schedulers and its detokenizer as child processes. Only its ways to take over signals, and to kill this process when
a child fails, are left out; docs/sglang.md tells why that is enough.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import multiprocessing
import os
import signal
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import grpc
import psutil
from sglang.srt.entrypoints.engine import Engine
from sglang.srt.managers.io_struct import ShutdownReq
from sglang.srt.server_args import ServerArgs

from openengine.v1 import tasks_pb2
from openengine_adapters.core.errors import EngineDied, EngineFailure, Rejected, invalid
from openengine_adapters.core.handoff.roles import HandOffWanted
from openengine_adapters.core.handoff.sides import Sessions
from openengine_adapters.core.validation import check_prompt_length, check_prompt_logprob_start
from openengine_adapters.core.vocabulary import TokenTexts
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
from openengine_adapters.interrupts import deaf_children
from openengine_adapters.publishers import KvEventsWanted
from openengine_adapters.sglang import config, errors, kv, media, outputs, processes, requests
from openengine_adapters.sglang.disaggregation import Decodes, Prefills, hand_off
from openengine_adapters.sglang.load import LoadBoard
from openengine_adapters.sglang.lora import LoraHost, check_lora_args
from openengine_adapters.sglang.sequences import Sequences
from openengine_adapters.sglang.steps import StepEvents
from openengine_adapters.sglang.task_config import task_config
from openengine_adapters.sglang.tasks import SglangTasks

log = logging.getLogger(__name__)

STATE_S = 30.0

SHUTDOWN_S = 15.0
"""How long a scheduler may take to free a device's memory; SGLang itself gives it as much."""

DETOKENIZER = "sglang::detokenizer"
"""The title of the one process that holds nothing, and does not end when it is asked to."""


class Runtime(Engine):  # type: ignore[misc]  # untyped where SGLang is not installed
    """SGLang's engine, which has this called at the end of the process, also when its start failed."""

    def shutdown(self) -> None:
        """Leave alone the children of this process that are not SGLang's; `SglangEngine.stop` ends those that are."""


class SglangEngine(Sessions):
    """One SGLang engine in this process; its schedulers and its detokenizer are child processes."""

    def __init__(
        self,
        args: ServerArgs,
        wanted: HandOffWanted | None = None,
        kv_events: KvEventsWanted | None = None,
    ) -> None:
        self._args = args
        self._wanted = wanted or HandOffWanted()
        self._hand_off: Prefills | Decodes | None = None
        self._kv_events = kv.KvEvents(kv_events or KvEventsWanted())
        self._runtime: Runtime | None = None
        self._processes: list[psutil.Process] = []
        self._failure = ""
        self._reader: asyncio.Task[None] | None = None
        self._description: EngineDescription | None = None
        self._terms = requests.Terms(longest=0, defaults={})
        self._limit: int | None = None
        self._board: LoadBoard | None = None
        self._events: StepEvents | None = None
        self._texts: TokenTexts | None = None
        self._loras: LoraHost | None = None
        self._calls: dict[str, Sequences] = {}
        self._compiling = 0
        self._prompts: media.Prompts | None = None
        self._tasks: SglangTasks | None = None

    # ------------------------------------------------------------------------------------------- lifecycle

    async def start(self) -> EngineDescription:
        """Start SGLang off the event loop, so that the server answers STARTING meanwhile."""
        config.check(self._args)
        self._hand_off = hand_off(self._args, self._wanted)
        check_lora_args(self._args)
        config.prepare(self._args)
        try:
            await asyncio.to_thread(config.keep_inputs_whole, self._args)
        except Exception as error:
            raise StartupError(f"SGLang cannot read the model's configuration: {_one_line(error)}") from error
        self._args.kv_events_config = self._kv_events.configure(
            self._args.kv_events_config, self._args.dp_size, cached=not self._args.disable_radix_cache
        )
        loop = asyncio.get_running_loop()
        # A child that fails sends this to its parent, which it would end.
        loop.add_signal_handler(signal.SIGQUIT, self._child_failed)
        try:
            # SGLang's children die with the thread that started them; this one lives as long as the loop.
            runtime = await asyncio.to_thread(self._build)
        except (Exception, SystemExit) as error:
            log.debug("SGLang did not start", exc_info=error)
            left = processes.existing([child.pid for child in multiprocessing.active_children() if child.pid])
            await asyncio.to_thread(processes.end, processes.descendants(left))
            raise StartupError(f"SGLang did not start: {_one_line(error)}") from error
        self._runtime = runtime
        scheduler = runtime._scheduler_init_result
        self._processes = processes.existing(scheduler.all_child_pids)
        manager = runtime.tokenizer_manager
        manager.sampling_params_class = requests.WholeStops
        # With a loop of its own already, SGLang neither takes signals nor starts the tasks that kill this process.
        manager.event_loop = loop
        self._reader = asyncio.create_task(manager.handle_loop(), name="sglang-outputs")
        try:
            async with asyncio.timeout(STATE_S):
                (state, *_) = await manager.get_internal_state()
        except TimeoutError:
            raise StartupError(
                f"SGLang's scheduler did not answer within {STATE_S:g} s of its start"
            ) from None
        self._describe(manager, scheduler.scheduler_infos[0], state)
        assert self._description is not None
        if self._hand_off is not None:
            self._description = await self._hand_off.describe(self._description)
        if self._description.lora:
            self._loras = LoraHost(manager, self.check)
            await self._loras.check_static()
        return self._description

    def _build(self) -> Runtime:
        with deaf_children():
            return Runtime(server_args=self._args)

    def _describe(self, manager: Any, scheduler: dict[str, Any], state: dict[str, Any]) -> None:
        modalities = media.modalities(manager)
        served = task_config(manager, modalities)
        description = config.describe(manager, scheduler, state, served, modalities)
        tokenizer, value = manager.tokenizer, manager.config_value
        anchor = tokenizer.encode("a", add_special_tokens=False)[-1]
        self._texts = TokenTexts(
            lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False)), anchor
        )
        self._terms = requests.Terms(
            longest=description.max_context_length or 0,
            defaults=config.sampling_defaults(manager),
            deterministic=bool(value("enable_deterministic_inference")),
            low_priority_first=bool(value("schedule_low_priority_values_first")),
        )
        if value("max_queued_requests") is not None:
            ranks = len(description.parallelism.ranks)
            self._limit = (description.max_running_requests or 0) + value("max_queued_requests") * ranks
        self._board = LoadBoard(manager, value("page_size"))
        self._prompts = media.Prompts(manager)
        self._tasks = SglangTasks(lambda: self.manager, description, served, self._prompts, self._terms)
        self._description = description

    async def stop(self) -> None:
        """Let SGLang free what it holds, then end what is left of it."""
        runtime, self._runtime = self._runtime, None
        self._kv_events.close()
        if runtime is None:
            return
        manager = runtime.tokenizer_manager
        if isinstance(self._hand_off, Prefills):
            await self._hand_off.stop()
        await asyncio.to_thread(manager._subprocess_watchdog.stop)
        if not self._failure:
            manager._dispatch_to_scheduler(ShutdownReq())
        await asyncio.to_thread(self._end_processes)
        self.observe(None)
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        for name in vars(runtime.port_args).values():
            if isinstance(name, str) and name.startswith("ipc://"):
                with contextlib.suppress(OSError):
                    os.unlink(name.removeprefix("ipc://"))

    def _end_processes(self) -> None:
        schedulers = [process for process in self._processes if DETOKENIZER not in processes.title(process)]
        if not self._failure:
            psutil.wait_procs(schedulers, timeout=SHUTDOWN_S)
        processes.end(processes.descendants(self._processes))

    def _child_failed(self) -> None:
        self._failure = self._failure or "one of its processes failed, its log says why"

    def check(self) -> None:
        """Raise when a process of SGLang is gone or said that it failed."""
        if self._runtime is None:
            return
        if not self._failure:
            self._failure = self._find_failure()
            if not self._failure:
                return
            log.error("SGLang: %s", self._failure)
        raise EngineDied

    def _find_failure(self) -> str:
        for process in self._processes:
            if not processes.lives(process):
                return f"process {process.pid} is gone"
        if self._reader is not None and self._reader.done():
            error = None if self._reader.cancelled() else self._reader.exception()
            log.error("SGLang's outputs cannot be read", exc_info=error)
            return "its outputs cannot be read any more"
        return ""

    def steps(self) -> int:
        """Signs of life of the schedulers and of the way back from them."""
        return 0 if self._board is None else self._board.steps(compiling=self._compiling > 0)

    def ranks_at_work(self) -> Mapping[int, int]:
        """The steps of each scheduler that said that it has requests; a hung one says so for ever."""
        if self._board is None or self._hand_off is not None:
            return {}
        return self._board.busy_ranks()

    def unfinished(self) -> int:
        """Sequences that SGLang has not finished, but for those that wait for another server."""
        if self._runtime is None:
            return 0
        elsewhere = 0 if self._hand_off is None else self._hand_off.waiting
        return max(0, len(self._runtime.tokenizer_manager.rid_to_state) - elsewhere)

    # ------------------------------------------------------------------------------------------ generation

    async def generate(self, call: GenerateCall) -> AsyncGenerator[Step, None]:
        """Hand the request to the scheduler and return its stream."""
        try:
            if isinstance(self._hand_off, Decodes):
                return await self._decode(call, self._hand_off)
            return await self._admit(call)
        except (Rejected, EngineFailure):
            raise
        except Exception as error:
            raise errors.before_acceptance(error, call.request) from error

    async def _admit(
        self, call: GenerateCall, room: dict[str, Any] | None = None
    ) -> AsyncGenerator[Step, None]:
        """The request's stream, up to the admission; `room` is where a decode engine meets the prefill engine."""
        if isinstance(self._hand_off, Prefills):
            stream = self._prefill(call, self._hand_off)
        else:
            stream = self._stream(call, room or {})
        await anext(stream)
        return stream

    async def _decode(self, call: GenerateCall, decodes: Decodes) -> AsyncGenerator[Step, None]:
        async with self._prompt(call) as prompt:
            ids = prompt.ids
        return await decodes.serve(
            call,
            ids,
            admit=functools.partial(self._admit, call),
            abort=functools.partial(self.abort, call.id),
        )

    async def _prefill(self, call: GenerateCall, prefills: Prefills) -> AsyncGenerator[Step, None]:
        """Yield an empty step for the admission, then the session that owns the request from there on."""
        async with contextlib.AsyncExitStack() as owned:
            async with self._prompt(call) as prompt:
                requests.check(call.request, len(prompt.ids), self._terms)
                room = prefills.room(call)
                inputs = requests.inputs(call, prompt, self._terms)
                self._check_room(len(inputs))
                reader = self._output_reader(call, prompt.ids)
                sequences = Sequences(self.manager, requests.meeting(inputs, room), reader)
                await owned.enter_async_context(sequences)
                await sequences.admit(first_output=False)
            yield Step()
            step = prefills.serve(call, prompt.ids, sequences, room)
            owned.pop_all()
        yield step

    async def _stream(self, call: GenerateCall, room: dict[str, Any]) -> AsyncGenerator[Step, None]:
        """Yield an empty step for the admission, then what the sequences gain.

        A guide is compiled by the scheduler, which tells of a bad one in its first output only: a guided request
        counts as admitted when that is there.
        """
        async with contextlib.AsyncExitStack() as admission:
            prompt = await admission.enter_async_context(self._prompt(call))
            requests.check(call.request, len(prompt.ids), self._terms)
            inputs = requests.inputs(call, prompt, self._terms)
            self._check_room(len(inputs))
            guided = call.request.HasField("guided")
            reader = self._output_reader(call, prompt.ids)
            async with Sequences(self.manager, requests.meeting(inputs, room), reader) as sequences:
                self._calls[call.id] = sequences
                try:
                    self._compiling += guided
                    try:
                        await sequences.admit(first_output=guided)
                    finally:
                        self._compiling -= guided
                    await admission.aclose()
                    yield Step()
                    async with contextlib.aclosing(sequences.steps()) as steps:
                        try:
                            async for step in steps:
                                yield step
                        except (Rejected, EngineFailure):
                            raise
                        except Exception as error:
                            raise errors.after_acceptance(error) from error
                finally:
                    del self._calls[call.id]

    def _output_reader(self, call: GenerateCall, prompt_ids: Sequence[int]) -> outputs.OutputReader:
        assert self._description is not None
        return outputs.OutputReader(
            call,
            prompt_ids,
            self._description.eos_token_ids,
            self.decode,
            counts_reasoning=bool(self._description.reasoning_parser),
        )

    @contextlib.asynccontextmanager
    async def _prompt(self, call: GenerateCall) -> AsyncIterator[media.Prompt]:
        """The prompt as SGLang would tokenise it; an empty one kills it, and one too long it refuses too late."""
        request = call.request
        assert self._description is not None
        assert self._prompts is not None
        field = request.WhichOneof("input") or "prompt"
        given = request.prompt if field == "prompt" else request.token_ids.ids
        self._prompts.check_text(field, request.prompt)
        async with self._prompts.rendered(given, call.media, field="media") as prompt:
            if not prompt.ids:
                raise invalid(field, "has no tokens; the tokenizer makes nothing of it")
            check_prompt_length(field, len(prompt.ids), self._description)
            check_prompt_logprob_start(request, len(prompt.ids))
            yield prompt

    def _check_room(self, more: int) -> None:
        """SGLang tells of a full queue only after it took the request; what is certain is refused before (GEN-05)."""
        if self._limit is not None and self.unfinished() + more > self._limit:
            raise Rejected(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"the engine runs and queues {self._limit} sequences at most, and is full; try again later",
                limit=self._limit,
            )

    async def abort(self, call_id: str) -> None:
        """SGLang ends the outputs after the step that it is in."""
        if isinstance(self._hand_off, Prefills):
            self._hand_off.sessions.end_call(call_id)  # whoever aborts has not learnt of it
        sequences = self._calls.get(call_id)
        if sequences is not None and not self._failure:
            sequences.abort()

    # ----------------------------------------------------------------------------------------------- tasks

    async def embed(
        self, call: TaskCall, item: tasks_pb2.TaskInput, options: tasks_pb2.EmbedOptions
    ) -> Tensor:
        """Embed one item."""
        return await self._serving_tasks.embed(call, item, options)

    async def classify(
        self, call: TaskCall, item: tasks_pb2.TaskInput, options: tasks_pb2.ClassifyOptions
    ) -> Classification:
        """Classify one item."""
        return await self._serving_tasks.classify(call, item, options)

    async def score(
        self, call: TaskCall, group: tasks_pb2.ScoreGroup, options: tasks_pb2.ScoreOptions
    ) -> GroupScores:
        """Score one group."""
        return await self._serving_tasks.score(call, group, options)

    @property
    def _serving_tasks(self) -> SglangTasks:
        if self._tasks is None:
            raise EngineDied("the engine is stopped")
        return self._tasks

    # ------------------------------------------------------------------------------------------------ LoRA

    def static_loras(self) -> Sequence[Lora]:
        """The adapters of `--lora-paths`."""
        return () if self._loras is None else self._loras.static

    async def load_lora(self, lora: Lora) -> None:
        """Check the adapter and load it into SGLang."""
        assert self._loras is not None  # the core asks only where the description says LoRA
        await self._loras.load(lora)

    async def unload_lora(self, lora: Lora) -> None:
        """Take the adapter out of SGLang."""
        assert self._loras is not None
        await self._loras.unload(lora)

    # ------------------------------------------------------------------------------------- load and tokens

    async def load(self) -> LoadSnapshot:
        """The schedulers' last load."""
        assert self._board is not None
        return self._board.snapshot()

    def kv_event_publishers(self) -> Sequence[KvEventPublisher]:
        """What SGLang's schedulers have bound; none while KV events are off."""
        assert self._description is not None
        return self._kv_events.publishers(self._description.parallelism.ranks)

    def observe(self, sink: Callable[[RuntimeEvent], None] | None) -> None:
        """Tell `sink` of what the schedulers do from now on."""
        if self._events is not None:
            self._events.stop()
        self._events = None if sink is None or self._board is None else StepEvents(self._board, sink)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text as SGLang streams it, special tokens left out."""
        return str(self.manager.tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def token_text(self, token_id: int) -> str:
        """The text of one token."""
        assert self._texts is not None
        return self._texts(token_id)

    @property
    def manager(self) -> Any:
        """SGLang's tokenizer manager. Raises `EngineDied` before the start and after the stop."""
        if self._runtime is None or self._failure:
            raise EngineDied("the engine is stopped")
        return self._runtime.tokenizer_manager


def _one_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300]
