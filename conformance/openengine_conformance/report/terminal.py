# SPDX-License-Identifier: Apache-2.0
"""The report for a person at a terminal: progress while the cases run, then what was found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from openengine_conformance.case import AREAS, Case
from openengine_conformance.exchange import Exchange, render_short
from openengine_conformance.offer import Offer
from openengine_conformance.requirements import CONTRACT
from openengine_conformance.results import Report, Result, Standing, Verdict

STYLES = {
    Verdict.PASSED: "green",
    Verdict.FAILED: "bold red",
    Verdict.SKIPPED: "dim",
    Verdict.KNOWN_FAILURE: "yellow",
    Verdict.UNEXPECTED_PASS: "bold magenta",
    Verdict.NOT_RUN: "dim",
}
SHOWN_EXCHANGES = 2
SHOWN_REPLIES = 4


class TerminalProgress:
    """A progress bar; failures are printed as they happen, every case with `verbose`."""

    def __init__(self, console: Console, *, verbose: bool = False) -> None:
        self._console = console
        self._verbose = verbose
        self._bar = Progress(
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> TerminalProgress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def began(self, offer: Offer, cases: Sequence[Case]) -> None:
        """Show whom the cases run against."""
        engine = offer.engine
        self._console.print(
            f"[bold]{escape(engine.engine_name or 'unnamed engine')}[/] {escape(engine.engine_version)}"
            f" · {offer.role_name} · model {escape(offer.model or '?')} · {len(cases)} cases",
            highlight=False,
        )
        self._task = self._bar.add_task("", total=len(cases))

    def starting(self, case: Case) -> None:
        """Show what runs now."""
        if self._task is not None:
            self._bar.update(self._task, description=case.id)

    def finished(self, result: Result) -> None:
        """Count a case."""
        if self._task is not None:
            self._bar.advance(self._task)
        failed = result.verdict in (Verdict.FAILED, Verdict.UNEXPECTED_PASS)
        if failed or self._verbose:
            line = Text.assemble(
                (f"{result.verdict.upper():<8}", STYLES[result.verdict]),
                f" {result.case.id}",
                (f"  {result.seconds:.1f} s" if result.seconds >= 0.1 else "", "dim"),
                (f"  {result.reason}" if result.reason else "", "dim"),
            )
            self._console.print(line, soft_wrap=not self._console.is_terminal)


def print_report(report: Report, console: Console) -> None:
    """Print the whole report; its last line holds the totals."""
    for result in report.failures():
        _print_failure(result, console)
    _print_skips(report, console)
    _print_areas(report, console)
    _print_requirements(report, console)
    if report.death:
        console.print(
            f"\n[bold red]{escape(report.death)}[/]; the cases after it did not run", highlight=False
        )
    console.print(
        f"\n{report.closing_line}", highlight=False, style="bold red" if report.exit_code else "bold green"
    )


def _print_failure(result: Result, console: Console) -> None:
    console.rule(f"[{STYLES[result.verdict]}]{result.verdict}[/] {result.case.id}", align="left", style="dim")
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row("requires", Text(result.case.requires))
    grid.add_row("came back", Text(result.reason, style="bold"))
    if requirement := result.requirement:
        grid.add_row("rule", Text(f"{requirement.id}: {requirement.summary}"))
        grid.add_row("contract", Text(f"{CONTRACT}, “{requirement.section}”"))
    if result.runs > 1:
        grid.add_row("runs", Text(f"failed {result.failed_runs} of {result.runs}"))
    for note in result.notes:
        grid.add_row("note", Text(note))
    console.print(Padding(grid, (0, 0, 1, 2)))
    hidden = len(result.exchanges) - SHOWN_EXCHANGES
    if hidden > 0:
        console.print(f"  [dim]{hidden} earlier calls left out; --json and --html hold all of them[/]")
    for exchange in result.exchanges[-SHOWN_EXCHANGES:]:
        _print_exchange(exchange, console)


def _print_exchange(exchange: Exchange, console: Console) -> None:
    console.print(Text(f"  {exchange.summary()}", style="cyan"))
    console.print(Padding(Text(f"sent {render_short(exchange.request)}"), (0, 0, 0, 4)))
    if exchange.count > SHOWN_REPLIES:
        console.print(f"    [dim]{exchange.count - SHOWN_REPLIES} earlier messages left out[/]")
    for reply in exchange.replies[-SHOWN_REPLIES:]:
        text = f"{reply.number + 1:>4}. {reply.at:7.3f} s  {render_short(reply.message)}"
        console.print(Padding(Text(text, style="dim"), (0, 0, 0, 4)))


def _print_skips(report: Report, console: Console) -> None:
    reasons = Counter(r.reason for r in report.results if r.verdict is Verdict.SKIPPED)
    known = [r for r in report.results if r.verdict is Verdict.KNOWN_FAILURE]
    if reasons:
        console.print("[dim]skipped because[/]")
    for reason, count in reasons.most_common():
        console.print(Text(f"  {count:>3}  {reason}", style="dim"))
    for result in known:
        console.print(Text(f"known failure {result.case.id}: {result.reason}", style="yellow"))


def _print_areas(report: Report, console: Console) -> None:
    table = Table(box=None, padding=(0, 2), header_style="dim")
    table.add_column("area")
    for name in ("passed", "failed", "skipped", "seconds"):
        table.add_column(name, justify="right")
    for area in AREAS:
        results = [r for r in report.results if r.case.area == area]
        if not results:
            continue
        failed = sum(r.verdict in (Verdict.FAILED, Verdict.UNEXPECTED_PASS) for r in results)
        passed = sum(r.verdict is Verdict.PASSED for r in results)
        style = "red" if failed else "green" if passed else "dim"
        counts = [str(n or "·") for n in (passed, failed, len(results) - passed - failed)]
        table.add_row(Text(area, style=style), *counts, f"{sum(r.seconds for r in results):.1f}")
    console.print(table)


def _print_requirements(report: Report, console: Console) -> None:
    standings = report.standings()
    counts = Counter(standings.values())
    line = f"requirements: {counts[Standing.HOLDS]} hold, {counts[Standing.BROKEN]} broken, "
    line += f"{counts[Standing.UNTESTED]} untested here, {counts[Standing.UNSEEN]} out of a client's sight"
    console.print(f"\n{line}", highlight=False)
    broken = [rule for rule, standing in standings.items() if standing is Standing.BROKEN]
    if broken:
        console.print(Text(f"broken: {', '.join(broken)}", style="red"))
