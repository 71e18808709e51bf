"""How results look as text: pairs, tables, and the escaping of what a server sent."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

# Control characters but newline and tab, and those that turn the direction of what follows.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
_NAMES = {"\r": r"\r", "\x1b": r"\e", "\x07": r"\a", "\x08": r"\b"}

Cell: TypeAlias = str | int | float | bool | None


class Line(NamedTuple):
    """One line and its rich style."""

    text: str
    style: str = ""


def escape(text: str) -> str:
    """Return the text with unsafe characters spelt out; newlines and tabs stay."""
    return _UNSAFE.sub(_spell, text)


def one_line(text: str) -> str:
    """Return the text escaped and on one line."""
    return escape(text).replace("\n", r"\n").replace("\t", r"\t")


def cell(value: Cell) -> str:
    """Return one value as it stands in a table; None is one that the server does not report."""
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:.4g}"
        case _:
            return one_line(str(value))


def facts(values: Mapping[str, Cell], title: str = "") -> list[Line]:
    """Return names and values in two columns."""
    width = max(map(len, values), default=0)
    indent = "  " if title else ""
    lines = [Line(one_line(title), "bold")] if title else []
    for name, value in values.items():
        text = f"{indent}{one_line(name):<{width}}  {cell(value)}"
        lines.append(Line(text, "dim" if value is None else ""))
    return lines


def table(header: Sequence[str], rows: Sequence[Sequence[Cell]]) -> list[Line]:
    """Return rows under a header; columns of numbers are flush right."""
    cells = [[cell(value) for value in row] for row in rows]
    right = [all(not isinstance(row[i], str) for row in rows) for i in range(len(header))]
    widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]

    def joined(row: Sequence[str]) -> str:
        columns = zip(row, widths, right, strict=True)
        return "  ".join(
            f"{text:>{width}}" if r else f"{text:<{width}}" for text, width, r in columns
        ).rstrip()

    return [Line(joined(header), "bold"), *(Line(joined(row)) for row in cells)]


def _spell(match: re.Match[str]) -> str:
    char = match.group()
    return _NAMES.get(char) or (f"\\x{ord(char):02x}" if ord(char) < 256 else f"\\u{ord(char):04x}")
