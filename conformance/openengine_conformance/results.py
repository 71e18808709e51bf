# SPDX-License-Identifier: Apache-2.0
"""What a run found: a verdict for each case, and what follows for each requirement."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime

from openengine_conformance.case import Case
from openengine_conformance.exchange import Exchange
from openengine_conformance.offer import Offer
from openengine_conformance.requirements import REQUIREMENTS, Requirement


class Verdict(enum.StrEnum):
    """How a case ended."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"
    KNOWN_FAILURE = "known failure"
    UNEXPECTED_PASS = "unexpected pass"
    NOT_RUN = "not run"


FAILING = {Verdict.FAILED, Verdict.UNEXPECTED_PASS}


class Standing(enum.StrEnum):
    """What a run says about one requirement."""

    HOLDS = "holds"
    BROKEN = "broken"
    UNTESTED = "untested"
    UNSEEN = "unseen"


@dataclass
class Result:
    """One case's verdict. `reason` says what was wrong, or why there is no verdict; `rule` which rule broke."""

    case: Case
    verdict: Verdict
    reason: str = ""
    rule: str = ""
    seconds: float = 0.0
    runs: int = 1
    failed_runs: int = 0
    exchanges: list[Exchange] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def requirement(self) -> Requirement | None:
        """The requirement that was broken."""
        return REQUIREMENTS.get(self.rule)


@dataclass
class Report:
    """A finished run."""

    target: str
    suite_version: str
    offer: Offer
    began: datetime
    seconds: float
    results: list[Result]
    death: str = ""

    def count(self, *verdicts: Verdict) -> int:
        """The number of cases with one of these verdicts."""
        return sum(result.verdict in verdicts for result in self.results)

    @property
    def passed(self) -> int:
        """Cases that passed."""
        return self.count(Verdict.PASSED)

    @property
    def failed(self) -> int:
        """Cases that failed, unexpected passes included."""
        return self.count(*FAILING)

    @property
    def skipped(self) -> int:
        """Cases without a verdict of their own: skipped, not run, or known to fail."""
        return len(self.results) - self.passed - self.failed

    @property
    def exit_code(self) -> int:
        """0 when nothing failed, else 1."""
        return 1 if self.failed or self.death else 0

    @property
    def closing_line(self) -> str:
        """The totals in one line."""
        return f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped"

    def explain(self) -> str:
        """The failures in a few lines each."""
        return "\n".join(f"{r.case.id} ({r.rule}): {r.reason}" for r in self.failures())

    def failures(self) -> list[Result]:
        """The results that make the run fail."""
        return [result for result in self.results if result.verdict in FAILING]

    def standings(self) -> dict[str, Standing]:
        """What the run says about each requirement, by id."""
        return {rule: self._standing(requirement) for rule, requirement in REQUIREMENTS.items()}

    def _standing(self, requirement: Requirement) -> Standing:
        if requirement.unseen:
            return Standing.UNSEEN
        cited = [r for r in self.results if requirement.id in r.case.rules or r.rule == requirement.id]
        broken = {Verdict.FAILED, Verdict.KNOWN_FAILURE}
        if any(r.verdict in broken and requirement.id in _blamed(r) for r in cited):
            return Standing.BROKEN
        if any(r.verdict in (Verdict.PASSED, Verdict.UNEXPECTED_PASS) for r in cited):
            return Standing.HOLDS
        return Standing.UNTESTED


def _blamed(result: Result) -> Iterable[str]:
    # A failure blames the rule that it names; without one, all that the case cites.
    return [result.rule] if result.rule else result.case.rules
