"""EBNF grammars: ``name ::= "text" [a-z] (a | b) c* d+ e? f{2,3}``, one rule for each name, `root` first in rank."""

from __future__ import annotations

import ast
import re

from openengine_adapters.reference.guided.grammar import (
    GuideError,
    Rule,
    Symbols,
    characters,
    either,
    repeat,
    text,
)
from openengine_adapters.reference.guided.regex import compile_regex

_TOKEN = re.compile(
    r"""\s+|\#[^\n]*|(?P<name>[A-Za-z_][A-Za-z0-9_-]*)|(?P<string>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')"""
    r"""|(?P<set>\[(?:[^\]\\]|\\.)+\])|(?P<count>\{\s*\d+\s*(?:,\s*\d*\s*)?\})|(?P<sign>::=|[()|*+?.;])"""
)


def compile_ebnf(source: str) -> Symbols:
    """Return the grammar of the rule `root`. Raises `GuideError`."""
    return _Parser(source).parse()


class _Parser:
    def __init__(self, source: str) -> None:
        self._tokens = _tokens(source)
        self._position = 0
        self._rules: dict[str, Rule] = {}
        self._defined: set[str] = set()

    def parse(self) -> Symbols:
        while self._position < len(self._tokens):
            kind, name = self._tokens[self._position]
            if kind != "name" or self._ahead(1) != ("sign", "::="):
                raise GuideError(f"expected a rule like 'name ::= …' and found {name!r}")
            self._position += 2
            if name in self._defined:
                raise GuideError(f"defines {name!r} twice")
            self._defined.add(name)
            self._rule(name).choices = [self._alternatives()]
            if self._ahead(0) == ("sign", ";"):
                self._position += 1
        if "root" not in self._defined:
            raise GuideError("has no rule named root")
        missing = sorted(self._rules.keys() - self._defined)
        if missing:
            raise GuideError(f"uses {missing[0]!r} without defining it")
        return (self._rules["root"],)

    def _rule(self, name: str) -> Rule:
        return self._rules.setdefault(name, Rule())

    def _ahead(self, steps: int) -> tuple[str, str]:
        position = self._position + steps
        return self._tokens[position] if position < len(self._tokens) else ("end", "the end")

    def _alternatives(self) -> Symbols:
        choices = [self._sequence()]
        while self._ahead(0) == ("sign", "|"):
            self._position += 1
            choices.append(self._sequence())
        return either(choices)

    def _sequence(self) -> Symbols:
        symbols: Symbols = ()
        while True:
            kind, value = self._ahead(0)
            begins_rule = kind == "name" and self._ahead(1) == ("sign", "::=")
            if kind == "end" or begins_rule or (kind == "sign" and value in "|);"):
                return symbols
            self._position += 1
            symbols += self._quantified(self._atom(kind, value))

    def _atom(self, kind: str, value: str) -> Symbols:
        if kind == "name":
            return (self._rule(value),)
        if kind == "string":
            return text(_unquoted(value))
        if kind == "set":
            return compile_regex(value)
        if value == ".":
            return characters([(0, 0x10FFFF)])
        if value != "(":
            raise GuideError(f"has a misplaced {value!r}")
        inside = self._alternatives()
        if self._ahead(0) != ("sign", ")"):
            raise GuideError("has an unmatched '('")
        self._position += 1
        return inside

    def _quantified(self, atom: Symbols) -> Symbols:
        kind, value = self._ahead(0)
        bounds = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(value) if kind == "sign" else None
        if kind == "count":
            low, comma, high = value.strip("{}").replace(" ", "").partition(",")
            bounds = (int(low), (int(high) if high else None) if comma else int(low))
            if bounds[1] is not None and bounds[1] < bounds[0]:
                raise GuideError(f"asks for {value} repetitions")
        if bounds is None:
            return atom
        self._position += 1
        return repeat(atom, *bounds)


def _tokens(source: str) -> list[tuple[str, str]]:
    found, position = [], 0
    while position < len(source):
        match = _TOKEN.match(source, position)
        if match is None:
            raise GuideError(f"cannot be read at position {position}: {source[position : position + 12]!r}")
        if match.lastgroup is not None:
            found.append((match.lastgroup, match[0]))
        position = match.end()
    return found


def _unquoted(quoted: str) -> str:
    try:
        return str(ast.literal_eval(quoted))
    except (SyntaxError, ValueError):
        raise GuideError(f"has a malformed string {quoted}") from None
