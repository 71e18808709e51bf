"""`openengine generate`."""

from __future__ import annotations

import argparse
import time
from collections.abc import Coroutine, Iterable
from typing import TYPE_CHECKING, Any

from openengine.v1 import generate_pb2
from openengine_adapters.client import (
    EngineError,
    Finished,
    GenerateEvent,
    Generation,
    PrefillReady,
    PromptTokens,
    Tokens,
)
from openengine_adapters.client.commands._common import choose_model, connected
from openengine_adapters.client.commands._request import add_request_arguments, build_request
from openengine_adapters.client.layout import one_line
from openengine_adapters.client.messages import to_json

if TYPE_CHECKING:
    from openengine_adapters.client.terminal import Terminal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The request, and whether to sum it up."""
    add_request_arguments(parser)
    parser.add_argument("--quiet", action="store_true", help="no line about usage on standard error")


def run(args: argparse.Namespace, terminal: Terminal) -> Coroutine[Any, Any, int]:
    """Print the outputs as they come; with several of them one after the other."""
    # The prompt is read before there is an event loop: Ctrl-C would not end a read inside one.
    return _generate(args, terminal, build_request(args))


async def _generate(
    args: argparse.Namespace, terminal: Terminal, request: generate_pb2.GenerateRequest
) -> int:
    async with connected(args) as client:
        request.model = choose_model(client, args.model)
        async with client.generate(request, timeout=args.timeout) as generation:
            if terminal.json:
                return await _print_json(generation, terminal)
            clock = _Clock()
            printer = _Printer(terminal, generation.num_sequences, tokens=args.logprobs is not None)
            async for event in generation:
                clock.tick(event)
                printer.show(event)
    terminal.end_line()
    if not args.quiet:
        terminal.note(clock.summary(printer.finished, generation.usage))
    return 1 if any(finished.reason == "CANCELLED" for finished in printer.finished) else 0


async def _print_json(generation: Generation, terminal: Terminal) -> int:
    cancelled = False
    try:
        async for event in generation:
            terminal.record({"request_id": generation.request_id} | _record(event))
            cancelled |= isinstance(event, Finished) and event.reason == "CANCELLED"
    except EngineError as error:
        failure = {
            "event": "error",
            "code": error.code,
            "message": error.message,
            "retryable": error.retryable,
        }
        if error.retry_after_ms is not None:
            failure["retry_after_ms"] = error.retry_after_ms
        failure |= {"details": error.details} | _usage(error.usage)
        terminal.record({"request_id": generation.request_id} | failure)
        raise
    return int(cancelled)


def _record(event: GenerateEvent) -> dict[str, Any]:
    match event:
        case PromptTokens(tokens):
            return {"event": "prompt", "tokens": [to_json(token) for token in tokens]}
        case Tokens(index, text, tokens):
            records = [to_json(token) for token in tokens]
            return {"event": "token", "output_index": index, "text": text, "tokens": records}
        case Finished(index, reason, message, stop, usage):
            record = {"event": "finished", "output_index": index, "reason": reason, "message": message}
            return record | ({"stop_match": to_json(stop)} if stop else {}) | _usage(usage)
        case PrefillReady(session, usage):
            return {"event": "prefill_ready", "kv_session": to_json(session)} | _usage(usage)


def _usage(usage: generate_pb2.Usage | None) -> dict[str, Any]:
    return {"usage": to_json(usage)} if usage else {}


class _Printer:
    """Prints one output at a time, in order; what comes of a later one waits for its turn."""

    def __init__(self, terminal: Terminal, count: int, *, tokens: bool) -> None:
        self.finished: list[Finished] = []
        self._terminal = terminal
        self._count = count
        self._tokens = tokens
        self._current = 0
        self._waiting: dict[int, list[Tokens | Finished]] = {}
        self._head()

    def show(self, event: GenerateEvent) -> None:
        """Print an event now or when its output has its turn."""
        match event:
            case PromptTokens(tokens):
                self._token_lines(tokens)
            case PrefillReady(session):
                self._terminal.record(to_json(session))
            case Tokens(index) | Finished(index):
                self._waiting.setdefault(index, []).append(event)
                self._print_ready()

    def _print_ready(self) -> None:
        while events := self._waiting.pop(self._current, []):
            for event in events:
                if isinstance(event, Finished):
                    self.finished.append(event)
                    self._current += 1
                    self._head()
                elif self._tokens:
                    self._token_lines(event.tokens)
                else:
                    self._terminal.stream(event.text)

    def _head(self) -> None:
        if 1 < self._count > self._current:
            self._terminal.line(f"[{self._current}]", "bold cyan")

    def _token_lines(self, tokens: Iterable[generate_pb2.TokenInfo]) -> None:
        for token in tokens:
            score = f"{token.logprob:9.4f}" if token.HasField("logprob") else "        -"
            rank = f"#{token.rank}" if token.HasField("rank") else ""
            others = "  ".join(f"{one_line(repr(c.token))} {c.logprob:.4f}" for c in token.candidates)
            line = f"{token.token_id:>7}  {one_line(repr(token.token)):<20}{score} {rank:<5} {others}"
            self._terminal.line(line.rstrip())


class _Clock:
    """Measures a generation as its reader sees it."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._first: float | None = None

    def tick(self, event: GenerateEvent) -> None:
        """Note when the first tokens came."""
        if self._first is None and isinstance(event, Tokens):
            self._first = time.monotonic()

    def summary(self, finished: Iterable[Finished], usage: generate_pb2.Usage | None) -> str:
        """Return the usage line."""
        took = time.monotonic() - self._start
        parts = []
        if usage:
            cached = f" ({usage.cached_prompt_tokens} cached)" if usage.cached_prompt_tokens else ""
            parts.append(f"{usage.prompt_tokens} prompt{cached} + {usage.completion_tokens} new tokens")
        parts += [_ending(end) for end in finished]
        parts.append(f"{took:.2f} s")
        if self._first:
            parts.append(f"first after {self._first - self._start:.2f} s")
            if usage and took > 0:
                parts.append(f"{usage.completion_tokens / took:.1f} tokens/s")
        return " · ".join(parts)


def _ending(finished: Finished) -> str:
    reason, stop = finished.reason.lower(), finished.stop
    if stop is None:
        return f"{reason} ({finished.message})" if finished.message else reason
    match stop.WhichOneof("match"):
        case "stop_text":
            return f"{reason} at {stop.stop_text!r}"
        case "stop_token_id":
            return f"{reason} at token {stop.stop_token_id}"
        case "eos_token_id":
            return f"{reason} at the model's end"
    return reason
