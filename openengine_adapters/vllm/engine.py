"""vLLM's AsyncLLM behind the port."""

from __future__ import annotations

import asyncio
import functools
import logging
from argparse import Namespace
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any

import vllm
from vllm import AsyncEngineArgs
from vllm.lora.request import LoRARequest
from vllm.outputs import STREAM_FINISHED, RequestOutput
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.output_processor import RequestOutputCollector

from openengine.v1 import generate_pb2, tasks_pb2
from openengine_adapters.core.errors import EngineDied, EngineFailure, Rejected, invalid
from openengine_adapters.core.handoff.roles import HandOffWanted, in_role
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
from openengine_adapters.vllm import config, errors, kv, media, outputs, requests
from openengine_adapters.vllm.disaggregation import Decodes, Prefills, hand_off
from openengine_adapters.vllm.load import LoadBoard
from openengine_adapters.vllm.lora import LoraHost, check_lora_config, configure_lora
from openengine_adapters.vllm.steps import StepEvents
from openengine_adapters.vllm.task_config import task_config
from openengine_adapters.vllm.tasks import VllmTasks

log = logging.getLogger(__name__)

SHUTDOWN_S = 5.0


class VllmEngine(Sessions):
    """One vLLM engine in this process; its core and workers are child processes."""

    def __init__(
        self,
        args: AsyncEngineArgs,
        kv_events: KvEventsWanted | None = None,
        score_template: str = "",
        loras: Sequence[Lora] = (),
        wanted: HandOffWanted | None = None,
    ) -> None:
        self._args = args
        self._wanted = wanted or HandOffWanted()
        self._hand_off: Prefills | Decodes | None = None
        self._score_template = score_template
        self._static_loras = tuple(loras)
        self._loras: LoraHost | None = None
        self._kv_events = kv.KvEvents(kv_events or KvEventsWanted())
        self._board = LoadBoard()
        self._llm: AsyncLLM | None = None
        self._description: EngineDescription | None = None
        self._defaults: dict[str, Any] = {}
        self._texts: TokenTexts | None = None
        self._internal_ids: dict[str, str] = {}  # vLLM's id of each running call
        self._prompts: media.Prompts | None = None
        self._tasks: VllmTasks | None = None

    @classmethod
    def from_flags(
        cls,
        flags: Namespace,
        kv_events: KvEventsWanted | None = None,
        score_template: str = "",
        loras: Sequence[Lora] = (),
        wanted: HandOffWanted | None = None,
    ) -> VllmEngine:
        """Make an engine from vLLM's parsed flags. Raises `StartupError` when vLLM refuses them."""
        try:
            return cls(AsyncEngineArgs.from_cli_args(flags), kv_events, score_template, loras, wanted)
        except Exception as error:
            raise StartupError(f"vLLM does not take these flags: {_one_line(error)}") from error

    # ------------------------------------------------------------------------------------------- lifecycle

    async def start(self) -> EngineDescription:
        """Start vLLM off the event loop, so that the server answers STARTING meanwhile."""
        config.check_version(vllm.__version__)
        try:
            llm: AsyncLLM = await asyncio.to_thread(self._build)
        except StartupError:
            raise
        except Exception as error:
            log.debug("vLLM did not start", exc_info=error)
            raise StartupError(f"vLLM did not start: {_one_line(error)}") from error
        self._llm = llm
        tokenizer = llm.tokenizer
        tasks = await llm.get_supported_tasks()
        self._defaults = llm.model_config.get_diff_sampling_param()
        if tokenizer is not None:
            anchor = tokenizer.encode("a", add_special_tokens=False)[-1]
            self._texts = TokenTexts(
                lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False), anchor
            )
        modalities = media.modalities(llm)
        served = task_config(
            llm.vllm_config,
            tasks,
            modalities,
            text=tokenizer is not None,
            score_template=self._score_template,
        )
        self._description = config.describe(
            llm.vllm_config,
            tokenizer,
            tuple(tasks),
            vllm.__version__,
            self._args.served_model_name,
            served,
            modalities,
        )
        if self._hand_off is not None:
            connector = await self._hand_off.start(llm)
            self._description = in_role(self._description, self._hand_off.role, connector)
        self._prompts = media.Prompts(llm)
        self._tasks = VllmTasks(
            llm, self._description, served, self._prompts, self.lora_request, self._score_template
        )
        if self.kv_event_publishers() and self._description.generation is not None:
            # The history of KV events begins with an empty cache, said aloud.
            await kv.clear_cache(llm, self._description.parallelism.ranks)
        await self._load_static_loras(llm)
        return self._description

    async def _load_static_loras(self, llm: AsyncLLM) -> None:
        if llm.vllm_config.lora_config is not None:
            self._loras = LoraHost(llm, llm.vllm_config.lora_config)
        elif self._static_loras:
            raise StartupError("--lora-modules needs --enable-lora")
        for lora in self._static_loras:
            try:
                await self.load_lora(lora)
            except (Rejected, EngineFailure) as error:
                raise StartupError(f"adapter {lora.name!r} of --lora-modules: {error}") from error

    def _build(self) -> AsyncLLM:
        self._args.kv_events_config = self._kv_events.configure(
            self._args.kv_events_config, self._args.data_parallel_size
        )
        configure_lora(self._args)
        self._hand_off = hand_off(self._args, self._wanted)
        built = self._args.create_engine_config()
        self._kv_events.check(built)
        check_lora_config(built)
        with deaf_children():
            return AsyncLLM.from_vllm_config(
                built,
                stat_loggers=[self._board.logger],
                enable_log_requests=self._args.enable_log_requests,
                disable_log_stats=self._args.disable_log_stats,
            )

    async def stop(self) -> None:
        """Shut vLLM down; its own shutdown blocks, so it runs in a thread."""
        llm, self._llm = self._llm, None
        if llm is not None:
            if isinstance(self._hand_off, Prefills):
                await self._hand_off.stop()
            await asyncio.to_thread(llm.shutdown, SHUTDOWN_S)
        self._kv_events.close()

    def check(self) -> None:
        """vLLM notices the death of its processes by itself, and sets a flag once it has ended the others too."""
        if self._llm is not None and (self._llm.errored or config.lost_process(self._llm)):
            raise EngineDied

    def steps(self) -> int:
        """Scheduler steps so far, over all ranks."""
        return self._board.steps

    def ranks_at_work(self) -> Mapping[int, int]:
        """The steps of each rank that was given requests; unknown where these may wait for another server's blocks."""
        if self._llm is None or self._hand_off is not None:
            return {}
        return {rank: self._board.steps_of(rank) for rank in config.busy_ranks(self._llm)}

    def unfinished(self) -> int:
        """Requests that vLLM has not finished, but for those that wait for another server's blocks."""
        if self._llm is None:
            return 0
        waiting = self._hand_off.decoding.waiting if isinstance(self._hand_off, Decodes) else 0
        return max(0, int(self._llm.get_num_unfinished_requests()) - waiting)

    # ------------------------------------------------------------------------------------------ generation

    async def generate(self, call: GenerateCall) -> AsyncGenerator[Step, None]:
        """Add the request to vLLM and return its stream.

        `AsyncLLM.generate` would report a refusal only at its first step; `add_request`, which it is built on,
        returns as soon as the core has the request.
        """
        try:
            prompt = await self._prompt(call)
            if isinstance(self._hand_off, Decodes):
                return await self._decode(call, prompt, self._hand_off)
            return await self._admit(call, prompt)
        except Exception as error:
            raise errors.before_acceptance(error, call.request) from error

    async def _admit(
        self, call: GenerateCall, prompt: Any, engine_id: str = "", handed: dict[str, Any] | None = None
    ) -> AsyncGenerator[Step, None]:
        """Add a request, with what a prefill server handed over on a decode server."""
        llm, request = self.llm, call.request
        prefills = self._hand_off if isinstance(self._hand_off, Prefills) else None
        engine_id = engine_id or call.id
        try:
            collector = await llm.add_request(
                engine_id,
                prompt,
                requests.sampling_params(call, self._defaults, handed)
                if prefills is None
                else requests.prefill_params(call, prefills.kv_transfer_params),
                lora_request=self.lora_request(call.lora),
                trace_headers=call.trace_headers or None,
                priority=requests.priority(request),
                data_parallel_rank=_data_parallel_rank(request),
            )
        except BaseException:
            if engine_id != call.id:
                await llm.abort(engine_id)  # the core knows it by the call's id only
            raise
        assert self._description is not None
        self._internal_ids[call.id] = collector.request_id
        reader = outputs.OutputReader(
            request, self._description.eos_token_ids, None if self._texts is None else self.decode
        )
        if prefills is None:
            return self._stream(llm, call.id, collector, reader.read)
        return self._stream(
            llm, call.id, collector, prefills.reader(call, prompt["prompt_token_ids"], reader)
        )

    async def _decode(self, call: GenerateCall, prompt: Any, decodes: Decodes) -> AsyncGenerator[Step, None]:
        return await decodes.serve(
            call,
            decodes.read(call.request.kv.session),
            prompt["prompt_token_ids"],
            admit=functools.partial(self._admit, call, prompt),
            abort=functools.partial(self.abort, call.id),
        )

    async def _prompt(self, call: GenerateCall) -> Any:
        assert self._description is not None
        assert self._prompts is not None
        request = call.request
        field = request.WhichOneof("input") or "input"
        prompt = await self._prompts.render(
            request.prompt if field == "prompt" else request.token_ids.ids,
            call.media,
            field="media",
            cache_salt=requests.cache_salt(
                request, own=isinstance(self._hand_off, Decodes) and self._hand_off.needs_all_blocks
            ),
        )
        ids: Sequence[int] = prompt["prompt_token_ids"]
        if not ids:
            raise invalid(field, "has no tokens; the tokenizer makes nothing of it")
        check_prompt_length(field, len(ids), self._description)
        check_prompt_logprob_start(request, len(ids))
        return prompt

    async def _stream(
        self,
        llm: AsyncLLM,
        call_id: str,
        collector: RequestOutputCollector,
        read: Callable[[RequestOutput], Step],
    ) -> AsyncGenerator[Step, None]:
        finished = False
        try:
            while not finished:
                # What is there already is taken without a task switch.
                output = collector.get_nowait() or await collector.get()
                assert isinstance(output, RequestOutput)
                finished = output.finished
                if output is not STREAM_FINISHED:
                    yield read(output)
        except EngineDeadError as error:
            finished = True
            raise EngineDied from error
        except Exception as error:
            raise errors.after_acceptance(error) from error
        finally:
            if not finished:
                await llm.abort(collector.request_id, internal=True)
            self._internal_ids.pop(call_id, None)
            collector.close()

    async def abort(self, call_id: str) -> None:
        """vLLM ends the stream with an `abort` finish within a millisecond.

        By vLLM's own id where it has one: by the caller's it would keep the parent of several sequences for ever.
        """
        if self._llm is None or self._llm.errored:
            return
        if isinstance(self._hand_off, Prefills):
            self._hand_off.sessions.end_call(call_id)  # whoever aborts has not learnt of it
        internal = self._internal_ids.pop(call_id, None)
        await self._llm.abort(internal or call_id, internal=internal is not None)

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
    def _serving_tasks(self) -> VllmTasks:
        if self._llm is None or self._tasks is None:
            raise EngineDied("the engine is stopped")
        return self._tasks

    # ------------------------------------------------------------------------------------------------ LoRA

    def static_loras(self) -> Sequence[Lora]:
        """The adapters of `--lora-modules`."""
        return self._static_loras

    async def load_lora(self, lora: Lora) -> None:
        """Check the adapter and add it to vLLM."""
        assert self._loras is not None  # the core asks only where the description says LoRA
        await self._loras.load(lora)

    async def unload_lora(self, lora: Lora) -> None:
        """Take the adapter out of vLLM."""
        assert self._loras is not None
        await self._loras.unload(lora)

    def lora_request(self, lora: Lora | None) -> LoRARequest | None:
        """What vLLM takes with a request that uses this adapter."""
        return None if lora is None or self._loras is None else self._loras.request(lora)

    # ---------------------------------------------------------------------------- load, events and tokens

    async def load(self) -> LoadSnapshot:
        """The last step's statistics."""
        assert self._description is not None
        return self._board.snapshot(self._description.parallelism.ranks, self._description.total_kv_blocks)

    def kv_event_publishers(self) -> Sequence[KvEventPublisher]:
        """What vLLM's schedulers have bound; none while KV events are off."""
        return kv.publishers(self.llm.get_kv_event_sources())

    def observe(self, sink: Callable[[RuntimeEvent], None] | None) -> None:
        """Tell `sink` of every step from now on."""
        self._board.events = None if sink is None else StepEvents(sink)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text as vLLM streams it, special tokens left out."""
        tokenizer = self.llm.get_tokenizer()
        return str(tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def token_text(self, token_id: int) -> str:
        """The text of one token; empty without a tokenizer."""
        return "" if self._texts is None else self._texts(token_id)

    @property
    def llm(self) -> AsyncLLM:
        """The running AsyncLLM. Raises `EngineDied` before the start and after the stop."""
        if self._llm is None:
            raise EngineDied("the engine is stopped")
        return self._llm


def _data_parallel_rank(request: generate_pb2.GenerateRequest) -> int | None:
    return request.kv.data_parallel_rank if request.kv.HasField("data_parallel_rank") else None


def _one_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300]
