# SPDX-License-Identifier: Apache-2.0
"""The runner: verdicts, deadlines, clean-up, repeats, known failures, and a server that dies."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from openengine.v1 import discovery_pb2, generate_pb2
from openengine_conformance.case import Case
from openengine_conformance.checks import Code, expect, skip
from openengine_conformance.connection import Unreachable
from openengine_conformance.context import Context
from openengine_conformance.options import Access, Options
from openengine_conformance.results import Report, Verdict
from openengine_conformance.runner import run_cases
from tests.conformance.fake import Served, fake_engine, serving

Body = Callable[[Context], Awaitable[None]]


def make(body: Body, name: str = "discovery.made_up", **fields: Any) -> Case:
    settings: dict[str, Any] = {"needs": (), "exclusive": False, "timeout": None, **fields}
    return Case(name, "A case of this test.", ("DISC-01",), body=body, **settings)


async def run(served: Served, *cases: Case, **options: Any) -> Report:
    return await run_cases(cases, Options(target=served.target, **options))


async def passes(ctx: Context) -> None:
    await ctx.call(ctx.rpc.GetEngineInfo, discovery_pb2.GetEngineInfoRequest())


async def fails(ctx: Context) -> None:
    await ctx.generate(ctx.request(max_tokens=1))
    expect(False, "it came otherwise", "STREAM-06")


async def hangs(ctx: Context) -> None:
    await asyncio.Event().wait()


async def test_verdicts_and_totals() -> None:
    async def skips(ctx: Context) -> None:
        skip("nothing to see")

    async def is_surprised(ctx: Context) -> None:
        raise KeyError("surprise")

    async def is_refused(ctx: Context) -> None:
        await ctx.call(ctx.rpc.ListLoras, _list_loras())

    async with serving() as served:
        cases = [
            make(body, f"discovery.{body.__name__}")
            for body in (passes, fails, skips, is_surprised, is_refused)
        ]
        report = await run(served, *cases)
    verdicts = [result.verdict for result in report.results]
    assert verdicts == [Verdict.PASSED, Verdict.FAILED, Verdict.SKIPPED, Verdict.FAILED, Verdict.FAILED]
    assert report.closing_line == "1 passed, 3 failed, 1 skipped"
    assert report.exit_code == 1
    failed = report.results[1]
    assert (failed.reason, failed.rule) == ("it came otherwise", "STREAM-06")
    assert failed.exchanges[0].method == "Generate"
    assert failed.exchanges[0].count == 2
    assert "surprise" in report.results[3].reason
    assert "UNIMPLEMENTED" in report.results[4].reason


def _list_loras() -> Any:
    from openengine.v1 import lora_pb2

    return lora_pb2.ListLorasRequest()


async def test_a_need_that_is_not_met_skips_with_its_reason() -> None:
    async with serving() as served:
        report = await run(served, make(fails, needs=(lambda offer, options: "no such thing",)))
    assert (report.results[0].verdict, report.results[0].reason) == (Verdict.SKIPPED, "no such thing")


async def test_a_case_that_hangs_ends_at_its_deadline_and_the_run_goes_on() -> None:
    async with serving() as served:
        start = time.monotonic()
        report = await run(served, make(hangs, "discovery.a"), make(passes, "discovery.b"), timeout=0.3)
    assert time.monotonic() - start < 5
    assert [result.verdict for result in report.results] == [Verdict.FAILED, Verdict.PASSED]
    assert "did not end within 0.3 s" in report.results[0].reason


async def test_what_a_case_opened_is_closed_also_after_a_failure() -> None:
    undone: list[str] = []

    async def opens_and_fails(ctx: Context) -> None:
        ctx.defer(_append(undone, "first"))
        ctx.defer(_append(undone, "second"))
        stream = ctx.open(ctx.request(max_tokens=10_000))
        await stream.wait_tokens()
        expect(False, "on purpose")

    async with serving() as served:
        report = await run(served, make(opens_and_fails))
        async with asyncio.timeout(3):
            while served.engine.running:
                await asyncio.sleep(0.01)
    assert report.results[0].verdict is Verdict.FAILED
    assert undone == ["second", "first"]


async def test_a_clean_up_that_fails_is_noted_and_the_others_still_run() -> None:
    undone: list[str] = []

    async def body(ctx: Context) -> None:
        ctx.defer(_append(undone, "kept"))
        ctx.defer(_raise)

    async with serving() as served:
        report = await run(served, make(body))
    assert undone == ["kept"]
    assert report.results[0].verdict is Verdict.PASSED
    assert "no way back" in report.results[0].notes[0]


async def _raise() -> None:
    raise RuntimeError("no way back")


def _append(undone: list[str], word: str) -> Callable[[], Awaitable[None]]:
    async def undo() -> None:
        undone.append(word)

    return undo


async def test_a_dead_server_is_reported_once() -> None:
    async with serving() as served:

        async def kills(ctx: Context) -> None:
            await served.stop()
            await passes(ctx)

        cases = [make(passes, "discovery.a"), make(kills, "discovery.b")]
        cases += [make(passes, f"discovery.later_{number}") for number in range(5)]
        report = await run(served, *cases)
    assert [result.verdict for result in report.results[:2]] == [Verdict.PASSED, Verdict.FAILED]
    assert {result.verdict for result in report.results[2:]} == {Verdict.NOT_RUN}
    assert "discovery.b" in report.death
    assert report.closing_line == "1 passed, 1 failed, 5 skipped"
    assert report.exit_code == 1


async def test_a_server_that_dies_under_parallel_cases_is_reported_once() -> None:
    async with serving() as served:

        async def dies(ctx: Context) -> None:
            stream = ctx.open(ctx.request(max_tokens=10_000))
            await stream.wait_tokens()
            await served.stop()
            await stream.rest()

        report = await run(served, *(make(dies, f"discovery.c{number}") for number in range(6)), jobs=6)
    assert report.count(Verdict.FAILED) == 1
    assert report.count(Verdict.NOT_RUN) == 5


async def test_a_server_that_is_not_there_cannot_be_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openengine_conformance.connection.CONNECT_TIMEOUT", 0.5)
    with pytest.raises(Unreachable, match="does not answer"):
        await run_cases([make(passes)], Options(target="127.0.0.1:1"))


async def test_an_unknown_model_cannot_be_tested() -> None:
    async with serving() as served:
        with pytest.raises(Unreachable, match="'other'"):
            await run(served, make(passes), model="other")


async def test_known_failures_and_unexpected_passes() -> None:
    known = {"discovery.fails": "the engine's fault", "discovery.passes": ""}
    async with serving() as served:
        cases = [make(fails, "discovery.fails"), make(passes, "discovery.passes")]
        report = await run(served, *cases, known_failures=known)
    assert [result.verdict for result in report.results] == [Verdict.KNOWN_FAILURE, Verdict.UNEXPECTED_PASS]
    assert report.results[0].notes == ["known: the engine's fault"]
    assert report.closing_line == "0 passed, 1 failed, 1 skipped"


async def test_repeats_keep_the_failure() -> None:
    outcomes = iter([True, False, True])

    async def sometimes(ctx: Context) -> None:
        expect(next(outcomes), "this time not")

    async with serving() as served:
        report = await run(served, make(sometimes), repeat=3)
    result = report.results[0]
    assert (result.verdict, result.runs, result.failed_runs) == (Verdict.FAILED, 3, 1)


async def test_exclusive_cases_run_alone() -> None:
    running: set[str] = set()
    together: list[set[str]] = []

    def body(name: str) -> Body:
        async def case(ctx: Context) -> None:
            running.add(name)
            await asyncio.sleep(0.02)
            together.append(set(running))
            running.discard(name)

        return case

    async with serving() as served:
        shared = [make(body(f"s{n}"), f"discovery.s{n}") for n in range(4)]
        alone = [make(body(f"x{n}"), f"discovery.x{n}", exclusive=True) for n in range(3)]
        report = await run(served, *alone, *shared, jobs=4)
    assert report.passed == 7
    assert [result.case.id for result in report.results] == [case.id for case in [*alone, *shared]]
    assert any(len(names) > 1 for names in together)
    assert all(len(names) == 1 for names in together if any(name.startswith("x") for name in names))


async def test_the_token_goes_with_every_call() -> None:
    async with serving(fake_engine("secret")) as served:
        report = await run(served, make(passes), access=Access(token="secret"))
        assert report.passed == 1
        with pytest.raises(Unreachable, match="UNAUTHENTICATED"):
            await run(served, make(passes), access=Access(token="wrong"))


async def test_what_cases_learn_is_found_out_once() -> None:
    asked = []

    async def body(ctx: Context) -> None:
        async def find_out() -> int:
            asked.append(1)
            await asyncio.sleep(0.01)
            return 42

        assert await ctx.session.learn("answer", find_out) == 42

    async with serving() as served:
        await run(served, *(make(body, f"discovery.c{n}") for n in range(4)), jobs=4)
    assert len(asked) == 1


async def test_a_refusal_must_have_the_right_code_and_name_the_field() -> None:
    async def wrong_code(ctx: Context) -> None:
        request = generate_pb2.GenerateRequest()
        await ctx.refused(ctx.rpc.Generate, request, Code.INVALID_ARGUMENT)

    async def wrong_name(ctx: Context) -> None:
        from openengine.v1 import model_pb2

        request = model_pb2.GetModelInfoRequest(model="x")
        await ctx.refused(ctx.rpc.GetModelInfo, request, Code.NOT_FOUND, names="sampling.top_p")

    async with serving() as served:
        report = await run(served, make(wrong_code, "discovery.a"), make(wrong_name, "discovery.b"))
    assert report.results[0].reason == "the request was served, not rejected with INVALID_ARGUMENT"
    assert "names no sampling.top_p" in report.results[1].reason
