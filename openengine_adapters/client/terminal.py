"""What the command prints: text for people, or one JSON object a line.

Text that a server sent is escaped before it is printed, so that no control character reaches the terminal.
Who needs it exactly as it came asks for JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, TextIO

from openengine_adapters.client.layout import Line, escape, one_line

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text


class Terminal:
    """Standard output and standard error of one command."""

    def __init__(self, *, json: bool = False) -> None:
        self.json = json
        self._out = sys.stdout
        self._err = sys.stderr
        self._line_open = False

    @property
    def interactive(self) -> bool:
        """Whether a person watches standard output, so that a live view makes sense."""
        return not self.json and self._console.is_terminal and not self._console.is_dumb_terminal

    def record(self, value: Mapping[str, Any]) -> None:
        """Print one JSON object on a line of its own, at once."""
        self._out.write(json.dumps(value, ensure_ascii=False, separators=(",", ":")) + "\n")
        self._out.flush()

    def stream(self, text: str) -> None:
        """Print generated text as it comes, without a line's end."""
        if text:
            self._out.write(escape(text))
            self._out.flush()
            self._line_open = not text.endswith("\n")

    def end_line(self) -> None:
        """End the line of streamed text, if one is open."""
        if self._line_open:
            self._out.write("\n")
            self._out.flush()
            self._line_open = False

    def line(self, text: str = "", style: str = "") -> None:
        """Print a whole line."""
        self.lines([Line(text, style)])

    def lines(self, lines: Iterable[Line]) -> None:
        """Print whole lines, below streamed text."""
        self.end_line()
        for line in lines:
            self._console.print(_rich(line), soft_wrap=True)
        self._out.flush()

    @contextlib.contextmanager
    def live(self, view: Callable[[], list[Line]], interval: float = 0.5) -> Iterator[None]:
        """Keep a view on the screen that is drawn anew every `interval` seconds."""
        from rich.console import Group
        from rich.live import Live

        loop = asyncio.get_running_loop()

        timer: asyncio.Handle

        def draw() -> None:
            nonlocal timer
            screen.update(Group(*map(_rich, view())), refresh=True)
            timer = loop.call_later(interval, draw)

        with Live(console=self._console, auto_refresh=False) as screen:
            timer = loop.call_soon(draw)
            try:
                yield
            finally:
                timer.cancel()
                screen.update(Group(*map(_rich, view())), refresh=True)

    @contextlib.contextmanager
    def progress(self, total: int) -> Iterator[Callable[[int], None]]:
        """Show on a terminal how much of a long job is done; call what is yielded with each part's size."""
        if self.json or not self._error_console.is_terminal:
            yield lambda done: None
            return
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

        columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=self._error_console, transient=True) as bar:
            task = bar.add_task("", total=total)
            yield lambda done: bar.advance(task, done)

    def note(self, text: str) -> None:
        """Print a remark on standard error, where it does not mix with results."""
        self.end_line()
        self._error_console.print(_rich(Line(one_line(text), "dim")), soft_wrap=True)

    def error(self, text: str, *, code: str, hint: str = "") -> None:
        """Print why the command failed, on one line of standard error."""
        if self.json:
            failure = {"code": code, "message": text} | ({"hint": hint} if hint else {})
            self._err.write(json.dumps({"error": failure}, ensure_ascii=False) + "\n")
            return
        self.end_line()
        line = f"openengine: {one_line(text)}" + (f" ({hint})" if hint else "")
        self._error_console.print(_rich(Line(line, "red")), soft_wrap=True)

    @cached_property
    def _console(self) -> Console:
        return _console(self._out)

    @cached_property
    def _error_console(self) -> Console:
        return _console(self._err)


def _console(stream: TextIO) -> Console:
    from rich.console import Console  # here, so that JSON output does without

    return Console(file=stream, highlight=False, markup=False, emoji=False)


def _rich(line: Line) -> Text:
    from rich.text import Text

    return Text(escape(line.text), line.style)
