# SPDX-License-Identifier: Apache-2.0
"""The cases as a whole: what they cite, what they cover, and how they are selected."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import openengine_conformance
from openengine_conformance.case import AREAS, all_cases
from openengine_conformance.requirements import REQUIREMENTS
from openengine_conformance.runner import select

CASES = all_cases()
SOURCE = Path(openengine_conformance.__file__).parent


def test_every_cited_requirement_exists() -> None:
    assert {rule for case in CASES for rule in case.rules} <= set(REQUIREMENTS)


def test_every_visible_requirement_has_a_case() -> None:
    cited = {rule for case in CASES for rule in case.rules}
    assert [rule for rule, entry in REQUIREMENTS.items() if not entry.unseen and rule not in cited] == []


def test_unseen_requirements_say_why() -> None:
    assert all(len(entry.unseen) > 10 for entry in REQUIREMENTS.values() if entry.unseen)


def test_each_case_is_said_in_one_sentence_in_the_module_of_its_area() -> None:
    for case in CASES:
        assert case.area in AREAS
        module = case.body.__module__.removeprefix("openengine_conformance.cases.")
        assert module == case.area or module.startswith(f"{case.area}_")
        assert re.fullmatch(r"[a-z_]+\.[a-z_]+", case.id)
        assert case.requires.endswith(".")
        assert len(case.requires) <= 120


def test_a_drain_runs_last() -> None:
    assert CASES[-1].area == "drain"


def test_the_suite_imports_no_engine_and_no_adapter() -> None:
    allowed = {
        "openengine",
        "openengine_conformance",
        "grpc",
        "grpc_health",
        "grpc_reflection",
        "google",
        "rich",
    }
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module]
            for name in names:
                root = name.partition(".")[0]
                assert root in allowed or root in _standard_library(), f"{path.name} imports {name}"


def _standard_library() -> frozenset[str]:
    import sys

    return sys.stdlib_module_names


def _ids(**selection: list[str]) -> set[str]:
    return {case.id for case in select(CASES, **selection)}


def test_selection_by_each_kind() -> None:
    assert _ids(ids=["discovery.role"]) == {"discovery.role"}
    assert _ids(ids=["discovery.ro*", "model.names"]) == {"discovery.role", "model.names"}
    assert _ids(areas=["abort"]) == {case.id for case in CASES if case.area == "abort"}
    assert _ids(requirements=["STREAM-06"]) == {case.id for case in CASES if "STREAM-06" in case.rules}
    assert _ids(profiles=["lora"]) == {case.id for case in CASES if case.area == "lora"}
    assert _ids() == {case.id for case in CASES}


def test_kinds_of_selection_narrow_each_other() -> None:
    chosen = _ids(areas=["abort"], requirements=["STREAM-06"])
    assert chosen == {case.id for case in CASES if case.area == "abort" and "STREAM-06" in case.rules}


def test_excluded_cases_are_left_out() -> None:
    assert _ids(areas=["abort"], exclude=["abort.*"]) == set()


@pytest.mark.parametrize("kind", ["ids", "areas", "requirements", "profiles", "exclude"])
def test_a_selection_that_names_nothing_is_an_error(kind: str) -> None:
    with pytest.raises(ValueError, match="nothing-like-it"):
        _ids(**{kind: ["nothing-like-it"]})
