"""Proof that the suite can fail: it passes the intact reference server and catches every mutant of it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark import ParameterSet

from openengine.v1 import discovery_pb2
from openengine_adapters.core.servicer import OpenEngineServicer
from openengine_adapters.core.watchdog import Limits
from openengine_adapters.reference.engine import ReferenceEngine
from openengine_adapters.reference.mutants import MUTANTS, Mutant
from openengine_adapters.reference.settings import Settings
from openengine_adapters.server import Server
from openengine_conformance.library import run_async
from openengine_conformance.results import Report, Result, Standing, Verdict
from tests.reference.harness import write_adapter

SPEED = 500.0
"""Tokens a second: slow enough for a request to be caught in flight, fast enough for all others."""

INTACT = Mutant("intact", "", "Nothing is broken.")


@contextlib.asynccontextmanager
async def _served(mutant: Mutant, settings: Mapping[str, Any]) -> AsyncIterator[str]:
    """Serve the reference engine, spoilt by `mutant`, on a free port; yields the target."""
    engine = mutant.spoil_engine(ReferenceEngine(Settings(**{"speed": SPEED, **settings})))
    servicer = OpenEngineServicer(engine, "reference-1", "v1.0.0", Limits(period_s=0.1))
    server = Server(mutant.spoil_servicer(servicer), "127.0.0.1", 0)
    port = await server.start()
    try:
        servicer.opened(await engine.start())
        yield f"127.0.0.1:{port}"
    finally:
        await servicer.closed()
        await server.stop(0)
        await engine.stop()


async def _run(mutant: Mutant, folder: Path, settings: Mapping[str, Any], **options: Any) -> Report:
    """Run the suite; a prefill server gets a decode server of the same kind, and an intact one to compare with."""
    loras = [write_adapter(folder / name, name.encode() * 32) for name in ("one", "two")]
    async with contextlib.AsyncExitStack() as servers:
        if settings.get("role") == discovery_pb2.ENGINE_ROLE_PREFILL:
            decode = {**settings, "role": discovery_pb2.ENGINE_ROLE_DECODE}
            options["peer"] = await servers.enter_async_context(_served(mutant, decode))
            options["aggregated"] = await servers.enter_async_context(_served(INTACT, {}))
        target = await servers.enter_async_context(_served(mutant, settings))
        return await run_async(target, lora=tuple(loras), jobs=4, **options)


def _explained(report: Report) -> str:
    lines = [
        f"{r.case.id}: {r.verdict} {r.rule} {r.reason}" for r in report.results if r.verdict != Verdict.PASSED
    ]
    return "\n".join([report.death, *lines])


def _controls() -> dict[str, tuple[Mapping[str, Any], list[str]]]:
    """The settings under which some mutants are judged, each with the requirements that these break."""
    found: dict[str, tuple[Mapping[str, Any], list[str]]] = {}
    for mutant in MUTANTS.values():
        if mutant.settings:
            key = ", ".join(f"{name}={value}" for name, value in mutant.settings.items())
            found.setdefault(key, (mutant.settings, []))[1].append(mutant.breaks)
    return found


def _control_cases() -> list[ParameterSet]:
    """The controls, by their settings."""
    return [pytest.param(*control, id=key) for key, control in _controls().items()]


async def test_the_intact_server_passes_everything(tmp_path: Path) -> None:
    report = await _run(INTACT, tmp_path, {})
    assert report.failed == 0, _explained(report)


@pytest.mark.parametrize(("settings", "rules"), _control_cases())
async def test_no_requirement_is_found_broken_by_a_mutants_settings_alone(
    settings: Mapping[str, Any], rules: list[str], tmp_path: Path
) -> None:
    report = await _run(INTACT, tmp_path, settings, requirements=rules)
    standings = report.standings()
    assert {rule: standings[rule] for rule in rules} == dict.fromkeys(rules, Standing.HOLDS), _explained(
        report
    )


def _catches(result: Result, mutant: Mutant) -> bool:
    if result.verdict is not Verdict.FAILED or mutant.breaks not in result.case.rules:
        return False
    # A server that fails on purpose fails many cases, so there the right rule has to be named.
    return "faults" not in mutant.settings or result.rule == mutant.breaks


@pytest.mark.parametrize("name", MUTANTS)
async def test_the_suite_finds_what_a_mutant_breaks(name: str, tmp_path: Path) -> None:
    mutant = MUTANTS[name]
    report = await _run(
        mutant, tmp_path, mutant.settings, requirements=[mutant.breaks], timeout=5.0, **mutant.options
    )
    assert any(_catches(result, mutant) for result in report.results), (
        f"{name} ({mutant.breaks}: {mutant.sentence}) was not caught\n{_explained(report)}"
    )
