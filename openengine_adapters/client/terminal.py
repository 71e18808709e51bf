"""What the command prints: text for people, or one JSON object a line.

Text that a server sent is escaped before it is printed, so that no control character reaches the terminal.
Who needs it exactly as it came asks for JSON.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console

# Control characters but newline and tab, and those that turn the direction of what follows.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
_NAMES = {"\r": r"\r", "\x1b": r"\e", "\x07": r"\a", "\x08": r"\b"}

Cell = str | int | float | bool | None


def escape(text: str) -> str:
    """Return the text with unsafe characters spelt out; newlines and tabs stay."""
    return _UNSAFE.sub(_spell, text)


def one_line(text: str) -> str:
    """Return the text escaped and on one line."""
    return escape(text).replace("\n", r"\n").replace("\t", r"\t")


def _spell(match: re.Match[str]) -> str:
    char = match.group()
    return _NAMES.get(char) or (f"\\x{ord(char):02x}" if ord(char) < 256 else f"\\u{ord(char):04x}")


class Terminal:
    """Standard output and standard error of one command."""

    def __init__(self, *, json: bool = False, out: TextIO | None = None, err: TextIO | None = None) -> None:
        self.json = json
        self._out = out or sys.stdout
        self._err = err or sys.stderr
        self._at_line_start = True

    @property
    def interactive(self) -> bool:
        """Whether a person watches standard output, so that a live view makes sense."""
        return not self.json and self.console.is_terminal and not self.console.is_dumb_terminal

    @cached_property
    def console(self) -> Console:
        """Standard output with colours, where the terminal has them and NO_COLOR does not forbid it."""
        return _console(self._out)

    @cached_property
    def _error_console(self) -> Console:
        return _console(self._err)

    def record(self, value: Mapping[str, Any]) -> None:
        """Print one JSON object on a line of its own, at once."""
        self._out.write(json.dumps(value, ensure_ascii=False, separators=(",", ":")) + "\n")
        self._out.flush()

    def stream(self, text: str) -> None:
        """Print generated text as it comes, without a line's end."""
        if text:
            self._out.write(escape(text))
            self._out.flush()
            self._at_line_start = text.endswith("\n")

    def line(self, text: str = "", style: str = "") -> None:
        """Print a whole line, on a new one when streamed text has not ended its own."""
        if not self._at_line_start:
            self._out.write("\n")
            self._at_line_start = True
        self._print(self.console, text, style)
        self._out.flush()

    def end_line(self) -> None:
        """End the line of streamed text, if one is open."""
        if not self._at_line_start:
            self._out.write("\n")
            self._out.flush()
            self._at_line_start = True

    def facts(self, facts: Mapping[str, Cell], title: str = "") -> None:
        """Print names and values in two columns. None is a value that the server does not report."""
        if title:
            self.line(title, "bold")
        width = max(map(len, facts), default=0)
        for name, value in facts.items():
            self.line(
                f"{'  ' if title else ''}{name:<{width}}  {cell(value)}", "dim" if value is None else ""
            )

    def table(self, header: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        """Print rows under a header; columns of numbers are flush right."""
        cells = [[cell(value) for value in row] for row in rows]
        numeric = [
            all(isinstance(row[i], (int, float, type(None))) for row in rows) for i in range(len(header))
        ]
        widths = [max(len(column) for column in columns) for columns in zip(header, *cells, strict=True)]

        def joined(row: Sequence[str]) -> str:
            padded = (f"{c:>{w}}" if n else f"{c:<{w}}" for c, w, n in zip(row, widths, numeric, strict=True))
            return "  ".join(padded).rstrip()

        self.line(joined(header), "bold")
        for row in cells:
            self.line(joined(row))

    def note(self, text: str) -> None:
        """Print a remark on standard error, where it does not mix with results."""
        self.end_line()
        self._print(self._error_console, one_line(text), "dim")
        self._err.flush()

    def error(self, text: str, *, code: str, hint: str = "") -> None:
        """Print why the command failed, on one line of standard error."""
        if self.json:
            failure = {"code": code, "message": text} | ({"hint": hint} if hint else {})
            self._err.write(json.dumps({"error": failure}, ensure_ascii=False) + "\n")
        else:
            self.end_line()
            self._print(
                self._error_console, f"openengine: {one_line(text)}{f' ({hint})' if hint else ''}", "red"
            )
        self._err.flush()

    def _print(self, console: Console, text: str, style: str) -> None:
        from rich.text import Text  # here, so that JSON output does without

        console.print(Text(escape(text), style), soft_wrap=True)


def cell(value: Cell) -> str:
    """Return one value as it stands in a table."""
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:.4g}"
        case _:
            return one_line(str(value))


def _console(stream: TextIO) -> Console:
    from rich.console import Console  # takes as long to load as everything else together

    return Console(file=stream, highlight=False, markup=False, emoji=False)
