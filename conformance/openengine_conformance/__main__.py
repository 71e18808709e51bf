# SPDX-License-Identifier: Apache-2.0
"""The command `openengine-conformance`."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from openengine_conformance import SUITE_VERSION
from openengine_conformance.case import AREAS, Case, Profile, all_cases
from openengine_conformance.connection import Unreachable
from openengine_conformance.options import Access, Options
from openengine_conformance.report.html import to_html
from openengine_conformance.report.json_report import to_json
from openengine_conformance.report.junit import to_junit
from openengine_conformance.report.terminal import TerminalProgress, print_report
from openengine_conformance.requirements import REQUIREMENTS
from openengine_conformance.results import Report
from openengine_conformance.runner import run_cases, select

COULD_NOT_RUN = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns 0 when all passed, 1 for failures, 2 when nothing could be run."""
    options = _parser().parse_args(arguments)
    console = Console(highlight=False)
    try:
        cases = select(
            all_cases(),
            ids=options.case,
            areas=options.area,
            requirements=options.requirement,
            profiles=options.profile,
            exclude=options.exclude,
        )
        if options.command == "list":
            (_list_requirements if options.requirements else _list_cases)(cases, console)
            return 0
        return _run(options, cases, console)
    except (Unreachable, ValueError, OSError) as problem:
        print(f"openengine-conformance: {problem}", file=sys.stderr)
        return COULD_NOT_RUN
    except KeyboardInterrupt:
        print("openengine-conformance: interrupted", file=sys.stderr)
        return COULD_NOT_RUN


def _run(options: argparse.Namespace, cases: list[Case], console: Console) -> int:
    if not options.target:
        raise ValueError("say which server to test: --target HOST:PORT")
    if not cases:
        raise ValueError("the selection leaves no case to run")
    if bool(options.tls_cert) != bool(options.tls_key):
        raise ValueError("--tls-cert and --tls-key go together")
    for path in (options.tls_ca, options.tls_cert, options.tls_key):
        if path and not path.is_file():
            raise ValueError(f"no such file: {path}")
    known = read_known_failures(options.known_failures) if options.known_failures else {}
    if unknown := sorted(set(known) - {case.id for case in all_cases()}):
        raise ValueError(f"{options.known_failures} names cases that don't exist: {', '.join(unknown)}")
    settings = Options(
        target=options.target,
        access=Access(ca=options.tls_ca, cert=options.tls_cert, key=options.tls_key, token=options.token),
        model=options.model,
        lora=tuple(options.lora),
        peer=options.peer,
        aggregated=options.aggregated,
        image_prompt=options.image_prompt,
        timeout=options.timeout,
        repeat=options.repeat,
        jobs=options.jobs,
        stall_limit=options.stall_limit,
        include_drain=options.include_drain,
        known_failures=known,
    )
    with TerminalProgress(console, verbose=options.verbose) as progress:
        report = asyncio.run(run_cases(cases, settings, progress))
    _write(report, options)
    print_report(report, console)
    return report.exit_code


def _write(report: Report, options: argparse.Namespace) -> None:
    for path, form in ((options.json, to_json), (options.junit, to_junit), (options.html, to_html)):
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(form(report), encoding="utf-8")


def read_known_failures(path: Path) -> dict[str, str]:
    """Read a file with a case id on each line, and after "#" why it is known to fail."""
    known = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        name, _, reason = line.partition("#")
        if name.strip():
            known[name.strip()] = reason.strip()
    return known


def _list_cases(cases: Sequence[Case], console: Console) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("case", "profile", "proves", "requires"):
        table.add_column(name, no_wrap=name == "case")
    for case in cases:
        table.add_row(case.id, case.profile, ", ".join(case.rules), Text(case.requires))
    console.print(table)
    console.print(f"{len(cases)} cases")


def _list_requirements(cases: Sequence[Case], console: Console) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("id", "requirement", "section", "cases"):
        table.add_column(name, no_wrap=name == "id")
    covered = visible = 0
    for requirement in REQUIREMENTS.values():
        names = [case.id for case in cases if requirement.id in case.rules]
        visible += not requirement.unseen
        covered += bool(names) and not requirement.unseen
        shown = Text("\n".join(names) or "no case", style="" if names else "red")
        if requirement.unseen:
            shown = Text("\n".join([*names, f"unseen: {requirement.unseen}"]), style="dim")
        table.add_row(requirement.id, Text(requirement.summary), Text(requirement.section), shown)
    console.print(table)
    console.print(f"{covered} of {visible} visible requirements covered by {len(cases)} cases")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="openengine-conformance",
        description="Tell whether a server keeps the openengine.v1 contract.",
        epilog="Exit status: 0 all passed, 1 failures, 2 could not run.",
    )
    parser.add_argument(
        "command", nargs="?", choices=["run", "list"], default="run", help="run (default) or list"
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {SUITE_VERSION}")
    parser.add_argument("--requirements", action="store_true", help="with list: requirements and their cases")
    parser.add_argument("-v", "--verbose", action="store_true", help="show every case")

    server = parser.add_argument_group("server")
    server.add_argument("--target", default="", metavar="HOST:PORT", help="the server to test")
    server.add_argument(
        "--model", default="", help="model to name in requests (default: the first supported one)"
    )
    server.add_argument("--tls-ca", type=Path, metavar="FILE", help="CA certificate; switches TLS on")
    server.add_argument("--tls-cert", type=Path, metavar="FILE", help="client certificate")
    server.add_argument("--tls-key", type=Path, metavar="FILE", help="key of the client certificate")
    server.add_argument("--token", default="", help="bearer token sent with every call")

    choice = parser.add_argument_group("selection (repeatable; different kinds narrow each other)")
    choice.add_argument("--case", action="append", default=[], metavar="ID", help="case id or pattern")
    choice.add_argument(
        "--area", action="append", default=[], choices=list(AREAS), metavar="AREA", help="area"
    )
    choice.add_argument("--requirement", action="append", default=[], metavar="ID", help="requirement id")
    choice.add_argument(
        "--profile",
        action="append",
        default=[],
        choices=[str(p) for p in Profile],
        help="part of the contract",
    )
    choice.add_argument(
        "--exclude", action="append", default=[], metavar="ID", help="case id or pattern to leave out"
    )

    more = parser.add_argument_group("what cases may use")
    more.add_argument(
        "--lora", action="append", default=[], type=Path, metavar="PATH", help="LoRA adapter directory"
    )
    more.add_argument("--peer", default="", metavar="HOST:PORT", help="decode server for a prefill target")
    more.add_argument("--aggregated", default="", metavar="HOST:PORT", help="plain server of the same model")
    more.add_argument("--image-prompt", default="<image>", help="prompt with the model's image placeholder")
    more.add_argument(
        "--stall-limit",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="when the server drops a stalled reader",
    )
    more.add_argument("--include-drain", action="store_true", help="also drain for good, at the end")

    how = parser.add_argument_group("how to run")
    how.add_argument(
        "--timeout", type=_positive, default=30.0, metavar="SECONDS", help="for one case (default 30)"
    )
    how.add_argument("--repeat", type=_count, default=1, metavar="N", help="run each case N times")
    how.add_argument(
        "--jobs", type=_count, default=1, metavar="N", help="run cases in parallel where they allow it"
    )
    how.add_argument("--known-failures", type=Path, metavar="FILE", help="case ids that may fail, one a line")

    output = parser.add_argument_group("reports")
    output.add_argument("--json", type=Path, metavar="FILE")
    output.add_argument("--junit", type=Path, metavar="FILE")
    output.add_argument("--html", type=Path, metavar="FILE")
    return parser


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError("must be above 0")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


if __name__ == "__main__":
    sys.exit(main())
