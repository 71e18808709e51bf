# SPDX-License-Identifier: Apache-2.0
"""The suite as a library, for people who test their own server in their own CI.

For example, in a test: `assert run(address, profiles=["core", "generation"]).failed == 0`; the report's `explain`
gives the message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from openengine_conformance.case import all_cases
from openengine_conformance.options import Options
from openengine_conformance.results import Report
from openengine_conformance.runner import Progress, run_cases, select


async def run_async(
    target: str,
    *,
    ids: Sequence[str] = (),
    areas: Sequence[str] = (),
    requirements: Sequence[str] = (),
    profiles: Sequence[str] = (),
    exclude: Sequence[str] = (),
    progress: Progress | None = None,
    **options: Any,
) -> Report:
    """Run the suite against `target` ("host:port") and return the report.

    Without a selection every case runs. `options` are the fields of `Options`. Raises `Unreachable` when the
    server does not answer, and `ValueError` when a selection names nothing.
    """
    cases = select(
        all_cases(), ids=ids, areas=areas, requirements=requirements, profiles=profiles, exclude=exclude
    )
    return await run_cases(cases, Options(target=target, **options), progress)


def run(target: str, **arguments: Any) -> Report:
    """Run the suite from code that is not asynchronous; takes what `run_async` takes."""
    return asyncio.run(run_async(target, **arguments))
