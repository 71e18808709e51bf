"""A scripted server and the command, run in the test's own event loop."""

from __future__ import annotations

import io
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pytest

from openengine_adapters.client.__main__ import prepare
from tests.client.fake import FakeServer, serving


@dataclass(frozen=True)
class Outcome:
    """What a command did."""

    code: int
    out: str
    err: str

    @property
    def records(self) -> list[Any]:
        return [json.loads(line) for line in self.out.splitlines()]

    @property
    def failure(self) -> Any:
        return json.loads(self.err)["error"]


OpenEngine = Callable[..., Awaitable[Outcome]]


@pytest.fixture
async def fake() -> AsyncIterator[FakeServer]:
    async with serving(FakeServer()) as server:
        yield server


@pytest.fixture
def openengine(
    fake: FakeServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> OpenEngine:
    """Run `openengine` with these arguments against the scripted server."""
    for name in ("OPENENGINE_TARGET", "OPENENGINE_TOKEN", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()

    async def run(*arguments: str, stdin: str = "") -> Outcome:
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        monkeypatch.setenv("OPENENGINE_TARGET", fake.target)
        try:
            code: Any = await prepare(arguments)
        except SystemExit as end:
            code = end.code
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return run
