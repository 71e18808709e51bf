"""A Generate request in the scheduler: it reads its prompt, then each of its outputs grows by a token a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from openengine.v1 import errors_pb2, generate_pb2, kv_pb2
from openengine_adapters.core.errors import EngineFailure, invalid
from openengine_adapters.core.validation import check_prompt_logprob_start
from openengine_adapters.engine import Delta, GenerateCall, PromptScores, Step, TokenScore
from openengine_adapters.reference.cache import Chain, Lease, Namespace
from openengine_adapters.reference.guided import Guide
from openengine_adapters.reference.model import State, ToyModel
from openengine_adapters.reference.outbox import Outbox
from openengine_adapters.reference.output import Output, Stops
from openengine_adapters.reference.prompts import Prompt
from openengine_adapters.reference.sampling import Sampler, Scorer
from openengine_adapters.reference.scheduler import Work
from openengine_adapters.reference.settings import BLOCK_SIZE, Settings

OpenSession = Callable[["Generation", Lease], kv_pb2.KvSessionRef]
"""Takes over the prompt's blocks, and returns what a decode engine needs."""


class Generation(Work):
    """One request. With `open_session` it ends when its prompt is read, as on a prefill engine."""

    def __init__(
        self,
        call: GenerateCall,
        prompt: Prompt,
        namespace: Namespace,
        *,
        model: ToyModel,
        settings: Settings,
        bias: Sequence[float] | None,
        guide: Guide | None,
        on_room: Callable[[], None],
        open_session: OpenSession | None = None,
    ) -> None:
        super().__init__(call.id, call.request.priority, namespace)
        self.outbox = Outbox(on_room)
        self.prompt = prompt
        self.state = model.start()
        self._request = call.request
        self._model = model
        self._bias = bias
        self._guide = guide
        self._open_session = open_session
        self._fail_after = settings.faults.fail_after
        self._stops = Stops(call.request.stopping, settings.max_context - len(prompt.ids), call.keep_stop)
        self._transferred: State | None = None
        self._read = 0
        self._cached: int | None = None
        self._chain: Chain | None = None
        self._scores = PromptScorer(call.request.response, prompt) if _wants_prompt(call.request) else None
        self._outputs: list[Output] = []
        self._done = False

    # -------------------------------------------------------------------------------------------- scheduling

    @property
    def tokens(self) -> int:
        """The prompt, and what was generated."""
        return len(self.prompt.ids) + self.generated

    @property
    def blocks(self) -> int:
        """The prompt's blocks, and for each output its own from the prompt's last, unfilled one on."""
        longest = self._stops.most if self._open_session is None else 0
        own = -(-(len(self.prompt.ids) % BLOCK_SIZE + longest) // BLOCK_SIZE)
        return -(-len(self.prompt.ids) // BLOCK_SIZE) + (self._sequences * own if longest else 0)

    @property
    def paused(self) -> bool:
        """Whether the reader is so far behind that nothing more may wait for it."""
        return self.outbox.full

    @property
    def done(self) -> bool:
        """Whether the last output has ended."""
        return self._done

    def attach(self, state: State) -> None:
        """Go on from the state that a prefill engine computed."""
        self._transferred = state
        self.ready = True

    def step(self, budget: int) -> tuple[int, int]:
        """Read prompt tokens; with the prompt read, give each open output one token more."""
        read = 0
        if self._chain is None or self._read < len(self.prompt.ids):
            read = self._read_prompt(budget)
            if self._read < len(self.prompt.ids):
                return read, 0
            if self._open_session is not None:
                self._hand_off()
                return read, 0
            self._begin_outputs()
        step = self._new_step([output.step() for output in self._outputs if output.finish is None])
        self.generated += len(step.deltas)
        self.outbox.put(step)
        if all(output.finish is not None for output in self._outputs):
            self._end()
        elif self._fail_after is not None and self.generated >= self._fail_after:
            self.fail(EngineFailure(f"failed on purpose after {self.generated} tokens"))
        return read, len(step.deltas)

    def cancel(self) -> None:
        """End every open output as cancelled; a prefill, which has none, fails."""
        if self._done:
            return
        if self._open_session is not None:
            self.fail(EngineFailure("the request was aborted", code=errors_pb2.ERROR_CODE_CANCELLED))
            return
        if not self._outputs:
            self._begin_outputs()
        self.outbox.put(
            self._new_step([output.cancel() for output in self._outputs if output.finish is None])
        )
        self._end()

    def fail(self, failure: BaseException) -> None:
        """End the request with a failure."""
        self._end(failure)

    # --------------------------------------------------------------------------------------------- the steps

    def _read_prompt(self, budget: int) -> int:
        """Read up to `budget` tokens that no cache had; the state follows all of them."""
        assert self.lease is not None  # the scheduler gives one before the first step
        ids, media = self.prompt.ids, self.prompt.media
        if self._chain is None:
            self._chain = self.lease.chain()
            # The scores of cached tokens would be missing, so who wants scores reads everything.
            skip = self._request.kv.bypass_prefix_cache or self._scores is not None
            self._cached = 0 if skip else self._chain.match(ids, media)
            for position in range(self._cached):
                self._advance(position)
        end = min(len(ids), self._read + budget)
        read = end - self._read
        while self._read < end:
            self._chain.append(ids[self._read], media.get(self._read, b""))
            self._advance(self._read)
        return read

    def _advance(self, position: int) -> None:
        ids = self.prompt.ids
        if self._scores is not None:
            recent = ids[max(0, position - 3) : position]
            self._scores.read(position, lambda: self._model.logits(self.state, recent, self._bias))
        self.state = self._model.advance(self.state, ids[position], self.prompt.media.get(position, b""))
        self._read = position + 1

    def _begin_outputs(self) -> None:
        response = self._request.response
        selection = response.output_candidates if response.HasField("output_candidates") else None
        for index in range(self._sequences):
            self._outputs.append(
                Output(
                    index,
                    self._model,
                    self.sampler(index),
                    self._stops,
                    state=self.state if self._transferred is None else self._transferred,
                    prompt_tail=self.prompt.ids[-3:],
                    chain=None if self.lease is None or self._chain is None else self.lease.fork(self._chain),
                    bias=self._bias,
                    scorer=Scorer(selection) if response.return_output_logprobs else None,
                    guide=None if self._guide is None else self._guide.fork(),
                )
            )

    def sampler(self, index: int) -> Sampler:
        """How the output `index` draws its tokens."""
        return Sampler(self._request.sampling, index, self.prompt.ids)

    @property
    def _sequences(self) -> int:
        return self._request.sampling.num_sequences or 1

    def _hand_off(self) -> None:
        assert self.lease is not None
        assert self._open_session is not None
        lease, self.lease = self.lease, None
        step = self._new_step([])
        step.session = self._open_session(self, lease)
        self.outbox.put(step)
        self._end()

    def _new_step(self, deltas: list[Delta]) -> Step:
        step = Step(deltas, prompt_tokens=len(self.prompt.ids), cached_prompt_tokens=self._cached)
        if self._scores is not None:
            step.prompt = self._scores.take()
        return step

    def _end(self, failure: BaseException | None = None) -> None:
        self._done = True
        self.outbox.end(failure)


class PromptScorer:
    """Collects the records of the prompt's tokens, from the first position asked for."""

    def __init__(self, options: generate_pb2.ResponseOptions, prompt: Prompt) -> None:
        selection = options.prompt_candidates if options.HasField("prompt_candidates") else None
        self._scorer = Scorer(selection)
        self._start = options.prompt_logprob_start
        self._ids = prompt.ids
        self._scores: list[TokenScore | None] = []
        self._taken = False

    def read(self, position: int, logits: Callable[[], list[float]]) -> None:
        """Score the token at `position`; the first one has nothing before it, and no score."""
        if position >= self._start:
            self._scores.append(self._scorer.score(logits(), self._ids[position]) if position else None)

    def take(self) -> PromptScores | None:
        """The records, once, when they are complete."""
        ids = self._ids[self._start :]
        if self._taken or len(self._scores) < len(ids):
            return None
        self._taken = True
        return PromptScores(ids, self._scores)


def check_length(prompt: Prompt, request: generate_pb2.GenerateRequest, longest: int) -> None:
    """What only the tokenised prompt can tell (GEN-03, GEN-10, RESP-02). Raises `Rejected`."""
    field = request.WhichOneof("input") or "input"
    if not prompt.ids:
        raise invalid(field, "has no tokens")
    if len(prompt.ids) >= longest:
        raise invalid(
            field,
            f"the prompt has {len(prompt.ids)} tokens and the context holds {longest}, with no room for one more; "
            f"shorten it to {longest - 1} or fewer",
            limit=longest - 1,
            value=len(prompt.ids),
        )
    if _wants_prompt(request):
        check_prompt_logprob_start(request, len(prompt.ids))


def _wants_prompt(request: generate_pb2.GenerateRequest) -> bool:
    return request.response.return_prompt_logprobs
