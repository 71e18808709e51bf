# SPDX-License-Identifier: Apache-2.0
"""The report as one self-contained page: what holds at a glance, and the evidence of every failure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from html import escape
from importlib import resources
from itertools import groupby

from openengine_conformance.case import AREAS
from openengine_conformance.exchange import Exchange, render, render_short
from openengine_conformance.requirements import CONTRACT, REQUIREMENTS
from openengine_conformance.results import FAILING, Report, Result, Standing, Verdict

LONGEST_MESSAGE = 1500
_MEANING = {
    Standing.HOLDS: "a case passed and none proved it broken",
    Standing.BROKEN: "a case proved it broken",
    Standing.UNTESTED: "no case could tell on this server",
    Standing.UNSEEN: "a client can't see it",
}


def to_html(report: Report) -> str:
    """Return the page."""
    style = resources.files(__package__).joinpath("style.css").read_text(encoding="utf-8")
    title = f"Conformance of {report.offer.engine.engine_name or report.target}"
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title><style>{style}</style></head><body><main>",
            *_banner(report, title),
            *_requirements(report),
            *_failures(report),
            *_areas(report),
            "</main></body></html>\n",
        ]
    )


def _banner(report: Report, title: str) -> Iterator[str]:
    engine = report.offer.engine
    bad = report.exit_code != 0
    total = len(report.results)
    verdict = f"{report.failed} of {total} cases failed" if bad else f"No failure in {total} cases"
    yield f'<section class="card banner{" bad" if bad else ""}"><h1>{escape(title)}</h1>'
    yield f'<div class="{"bad-text" if bad else "good"}"><b>{verdict}</b></div>'
    if report.death:
        yield f'<div class="bad-text">{escape(report.death)}; the cases after it did not run.</div>'
    yield '<div class="bar">'
    for name, count in (("passed", report.passed), ("failed", report.failed), ("other", report.skipped)):
        if count:
            yield f'<i class="{name}" style="flex:{count}" title="{count} {name}"></i>'
    yield "</div>"
    yield f'<div class="totals"><span class="good"><b>{report.passed}</b>passed</span>'
    yield f'<span class="{"bad-text" if report.failed else "soft"}"><b>{report.failed}</b>failed</span>'
    yield f'<span class="soft"><b>{report.skipped}</b>skipped</span></div><dl class="facts">'
    facts = {
        "Server": report.target,
        "Engine": f"{engine.engine_name} {engine.engine_version}, role {report.offer.role_name}",
        "Model": report.offer.model,
        "Schema": f"revision {engine.schema_revision} of {engine.schema_release}",
        "Suite": report.suite_version,
        "Run": f"{report.began:%Y-%m-%d %H:%M} UTC, {report.seconds:.1f} s",
    }
    for name, value in facts.items():
        yield f"<div><dt>{name}</dt><dd>{escape(value)}</dd></div>"
    yield "</dl></section>"


def _requirements(report: Report) -> Iterator[str]:
    standings = report.standings()
    yield '<h2>Requirements</h2><div class="sections">'
    for section, group in groupby(REQUIREMENTS.values(), lambda requirement: requirement.section):
        rules = list(group)
        held = sum(standings[rule.id] is Standing.HOLDS for rule in rules)
        yield f'<div class="card"><h3>{escape(section)}<span>{held} of {len(rules)}</span></h3><div class="chips">'
        for rule in rules:
            standing = standings[rule.id]
            hint = f"{rule.id}: {rule.summary} ({rule.unseen or _MEANING[standing]})"
            tag, link = ("a", f' href="#broken-{rule.id}"') if standing is Standing.BROKEN else ("span", "")
            yield f'<{tag}{link} class="chip {standing}" title="{escape(hint)}">{rule.id}</{tag}>'
        yield "</div></div>"
    counts = Counter(standings.values())
    yield '</div><div class="legend">'
    for standing, meaning in _MEANING.items():
        yield f'<span><span class="chip {standing}">{counts[standing]}</span> {standing}: {meaning}</span>'
    yield "</div>"


def _failures(report: Report) -> Iterator[str]:
    failures = [r for r in report.results if r.verdict in FAILING or r.verdict is Verdict.KNOWN_FAILURE]
    if not failures:
        return
    yield "<h2>Failures</h2>"
    anchored: set[str] = set()
    for result in failures:
        anchor = ""
        if result.rule and result.rule not in anchored:
            anchored.add(result.rule)
            anchor = f'<a id="broken-{result.rule}"></a>'
        yield f'<section class="card failure" id="{result.case.id}">{anchor}'
        yield f'<h3><span class="id">{result.case.id}</span> {_tag(result)}</h3><dl class="said">'
        yield f"<dt>requires</dt><dd>{escape(result.case.requires)}</dd>"
        yield f'<dt>came back</dt><dd class="problem">{escape(result.reason)}</dd>'
        if requirement := result.requirement:
            yield f'<dt>rule</dt><dd><span class="id">{requirement.id}</span> {escape(requirement.summary)}</dd>'
            yield f"<dt>contract</dt><dd>{CONTRACT}, “{escape(requirement.section)}”</dd>"
        if result.runs > 1:
            yield f"<dt>runs</dt><dd>failed {result.failed_runs} of {result.runs}</dd>"
        for note in result.notes:
            yield f"<dt>note</dt><dd>{escape(note)}</dd>"
        yield "</dl>"
        for exchange in result.exchanges:
            yield from _exchange(exchange)
        yield "</section>"


def _exchange(exchange: Exchange) -> Iterator[str]:
    yield f'<details class="exchange"><summary class="id">{escape(exchange.summary())}</summary>'
    yield f'<div class="messages"><div class="soft">sent</div><pre>{escape(render(exchange.request))}</pre>'
    if exchange.headers_at is not None:
        yield f'<div class="soft">initial metadata after {exchange.headers_at:.3f} s</div>'
    yield '<table class="replies">'
    before = 0
    for reply in exchange.replies:
        if reply.number > before:
            yield f'<tr><td></td><td></td><td class="soft">{reply.number - before} messages left out</td></tr>'
        before = reply.number + 1
        text = escape(render_short(reply.message, LONGEST_MESSAGE))
        yield f"<tr><td>{reply.number + 1}</td><td>{reply.at:.3f} s</td><td><code>{text}</code></td></tr>"
    yield "</table>"
    yield "</div></details>"


def _areas(report: Report) -> Iterator[str]:
    yield "<h2>All cases</h2>"
    for area in AREAS:
        results = [result for result in report.results if result.case.area == area]
        if not results:
            continue
        failed = sum(result.verdict in FAILING for result in results)
        passed = sum(result.verdict is Verdict.PASSED for result in results)
        counts = [f"{passed} passed", *([f"{failed} failed"] if failed else [])]
        if rest := len(results) - passed - failed:
            counts.append(f"{rest} skipped")
        yield f'<details class="card area"{" open" if failed else ""}><summary>{area}'
        yield f"<span>{', '.join(counts)}, {sum(r.seconds for r in results):.1f} s</span></summary><table>"
        for result in results:
            name = f'<span class="id">{result.case.id}</span>'
            if result.verdict in FAILING:
                name = f'<a href="#{result.case.id}">{name}</a>'
            yield f'<tr><td class="verdict">{_tag(result)}</td><td>{name} <span class="soft">'
            yield f"{', '.join(result.case.rules)}</span><br>{escape(result.case.requires)}"
            if result.reason and result.verdict is not Verdict.FAILED:
                yield f'<br><span class="soft">{escape(result.reason)}</span>'
            yield f'</td><td class="time">{result.seconds:.2f} s</td></tr>'
        yield "</table></details>"


def _tag(result: Result) -> str:
    return f'<span class="tag {result.verdict.replace(" ", "-")}">{result.verdict}</span>'
