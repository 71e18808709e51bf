# SPDX-License-Identifier: Apache-2.0
"""Runs the chosen cases against one server: deadlines, parallel cases, repeats, and a server that dies."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Protocol

from openengine_conformance import SUITE_VERSION
from openengine_conformance.case import Case
from openengine_conformance.checks import Failure, Refused, Skip
from openengine_conformance.connection import Connection
from openengine_conformance.context import Context, Session
from openengine_conformance.offer import Offer
from openengine_conformance.options import Options
from openengine_conformance.results import Report, Result, Verdict


class Progress(Protocol):
    """Is told how a run goes on."""

    def began(self, offer: Offer, cases: Sequence[Case]) -> None:
        """The server answered discovery, and these cases will run."""

    def starting(self, case: Case) -> None:
        """A case begins."""

    def finished(self, result: Result) -> None:
        """A case has its verdict."""


class Silent:
    """Progress for nobody."""

    def began(self, offer: Offer, cases: Sequence[Case]) -> None:
        """Tell nobody."""

    def starting(self, case: Case) -> None:
        """Tell nobody."""

    def finished(self, result: Result) -> None:
        """Tell nobody."""


async def run_cases(cases: Sequence[Case], options: Options, progress: Progress | None = None) -> Report:
    """Run `cases` against the server and return the report. Raises `Unreachable` when it does not answer."""
    began, start = datetime.now(UTC), time.monotonic()
    connection = Connection(options.target, options.access)
    try:
        offer = await connection.discover(options.model)
        runner = _Runner(Session(options, connection, offer), progress or Silent())
        await runner.run(cases)
    finally:
        await connection.close()
    return Report(
        target=options.target,
        suite_version=SUITE_VERSION,
        offer=offer,
        began=began,
        seconds=time.monotonic() - start,
        results=[runner.results[case.id] for case in cases],
        death=runner.death,
    )


class _Runner:
    def __init__(self, session: Session, progress: Progress) -> None:
        self.results: dict[str, Result] = {}
        self.death = ""
        self._asking = asyncio.Lock()
        self._session = session
        self._options = session.options
        self._progress = progress

    async def run(self, cases: Sequence[Case]) -> None:
        self._progress.began(self._session.offer, cases)
        if self._options.jobs > 1:
            gate = asyncio.Semaphore(self._options.jobs)

            async def one(case: Case) -> None:
                async with gate:
                    await self._run(case)

            async with asyncio.TaskGroup() as group:
                for case in cases:
                    if not case.exclusive:
                        group.create_task(one(case))
        for case in cases:
            if case.id not in self.results:
                await self._run(case)

    async def _run(self, case: Case) -> None:
        self._progress.starting(case)
        start = time.monotonic()
        result = self._unmet(case) or await self._run_repeatedly(case)
        result.seconds = time.monotonic() - start
        self._expect_known(result)
        self.results[case.id] = result
        self._progress.finished(result)

    def _unmet(self, case: Case) -> Result | None:
        if self.death:
            return Result(case, Verdict.NOT_RUN, self.death, runs=0)
        for need in case.needs:
            if reason := need(self._session.offer, self._options):
                return Result(case, Verdict.SKIPPED, reason, runs=0)
        return None

    async def _run_repeatedly(self, case: Case) -> Result:
        worst: Result | None = None
        failed = 0
        for run in range(1, self._options.repeat + 1):
            result = await self._run_once(case)
            failed += result.verdict is Verdict.FAILED
            # The first failure is the evidence; without one, the last run.
            if worst is None or worst.verdict is not Verdict.FAILED:
                worst = result
            worst.runs, worst.failed_runs = run, failed
            if self.death or result.verdict is Verdict.SKIPPED:
                break
        assert worst is not None
        return worst

    async def _run_once(self, case: Case) -> Result:
        context = Context(self._session, case)
        deadline = self._deadline(case)
        verdict, reason, rule = Verdict.PASSED, "", ""
        try:
            async with asyncio.timeout(deadline):
                await case.body(context)
        except Skip as skip:
            verdict, reason = Verdict.SKIPPED, str(skip)
        except Failure as failure:
            verdict, reason, rule = Verdict.FAILED, failure.problem, failure.rule
        except Refused as refused:
            verdict, reason = Verdict.FAILED, f"a call that should be served was refused: {refused}"
        except TimeoutError:
            verdict, reason = Verdict.FAILED, f"the case did not end within {deadline:g} s"
        except Exception as error:
            # An answer that the case did not foresee, or a fault in the case: either way the run goes on.
            verdict, reason = Verdict.FAILED, f"the case could not read the answer: {error!r}"
        notes = await context.clean_up()
        result = Result(case, verdict, reason, exchanges=context.exchanges, notes=notes)
        if verdict is Verdict.FAILED:
            result.rule = rule or case.rules[0]
            await self._look_for_death(result)
        return result

    async def _look_for_death(self, result: Result) -> None:
        # Cases that run at the same time ask one after the other, so that only the first reports the death.
        async with self._asking:
            reported = self.death
            if not reported and (died := await self._session.connection.why_dead()):
                self.death = f"the server stopped answering during {result.case.id} ({died})"
                result.reason += f"; then the server stopped answering ({died})"
        if reported:
            result.verdict, result.reason, result.rule = Verdict.NOT_RUN, reported, ""

    def _deadline(self, case: Case) -> float:
        # A case that needs longer keeps its proportion when the user grants more or less time.
        usual = Options.timeout
        return self._options.timeout * (case.timeout or usual) / usual

    def _expect_known(self, result: Result) -> None:
        known = self._options.known_failures.get(result.case.id)
        if known is None:
            return
        if result.verdict is Verdict.FAILED:
            result.verdict = Verdict.KNOWN_FAILURE
            result.notes.append(f"known: {known}" if known else "known")
        elif result.verdict is Verdict.PASSED:
            result.verdict = Verdict.UNEXPECTED_PASS
            result.reason = "passed, but is listed as a known failure: take it off the list"


def select(
    cases: Sequence[Case],
    *,
    ids: Sequence[str] = (),
    areas: Sequence[str] = (),
    requirements: Sequence[str] = (),
    profiles: Sequence[str] = (),
    exclude: Sequence[str] = (),
) -> list[Case]:
    """Return the cases that match every kind of selection given, less the excluded ones.

    `ids` and `exclude` take shell patterns. Raises `ValueError` for a name that matches nothing.
    """
    from fnmatch import fnmatchcase

    def matching(names: Sequence[str], kind: str, fits: Callable[[Case, str], bool]) -> set[str]:
        found: set[str] = set()
        for name in names:
            hits = {case.id for case in cases if fits(case, name)}
            if not hits:
                raise ValueError(f"no case has the {kind} {name!r}")
            found |= hits
        return found

    chosen = {case.id for case in cases}
    for names, kind, fits in (
        (ids, "id", lambda case, name: fnmatchcase(case.id, name)),
        (areas, "area", lambda case, name: case.area == name),
        (requirements, "requirement", lambda case, name: name in case.rules),
        (profiles, "profile", lambda case, name: case.profile == name),
    ):
        if names:
            chosen &= matching(names, kind, fits)
    chosen -= matching(exclude, "id", lambda case, name: fnmatchcase(case.id, name))
    return [case for case in cases if case.id in chosen]
