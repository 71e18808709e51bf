# SPDX-License-Identifier: Apache-2.0
"""The report for CI systems that read JUnit XML."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from openengine_conformance.case import AREAS
from openengine_conformance.exchange import Exchange, render
from openengine_conformance.results import FAILING, Report, Result, Verdict

# What XML 1.0 can't hold, and tokenizers may well produce.
_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def to_junit(report: Report) -> str:
    """Return the report as JUnit XML, a test suite for each area."""
    root = ElementTree.Element("testsuites", name="openengine-conformance", time=f"{report.seconds:.3f}")
    for area in AREAS:
        results = [result for result in report.results if result.case.area == area]
        if not results:
            continue
        suite = ElementTree.SubElement(
            root,
            "testsuite",
            name=area,
            tests=str(len(results)),
            failures=str(sum(r.verdict in FAILING for r in results)),
            errors="0",
            skipped=str(sum(r.verdict not in FAILING and r.verdict is not Verdict.PASSED for r in results)),
            time=f"{sum(r.seconds for r in results):.3f}",
            timestamp=report.began.replace(tzinfo=None).isoformat(timespec="seconds"),
            hostname=report.target,
        )
        for result in results:
            _add_case(suite, result)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _add_case(suite: ElementTree.Element, result: Result) -> None:
    case = result.case
    element = ElementTree.SubElement(
        suite,
        "testcase",
        classname=f"openengine_conformance.{case.area}",
        name=case.id,
        time=f"{result.seconds:.3f}",
    )
    if result.verdict in FAILING:
        failure = ElementTree.SubElement(element, "failure", message=_clean(result.reason), type=result.rule)
        failure.text = _clean(_evidence(result))
    elif result.verdict is not Verdict.PASSED:
        ElementTree.SubElement(element, "skipped", message=_clean(result.reason or result.verdict))


def _evidence(result: Result) -> str:
    lines = [f"requires: {result.case.requires}", f"came back: {result.reason}"]
    if requirement := result.requirement:
        lines.append(f"rule: {requirement.id}: {requirement.summary} (“{requirement.section}”)")
    lines += result.notes
    for exchange in result.exchanges:
        lines += ["", *_exchange(exchange)]
    return "\n".join(lines)


def _exchange(exchange: Exchange) -> list[str]:
    lines = [exchange.summary(), "sent:", render(exchange.request)]
    for reply in exchange.replies:
        lines += [f"message {reply.number + 1} after {reply.at:.3f} s:", render(reply.message)]
    return lines


def _clean(text: str) -> str:
    return _FORBIDDEN.sub("\ufffd", text)
