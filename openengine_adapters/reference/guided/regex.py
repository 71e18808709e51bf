"""Regular expressions as grammars. A guide matches the whole output, as if between ^ and $."""

from __future__ import annotations

import string
from collections.abc import Callable

from openengine_adapters.reference.guided.grammar import (
    ANY,
    CodeRanges,
    GuideError,
    Symbols,
    characters,
    complement,
    either,
    repeat,
)

DIGIT: CodeRanges = ((0x30, 0x39),)
WORD: CodeRanges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
SPACE: CodeRanges = ((0x09, 0x0D), (0x20, 0x20))
_NEWLINE: CodeRanges = ((0x0A, 0x0A),)

_CLASSES: dict[str, CodeRanges] = {
    "d": DIGIT,
    "D": complement(DIGIT),
    "w": WORD,
    "W": complement(WORD),
    "s": SPACE,
    "S": complement(SPACE),
}
_CONTROLS = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "0": "\0"}


def compile_regex(pattern: str, encode: Callable[[CodeRanges], Symbols] = characters) -> Symbols:
    """Return the grammar of `pattern`; `encode` writes one character out of a set. Raises `GuideError`."""
    body = pattern.removeprefix("^")
    if body.endswith("$") and (len(body) - len(body[:-1].rstrip("\\"))) % 2:
        body = body[:-1]
    parser = RegexParser(body, encode)
    symbols = parser.alternatives()
    if parser.position < len(body):
        raise GuideError(f"has an unmatched ')' at position {parser.position}")
    return symbols


class RegexParser:
    """A recursive-descent parser; `position` is where it stands in `source`."""

    def __init__(self, source: str, encode: Callable[[CodeRanges], Symbols]) -> None:
        self.source = source
        self.position = 0
        self._encode = encode

    def alternatives(self) -> Symbols:
        """Parse up to the end or to an unmatched bracket."""
        choices = [self._sequence()]
        while self._skip("|"):
            choices.append(self._sequence())
        return either(choices)

    def _peek(self) -> str:
        return self.source[self.position : self.position + 1]

    def _next(self) -> str:
        character = self._peek()
        if not character:
            raise GuideError("ends too early")
        self.position += 1
        return character

    def _skip(self, wanted: str) -> bool:
        if self.source.startswith(wanted, self.position):
            self.position += len(wanted)
            return True
        return False

    def _sequence(self) -> Symbols:
        symbols: Symbols = ()
        while self._peek() and self._peek() not in "|)":
            symbols += self._quantified(self._atom())
        return symbols

    def _quantified(self, atom: Symbols) -> Symbols:
        bounds = self._bounds()
        if bounds is None:
            return atom
        # Lazy and greedy match the same strings; a possessive one need not.
        self._skip("?")
        if self._peek() and self._peek() in "*+?":
            raise GuideError(f"repeats a repetition at position {self.position}")
        return repeat(atom, *bounds)

    def _bounds(self) -> tuple[int, int | None] | None:
        for sign, bounds in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._skip(sign):
                return bounds
        if self._peek() != "{":
            return None
        inside, closed, _ = self.source[self.position + 1 :].partition("}")
        low, comma, high = inside.partition(",")
        if not closed or not (low or high) or not all(part.isdecimal() for part in (low, high) if part):
            raise GuideError(f"has a malformed {{}} at position {self.position}")
        self.position += len(inside) + 2
        least = int(low or 0)
        most = (int(high) if high else None) if comma else least
        if most is not None and most < least:
            raise GuideError(f"asks for {least} to {most} repetitions")
        return least, most

    def _atom(self) -> Symbols:
        at = self.position
        character = self._next()
        if character == "(":
            return self._group()
        if character == "[":
            return self._encode(self._set())
        if character == ".":
            return self._encode(complement(_NEWLINE))
        if character == "\\":
            return self._encode(self._escape())
        if character in "*+?{":
            raise GuideError(f"has nothing to repeat at position {at}")
        if character in "^$":
            raise GuideError(f"has an anchor in the middle, at position {at}")
        return self._encode(_one(character))

    def _group(self) -> Symbols:
        if self._skip("?") and not self._skip(":"):
            if not self._skip("P<") and not self._begins_name():
                raise GuideError(f"uses (?{self._peek()} at position {self.position}, which is not supported")
            name, closed, _ = self.source[self.position :].partition(">")
            if not closed:
                raise GuideError("has a group name without end")
            self.position += len(name) + 1
        inside = self.alternatives()
        if not self._skip(")"):
            raise GuideError("has an unmatched '('")
        return inside

    def _begins_name(self) -> bool:
        return self._peek() == "<" and self.source[self.position + 1 : self.position + 2] not in (
            "=",
            "!",
            "",
        )

    def _escape(self) -> CodeRanges:
        character = self._next()
        if character in _CLASSES:
            return _CLASSES[character]
        if character in _CONTROLS:
            return _one(_CONTROLS[character])
        if character in "xu":
            size = 2 if character == "x" else 4
            digits = self.source[self.position : self.position + size]
            if len(digits) < size or not set(digits) <= set(string.hexdigits):
                raise GuideError(f"has a malformed \\{character} at position {self.position}")
            code = int(digits, 16)
            self.position += len(digits)
            return ((code, code),)
        if character.isalnum():
            raise GuideError(f"uses \\{character}, which is not supported")
        return _one(character)

    def _set(self) -> CodeRanges:
        negated = self._skip("^")
        ranges: list[tuple[int, int]] = []
        first = True
        while first or self._peek() != "]":
            first = False
            low = self._member()
            if self._peek() == "-" and self.source[self.position + 1 : self.position + 2] not in ("]", ""):
                self.position += 1
                high = self._member()
                if len(low) != 1 or len(high) != 1 or low[0][0] != low[0][1] or low[0][0] > high[0][1]:
                    raise GuideError(f"has a malformed range before position {self.position}")
                ranges.append((low[0][0], high[0][1]))
            else:
                ranges.extend(low)
        self._next()
        return complement(ranges) if negated else ranges

    def _member(self) -> CodeRanges:
        character = self._next()
        return self._escape() if character == "\\" else _one(character)


def _one(character: str) -> CodeRanges:
    return ((ord(character), ord(character)),)


__all__ = ["ANY", "RegexParser", "compile_regex"]
