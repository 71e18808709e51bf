"""One output of a Generate request: its tokens, its text, and when it ends."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from openengine.v1 import generate_pb2
from openengine_adapters.engine import Delta, Finish, FinishKind
from openengine_adapters.reference import tokenizer
from openengine_adapters.reference.cache import Chain
from openengine_adapters.reference.guided import Guide
from openengine_adapters.reference.model import State, ToyModel
from openengine_adapters.reference.sampling import Sampler, Scorer


class Stops:
    """The caller's stop conditions and token limits; `longest` is what the context leaves."""

    def __init__(self, options: generate_pb2.StoppingOptions, longest: int, keep: bool) -> None:
        self.most = min(options.max_tokens, longest) if options.HasField("max_tokens") else longest
        self.least = options.min_tokens
        self.ignore_eos = options.ignore_eos
        self.keep = keep
        self.token_ids: set[int] = set()
        self.texts: list[str] = []
        for condition in options.conditions:
            if condition.WhichOneof("condition") == "stop_text":
                self.texts.append(condition.stop_text)
            else:
                self.token_ids.add(condition.stop_token_id)

    @property
    def too_early(self) -> set[int]:
        """What may not be drawn before the least number of tokens is reached."""
        return self.token_ids | {tokenizer.EOS}

    def find(self, text: str, known: int) -> tuple[int, int, str] | None:
        """The match that ends first beyond the first `known` characters: its start, end and stop string."""
        found = []
        for order, stop in enumerate(self.texts):
            start = text.find(stop, max(0, known - len(stop) + 1))
            if start >= 0:
                found.append((start + len(stop), order, start, stop))
        if not found:
            return None
        end, _, start, stop = min(found)
        return start, end, stop


class Output:
    """Grows by one token a step. `prompt_tail` is the end of the prompt, which the model looks back on."""

    def __init__(
        self,
        index: int,
        model: ToyModel,
        sampler: Sampler,
        stops: Stops,
        *,
        state: State,
        prompt_tail: Sequence[int],
        chain: Chain | None,
        bias: Sequence[float] | None,
        scorer: Scorer | None,
        guide: Guide | None,
    ) -> None:
        self.index = index
        self.finish: Finish | None = None
        self.length = 0
        self._model = model
        self._sampler = sampler
        self._stops = stops
        self._state = state
        self._recent = list(prompt_tail)
        self._chain = chain
        self._bias = bias
        self._scorer = scorer
        self._guide = guide
        self._text = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def step(self) -> Delta:
        """Draw the next token and return what it adds."""
        logits = self._model.logits(self._state, self._recent, self._bias)
        token = self._draw(logits)
        self.length += 1
        self._state = self._model.advance(self._state, token)
        self._recent = [*self._recent[-2:], token]
        if self._chain is not None:
            self._chain.append(token)
        text = self._add_text(token)
        scores = None if self._scorer is None else [self._scorer.score(logits, token)]
        return Delta(self.index, [token], text, scores=scores, finish=self.finish)

    def cancel(self) -> Delta:
        """End here; the text of an unfinished character is sent as far as it goes."""
        self.finish = Finish(FinishKind.CANCELLED)
        return Delta(self.index, (), self._decoder.decode(b"", True), finish=self.finish)

    def _draw(self, logits: Sequence[float]) -> int:
        banned = self._stops.too_early if self.length < self._stops.least else set()
        if self._guide is None:
            return self._sampler.draw(logits, banned=banned)
        allowed = self._guide.allowed(self._stops.most - self.length)
        # A finished guide lets only EOS through, and the output then ends with it whatever the least length is.
        allowed = (allowed - banned) or allowed
        token = self._sampler.draw(logits, allowed=allowed.__contains__)
        self._guide.push(token)
        return token

    def _add_text(self, token: int) -> str:
        """Decode the token, decide whether the output ends, and return the text that goes out."""
        known = len(self._text)
        may_stop = self.length > self._stops.least
        if may_stop and token in self._stops.token_ids:
            self.finish = Finish(FinishKind.STOP_TOKEN, token_id=token)
            added = self._decoder.decode(tokenizer.token_bytes(token) if self._stops.keep else b"", True)
            self._text += added
            return added
        self._text += self._decoder.decode(tokenizer.token_bytes(token))
        if token == tokenizer.EOS and (may_stop or self._over) and not self._stops.ignore_eos:
            self.finish = Finish(FinishKind.EOS, token_id=token)
        elif may_stop and (match := self._stops.find(self._text, known)) is not None:
            start, end, stop = match
            self.finish = Finish(FinishKind.STOP_TEXT, text=stop)
            return self._text[known : end if self._stops.keep else max(start, known)]
        elif self.length >= self._stops.most:
            self.finish = Finish(FinishKind.LENGTH)
        if self.finish is not None:
            self._text += self._decoder.decode(b"", True)
        return self._text[known:]

    @property
    def _over(self) -> bool:
        return self._guide is not None and self._guide.complete
