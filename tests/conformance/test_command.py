# SPDX-License-Identifier: Apache-2.0
"""The command and the reports that it writes."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

import openengine_conformance
from openengine.v1 import generate_pb2
from openengine_conformance.__main__ import main, read_known_failures
from openengine_conformance.case import Case, all_cases
from openengine_conformance.checks import expect
from openengine_conformance.context import Context
from openengine_conformance.exchange import Exchange, render, render_short
from openengine_conformance.options import Options
from openengine_conformance.report.html import to_html
from openengine_conformance.report.junit import to_junit
from openengine_conformance.results import Report, Standing
from openengine_conformance.runner import run_cases
from tests.conformance.fake import serving

Command = tuple[int, str]
SOUND = ["discovery.engine", "discovery.revision", "discovery.release", "discovery.role"]


async def command(*arguments: str) -> int:
    """Run the command in a thread, since it has an event loop of its own."""
    return await asyncio.to_thread(main, arguments)


def _choose(*ids: str) -> list[str]:
    return [word for name in ids for word in ("--case", name)]


async def test_exit_0_and_the_closing_line(capsys: pytest.CaptureFixture[str]) -> None:
    async with serving() as served:
        assert await command("--target", served.target, *_choose(*SOUND)) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "4 passed, 0 failed, 0 skipped"


async def test_exit_1_and_a_failure_that_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    async with serving() as served:
        # The fake server has no GetKvConnectorInfo.
        assert await command("--target", served.target, *_choose("discovery.connector", *SOUND)) == 1
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == "4 passed, 1 failed, 0 skipped"
    for word in ("requires", "came back", "UNIMPLEMENTED", "DISC-10", "Core identity and roles", "sent"):
        assert word in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--target"),
        (["--target", "x:1", "--case", "no.such"], "no.such"),
        (["--target", "x:1", "--area", "abort", "--profile", "lora"], "no case to run"),
        (["--target", "x:1", "--known-failures", "/no/such/file"], "/no/such/file"),
        (["--target", "x:1", "--tls-cert", "c.pem"], "--tls-key"),
        (["--target", "x:1", "--tls-ca", "/no/such/ca.pem"], "/no/such/ca.pem"),
    ],
)
async def test_exit_2_when_nothing_can_be_run(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await command(*arguments) == 2
    assert message in capsys.readouterr().err


async def test_exit_2_when_the_server_is_not_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("openengine_conformance.connection.CONNECT_TIMEOUT", 0.5)
    assert await command("--target", "127.0.0.1:1") == 2
    assert "127.0.0.1:1" in capsys.readouterr().err


async def test_known_failures_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    known = tmp_path / "known.txt"
    known.write_text("# ours\n\ndiscovery.connector  # not built yet\n")
    assert read_known_failures(known) == {"discovery.connector": "not built yet"}
    async with serving() as served:
        target = ["--target", served.target, "--known-failures", str(known)]
        assert await command(*target, *_choose("discovery.connector")) == 0
        assert "known failure discovery.connector" in capsys.readouterr().out
        known.write_text("discovery.engine\n")
        assert await command(*target, *_choose("discovery.engine")) == 1
        assert "unexpected pass" in capsys.readouterr().out
        known.write_text("no.such_case\n")
        assert await command(*target, *_choose("discovery.engine")) == 2
        assert "no.such_case" in capsys.readouterr().err


def test_list_shows_cases(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--area", "abort"]) == 0
    out = capsys.readouterr().out
    assert "abort.whole_ids" in out
    assert "discovery.engine" not in out


def test_list_shows_requirements_with_cases_or_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--requirements"]) == 0
    out = capsys.readouterr().out
    assert "abort.whole_ids" in out
    assert "unseen:" in out
    assert "no case" not in out


async def test_written_reports(tmp_path: Path) -> None:
    paths = {form: tmp_path / "deep" / f"report.{form}" for form in ("json", "junit", "html")}
    forms = [word for form, path in paths.items() for word in (f"--{form}", str(path))]
    async with serving() as served:
        chosen = _choose("discovery.connector", "disaggregation.session", *SOUND)
        assert await command("--target", served.target, *chosen, *forms) == 1
    document = json.loads(paths["json"].read_text())
    assert document["totals"] == {"passed": 4, "failed": 1, "skipped": 1}
    assert document["server"]["engine_info"]["engine_name"] == "fake"
    assert document["versions"]["suite"] == openengine_conformance.SUITE_VERSION
    assert document["requirements"]["DISC-02"]["standing"] == "holds"
    assert document["requirements"]["DISC-10"]["standing"] == "broken"
    assert document["requirements"]["ERR-07"]["standing"] == "unseen"
    broken = next(case for case in document["cases"] if case["verdict"] == "failed")
    assert broken["id"] == "discovery.connector"
    assert broken["exchanges"][0]["method"] == "GetKvConnectorInfo"
    suites = ElementTree.parse(paths["junit"]).getroot()
    tests = {
        name: sum(int(suite.get(name, "0")) for suite in suites) for name in ("tests", "failures", "skipped")
    }
    assert tests == {"tests": 6, "failures": 1, "skipped": 1}
    page = paths["html"].read_text()
    assert "discovery.connector" in page
    assert "GetKvConnectorInfo" in page
    assert not re.search(r"(src|href)=\"(https?:)?//", page)
    assert "<script" not in page


async def _report(body: object) -> Report:
    case = Case("discovery.odd", "An odd case.", ("DISC-01",), (), False, None, body)  # type: ignore[arg-type]
    async with serving() as served:
        return await run_cases([case], Options(target=served.target))


async def test_reports_hold_what_no_markup_can(tmp_path: Path) -> None:
    async def odd(ctx: Context) -> None:
        await ctx.generate(ctx.request("\x00\x1b<b>&\ud7ff🦜", max_tokens=1))
        expect(False, "came \x00 <script>alert(1)</script> \x1b")

    report = await _report(odd)
    ElementTree.fromstring(to_junit(report))
    assert "<script" not in to_html(report)


async def test_a_report_without_failures_renders() -> None:
    async def sound(ctx: Context) -> None:
        await ctx.generate(ctx.request(max_tokens=1))

    report = await _report(sound)
    assert "No failure in 1 cases" in to_html(report)
    assert report.standings()["DISC-01"] is Standing.HOLDS


async def test_long_streams_keep_their_beginning_and_end() -> None:
    exchange = Exchange("Generate", generate_pb2.GenerateRequest())
    for number in range(500):
        exchange.saw(generate_pb2.GenerateResponse(request_id=str(number)))
    kept = [reply.number for reply in exchange.replies]
    assert exchange.count == 500
    assert kept[:3] == [0, 1, 2]
    assert kept[-1] == 499
    assert len(kept) < 50


def test_messages_are_cut_to_what_a_person_reads() -> None:
    message = generate_pb2.GenerateRequest(prompt="x" * 100_000)
    message.token_ids.ids.extend(range(5000))
    assert len(render(message)) < 5000
    assert len(render_short(message)) < 500
    assert render(generate_pb2.GenerateRequest()) == "(empty)"
    assert "2 raw bytes" in render(b"\x00\xff")


async def test_the_library_runs_a_selection() -> None:
    async with serving() as served:
        report = await openengine_conformance.run_async(served.target, ids=SOUND)
    assert report.failed == 0, report.explain()
    assert report.passed == 4
    assert len(all_cases()) > 300
