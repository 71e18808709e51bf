# SPDX-License-Identifier: Apache-2.0
"""A case: one rule of the contract as a short program, registered by `@case`."""

from __future__ import annotations

import enum
import importlib
import pkgutil
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from openengine_conformance.context import Context
    from openengine_conformance.needs import Need

Body = Callable[["Context"], Awaitable[None]]


class Profile(enum.StrEnum):
    """A part of the contract that a server may be tested for by itself."""

    CORE = "core"
    GENERATION = "generation"
    TASKS = "tasks"
    LORA = "lora"
    KV = "kv"
    DISAGGREGATION = "disaggregation"
    OBSERVABILITY = "observability"


AREAS: dict[str, Profile] = {
    "discovery": Profile.CORE,
    "roles": Profile.CORE,
    "model": Profile.CORE,
    "health": Profile.CORE,
    "errors": Profile.CORE,
    "generate_request": Profile.GENERATION,
    "generate_stream": Profile.GENERATION,
    "sampling": Profile.GENERATION,
    "stopping": Profile.GENERATION,
    "response_options": Profile.GENERATION,
    "kv_options": Profile.GENERATION,
    "guided": Profile.GENERATION,
    "media": Profile.GENERATION,
    "abort": Profile.GENERATION,
    "tasks": Profile.TASKS,
    "embed": Profile.TASKS,
    "classify": Profile.TASKS,
    "score": Profile.TASKS,
    "lora": Profile.LORA,
    "kv_sources": Profile.KV,
    "kv_events": Profile.KV,
    "disaggregation": Profile.DISAGGREGATION,
    "load": Profile.OBSERVABILITY,
    "runtime_events": Profile.OBSERVABILITY,
    "drain": Profile.CORE,
}
"""The areas in the order in which they run (a drain comes last), each with its profile."""


@dataclass(frozen=True)
class Case:
    """One registered case.

    `requires` is the rule in one sentence, `rules` the requirement ids that a failure disproves. `exclusive`
    cases run alone, because they watch the server's load or compare outputs that depend on the batch.
    `timeout` is for cases that need more than the usual deadline.
    """

    id: str
    requires: str
    rules: tuple[str, ...]
    needs: tuple[Need, ...]
    exclusive: bool
    timeout: float | None
    body: Body

    @property
    def area(self) -> str:
        """The part of the id before the dot: the module that holds the case."""
        return self.id.partition(".")[0]

    @property
    def profile(self) -> Profile:
        """The profile that the case's area belongs to."""
        return AREAS[self.area]


_registered: dict[str, Case] = {}


def case(
    case_id: str,
    requires: str,
    *rules: str,
    needs: Sequence[Need] = (),
    exclusive: bool = False,
    timeout: float | None = None,
) -> Callable[[Body], Body]:
    """Register the decorated function as the case `case_id`, which proves `rules`."""

    def register(body: Body) -> Body:
        if case_id in _registered:
            raise ValueError(f"two cases are called {case_id}")
        if not rules:
            raise ValueError(f"{case_id} cites no requirement")
        _registered[case_id] = Case(case_id, requires, rules, tuple(needs), exclusive, timeout, body)
        return body

    return register


def all_cases() -> list[Case]:
    """Return every case, area by area in the order of `AREAS`, within an area as written."""
    from openengine_conformance import cases

    for module in pkgutil.iter_modules(cases.__path__):
        importlib.import_module(f"{cases.__name__}.{module.name}")
    order = list(AREAS)
    return sorted(_registered.values(), key=lambda c: order.index(c.area))
