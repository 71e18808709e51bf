"""Guided decoding: which tokens may come next so that the output keeps its form.

All six kinds of guide become one kind of grammar. While enough tokens are left, only tokens are let through from which
the output can still be completed in time.
"""

from __future__ import annotations

import functools

from openengine.v1 import generate_pb2
from openengine_adapters.core.errors import invalid
from openengine_adapters.reference import tokenizer
from openengine_adapters.reference.guided import ebnf, grammar, json_schema, regex, structural
from openengine_adapters.reference.guided.grammar import GuideError, Machine, Symbols

BACKEND = "reference"
"""The name under which `guided.backend` may ask for this."""

_SINGLES = [(token, tokenizer.token_bytes(token)[0]) for token in range(256)]
_LONGER = [
    (token, *tokenizer.token_bytes(token))
    for token in range(256, tokenizer.VOCAB_SIZE)
    if tokenizer.token_bytes(token)
]


def compile_guide(guided: generate_pb2.GuidedDecoding) -> Guide:
    """Return the guide of a request. Raises `Rejected` when it is malformed or cannot be enforced (GUIDE-02)."""
    kind = guided.WhichOneof("guide")
    try:
        symbols = _symbols(guided)
        grammar.check(symbols)
        return Guide(Machine(symbols))
    except GuideError as error:
        raise invalid(f"guided.{kind}", str(error)) from None
    except RecursionError:
        raise invalid(f"guided.{kind}", "is nested too deeply") from None


def _symbols(guided: generate_pb2.GuidedDecoding) -> Symbols:
    kind = guided.WhichOneof("guide")
    if kind == "choice":
        return grammar.either(grammar.text(choice) for choice in guided.choice.choices)
    if kind == "json_object":
        return json_schema.any_object()
    if kind == "json_schema":
        return json_schema.compile_schema(guided.json_schema)
    if kind == "regex":
        return regex.compile_regex(guided.regex)
    if kind == "ebnf_grammar":
        return ebnf.compile_ebnf(guided.ebnf_grammar)
    return structural.compile_structural_tag(guided.structural_tag)


class Guide:
    """Follows one output through its grammar."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._state = machine.start

    def fork(self) -> Guide:
        """The same guide for another output."""
        return Guide(self._machine)

    @property
    def complete(self) -> bool:
        """Whether nothing but the end can follow."""
        return not self._machine.split(self._state)

    def allowed(self, left: int) -> set[int]:
        """The tokens that may come next when `left` tokens are left, this one included."""
        may_end = None in self._state
        fitting = self._fitting()
        # Bytes are the most tokens that a completion can need; one more is for EOS.
        allowed = _within(left - 2, fitting)
        if not allowed and not may_end:
            allowed = _within(left - 1, fitting) or _within(grammar.UNREACHABLE - 1, fitting)
        return allowed | {tokenizer.EOS} if may_end else allowed

    def push(self, token: int) -> None:
        """Go on with a token that was allowed; EOS changes nothing."""
        for byte in tokenizer.token_bytes(token):
            self._state = self._machine.advance(self._state, byte)

    def _fitting(self) -> dict[int, set[int]]:
        """The tokens that fit, by the bytes that the output then still needs."""
        machine = self._machine
        found: dict[int, set[int]] = {}
        for bits, after in machine.split(self._state):
            found.setdefault(machine.distance(after), set()).update(_starting(bits))
            for token, first, *rest in _LONGER:
                if bits >> first & 1:
                    state = after
                    for byte in rest:
                        state = machine.advance(state, byte)
                    if state:
                        found.setdefault(machine.distance(state), set()).add(token)
        return found


@functools.lru_cache(maxsize=1024)
def _starting(bits: int) -> frozenset[int]:
    return frozenset(token for token, byte in _SINGLES if bits >> byte & 1)


def _within(room: int, fitting: dict[int, set[int]]) -> set[int]:
    return set().union(*(tokens for distance, tokens in fitting.items() if distance <= room))
