"""Real SGLang servers on small models, one for each module that needs it, and one reference for all."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.tasks.cases import Reference

_JOBS = (
    *("llama", "bert", "sentiment", "classes", "rewards", "pairs"),
    *("labels", "asked", "asked-instructed", "see-qwen"),
)


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reference]:
    """The independent answers."""
    found = Reference(tmp_path_factory.mktemp("reference"), _JOBS)
    yield found
    found.close()
