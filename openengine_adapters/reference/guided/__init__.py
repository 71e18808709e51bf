"""Guided decoding: which tokens may come next so that the output keeps its form.

All six kinds of guide become one kind of grammar. While enough tokens are left, only tokens are let through from which
the output can still be completed in time.
"""

from __future__ import annotations

from openengine.v1 import generate_pb2
from openengine_adapters.core.errors import invalid
from openengine_adapters.reference import tokenizer
from openengine_adapters.reference.guided import ebnf, grammar, json_schema, regex, structural
from openengine_adapters.reference.guided.grammar import GuideError, Machine, State, Symbols

BACKEND = "reference"
"""The name under which `guided.backend` may ask for this."""

_REMEMBERED = 256  # states whose tokens are kept; inside a string they repeat

_WITH_TEXT = [token for token in range(tokenizer.VOCAB_SIZE) if tokenizer.token_bytes(token)]


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
        self._known: dict[State, list[tuple[int, int]]] = {}

    def fork(self) -> Guide:
        """The same guide for another output."""
        return Guide(self._machine)

    @property
    def complete(self) -> bool:
        """Whether nothing but the end can follow."""
        return not self._machine.fitting(self._state)

    def allowed(self, left: int) -> set[int]:
        """The tokens that may come next when `left` tokens are left, this one included."""
        fitting = self._fitting()
        # Bytes are the most tokens that a completion can need; one more is for EOS.
        for room in (left - 2, left - 1, grammar.UNREACHABLE - 1):
            allowed = {token for token, distance in fitting if distance <= room}
            if allowed:
                break
        else:
            allowed = set()
        if None in self._state:
            allowed.add(tokenizer.EOS)
        return allowed

    def push(self, token: int) -> None:
        """Go on with a token that was allowed; EOS changes nothing."""
        for byte in tokenizer.token_bytes(token):
            self._state = self._machine.advance(self._state, byte)

    def _fitting(self) -> list[tuple[int, int]]:
        """Each token that fits, with the bytes that the output then still needs."""
        known = self._known.get(self._state)
        if known is None:
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            known = self._known[self._state] = self._compute_fitting()
        return known

    def _compute_fitting(self) -> list[tuple[int, int]]:
        bits = self._machine.fitting(self._state)
        found = []
        for token in _WITH_TEXT:
            first, *rest = tokenizer.token_bytes(token)
            if not bits >> first & 1:
                continue
            state = self._machine.advance(self._state, first)
            for byte in rest:
                state = self._machine.advance(state, byte)
            if state:
                found.append((token, self._machine.distance(state)))
        return found
