# SPDX-License-Identifier: Apache-2.0
"""The life of a LoRA adapter: load, use, list, unload. What needs a real adapter wants `--lora PATH`."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from openengine.v1 import generate_pb2, lora_pb2
from openengine_conformance import needs
from openengine_conformance.case import case
from openengine_conformance.checks import Code, Refused, expect, expect_equal, expect_in, expect_unique, skip
from openengine_conformance.context import Context
from openengine_conformance.stream import Stream

Adapter = lora_pb2.LoraAdapter
NO_SUCH_FOLDER = "/no/such/folder"


def _adapter(ctx: Context, path: Path | str = "") -> lora_pb2.LoraAdapter:
    number = 7000 + ctx.session.number()
    source = str(Path(path or ctx.options.lora[0]).absolute())
    return Adapter(lora_id=number, lora_name=f"conformance-{number}", source_path=source)


async def _load(ctx: Context, adapter: lora_pb2.LoraAdapter) -> lora_pb2.LoadLoraResponse:
    """Load an adapter, and take it away again at the case's end."""

    async def unload() -> None:
        try:
            await ctx.call(ctx.rpc.UnloadLora, lora_pb2.UnloadLoraRequest(lora_name=adapter.lora_name))
        except Refused as refused:
            if refused.code is not Code.NOT_FOUND:
                raise

    ctx.defer(unload)
    return await ctx.call(ctx.rpc.LoadLora, lora_pb2.LoadLoraRequest(adapter=adapter))


async def load_adapter(ctx: Context) -> lora_pb2.LoraAdapter:
    """Load the adapter of `--lora` for as long as the case runs."""
    adapter = _adapter(ctx)
    await _load(ctx, adapter)
    return adapter


async def _unload(ctx: Context, name: str) -> lora_pb2.UnloadLoraResponse:
    return await ctx.call(ctx.rpc.UnloadLora, lora_pb2.UnloadLoraRequest(lora_name=name))


async def _listed(ctx: Context) -> dict[str, lora_pb2.LoraAdapter]:
    answer = await ctx.call(ctx.rpc.ListLoras, lora_pb2.ListLorasRequest())
    expect_unique([adapter.lora_name for adapter in answer.adapters], "the listed name", "LORA-06")
    return {adapter.lora_name: adapter for adapter in answer.adapters}


async def _generate(ctx: Context, name: str = "", prompt: str | list[int] | None = None) -> Stream:
    response = generate_pb2.ResponseOptions()
    if ctx.offer.generation.output_logprobs.supported:
        response.return_output_logprobs = True
    return await ctx.generate(ctx.steady(prompt, max_tokens=8, lora_name=name, response=response))


def _output(stream: Stream) -> list[tuple[int, float]]:
    return [(record.token_id, round(record.logprob, 2)) for record in stream.first.records]


@contextmanager
def _folder_with(config: str) -> Iterator[Path]:
    """A folder that any server on this machine can read, with an adapter_config.json and nothing else."""
    with tempfile.TemporaryDirectory(prefix="conformance-lora-") as folder:
        Path(folder).chmod(0o755)
        (Path(folder) / "adapter_config.json").write_text(config)
        yield Path(folder)


@contextmanager
def _copy_of(path: Path) -> Iterator[Path]:
    """A copy of an adapter under another path; skips when the adapter is not on this machine."""
    if not path.is_dir():
        skip(f"{path} is not on this machine, so there is no second path to it")
    with tempfile.TemporaryDirectory(prefix="conformance-lora-") as folder:
        yield Path(shutil.copytree(path, Path(folder) / "adapter"))


@case(
    "lora.disabled",
    "Without LoRA the three RPCs are FAILED_PRECONDITION.",
    "LORA-05",
    "MODEL-08",
    needs=[~needs.LORA],
)
async def disabled(ctx: Context) -> None:
    adapter = Adapter(lora_id=1, lora_name="a", source_path="/tmp")
    await ctx.refused(ctx.rpc.LoadLora, lora_pb2.LoadLoraRequest(adapter=adapter), Code.FAILED_PRECONDITION)
    await ctx.refused(ctx.rpc.UnloadLora, lora_pb2.UnloadLoraRequest(lora_name="a"), Code.FAILED_PRECONDITION)
    await ctx.refused(ctx.rpc.ListLoras, lora_pb2.ListLorasRequest(), Code.FAILED_PRECONDITION)


@case(
    "lora.disabled_in_requests",
    "Without LoRA a request's lora_name is rejected by name.",
    "LORA-05",
    "MODEL-07",
    needs=[needs.TAKES_PROMPTS, ~needs.LORA],
)
async def disabled_in_requests(ctx: Context) -> None:
    codes = (Code.INVALID_ARGUMENT, Code.FAILED_PRECONDITION)
    await ctx.refused(ctx.rpc.Generate, ctx.request(lora_name="a"), *codes, names="lora")


@case(
    "lora.bad_arguments",
    "A lora_id of 0 or below, an empty name, a path that is relative or no folder are INVALID_ARGUMENT.",
    "LORA-01",
    needs=[needs.LORA],
)
async def bad_arguments(ctx: Context) -> None:
    await ctx.refused(ctx.rpc.LoadLora, lora_pb2.LoadLoraRequest(), Code.INVALID_ARGUMENT, names="adapter")
    for adapter, name in (
        (Adapter(lora_id=0, lora_name="a", source_path="/tmp"), "lora_id"),
        (Adapter(lora_id=-1, lora_name="a", source_path="/tmp"), "lora_id"),
        (Adapter(lora_id=1, source_path="/tmp"), "lora_name"),
        (Adapter(lora_id=1, lora_name="a"), "source_path"),
        (Adapter(lora_id=1, lora_name="a", source_path="relative/folder"), "source_path"),
        (Adapter(lora_id=1, lora_name="a", source_path="/etc/hostname"), "source_path"),
        (Adapter(lora_id=1, lora_name="a", source_path=NO_SUCH_FOLDER), "source_path"),
    ):
        request = lora_pb2.LoadLoraRequest(adapter=adapter)
        await ctx.refused(ctx.rpc.LoadLora, request, Code.INVALID_ARGUMENT, names=name)


@case(
    "lora.no_adapter_inside",
    "A folder without a valid adapter is INVALID_ARGUMENT, leaves nothing behind and disturbs no request.",
    "LORA-08",
    needs=[needs.LORA],
)
async def no_adapter_inside(ctx: Context) -> None:
    generates = ctx.offer.generates and ctx.offer.role_name == "AGGREGATED"
    running = await ctx.started(ctx.endless()) if generates else None
    before = await _listed(ctx)
    for content in ("", "{}", "no json"):
        with _folder_with(content) as folder:
            request = lora_pb2.LoadLoraRequest(adapter=_adapter(ctx, folder))
            await ctx.refused(ctx.rpc.LoadLora, request, Code.INVALID_ARGUMENT)
    expect_equal(await _listed(ctx), before, "the list of adapters after failed loads")
    if running is not None:
        await running.wait_tokens(len(running.first.records) + 2)


@case("lora.unload_unknown", "Unloading an unknown adapter is NOT_FOUND.", "LORA-04", needs=[needs.LORA])
async def unload_unknown(ctx: Context) -> None:
    request = lora_pb2.UnloadLoraRequest(lora_name="no-such-adapter")
    await ctx.refused(ctx.rpc.UnloadLora, request, Code.NOT_FOUND)


@case(
    "lora.unknown_in_requests",
    "A request that names an adapter which is not loaded is NOT_FOUND.",
    "LORA-07",
    needs=[needs.TAKES_PROMPTS, needs.LORA],
)
async def unknown_in_requests(ctx: Context) -> None:
    await ctx.refused(ctx.rpc.Generate, ctx.request(lora_name="no-such-adapter"), Code.NOT_FOUND)


@case("lora.list", "ListLoras answers with sound entries.", "LORA-06", "MODEL-08", needs=[needs.LORA])
async def listing(ctx: Context) -> None:
    adapters = (await _listed(ctx)).values()
    expect_unique([adapter.lora_id for adapter in adapters], "lora_id")
    for adapter in adapters:
        expect(adapter.lora_id > 0 and adapter.lora_name, f"an entry lacks its id or name: {adapter}")


@case(
    "lora.load",
    "A loaded adapter is echoed and listed; loading it again says already_loaded.",
    "LORA-02",
    "LORA-06",
    needs=[needs.LORA, needs.LORA_PATH],
    exclusive=True,
)
async def load(ctx: Context) -> None:
    before = await _listed(ctx)
    adapter = _adapter(ctx)
    first = await _load(ctx, adapter)
    expect(not first.already_loaded, "the first load says already_loaded")
    expect_equal(first.adapter, adapter, "the adapter in the answer")
    again = await _load(ctx, adapter)
    expect(again.already_loaded, "the second load does not say already_loaded")
    expect_equal(again.adapter, adapter, "the adapter in the second answer")
    expected = {**before, adapter.lora_name: adapter}
    expect_equal(await _listed(ctx), expected, "the list of adapters", "LORA-06")


@case(
    "lora.conflicts",
    "A conflicting id, name or path is ALREADY_EXISTS, and the loaded adapter stays as it was.",
    "LORA-03",
    needs=[needs.LORA, needs.LORA_PATH],
    exclusive=True,
)
async def conflicts(ctx: Context) -> None:
    adapter, other = _adapter(ctx), _adapter(ctx)
    await _load(ctx, adapter)
    with _copy_of(ctx.options.lora[0]) as second:
        for conflicting in (
            Adapter(lora_id=adapter.lora_id, lora_name=other.lora_name, source_path=str(second)),
            Adapter(lora_id=other.lora_id, lora_name=adapter.lora_name, source_path=str(second)),
            Adapter(lora_id=adapter.lora_id, lora_name=adapter.lora_name, source_path=str(second)),
            Adapter(lora_id=other.lora_id, lora_name=adapter.lora_name, source_path=adapter.source_path),
            Adapter(lora_id=adapter.lora_id, lora_name=other.lora_name, source_path=adapter.source_path),
        ):
            request = lora_pb2.LoadLoraRequest(adapter=conflicting)
            await ctx.refused(ctx.rpc.LoadLora, request, Code.ALREADY_EXISTS)
    expect_equal((await _listed(ctx))[adapter.lora_name], adapter, "the loaded adapter")
    await _generate(ctx, adapter.lora_name)


@case(
    "lora.unload",
    "An unloaded adapter is echoed, no longer listed, and no longer found, also by a request that names it.",
    "LORA-04",
    "LORA-06",
    "LORA-07",
    needs=[needs.LORA, needs.LORA_PATH],
    exclusive=True,
)
async def unload(ctx: Context) -> None:
    before = await _listed(ctx)
    adapter = _adapter(ctx)
    await _load(ctx, adapter)
    expect_equal((await _unload(ctx, adapter.lora_name)).adapter, adapter, "the adapter in the answer")
    expect_equal(await _listed(ctx), before, "the list of adapters", "LORA-06")
    if ctx.offer.generates:
        request = ctx.request(lora_name=adapter.lora_name)
        await ctx.refused(ctx.rpc.Generate, request, Code.NOT_FOUND, rule="LORA-07")
    expect_equal(await _listed(ctx), before, "the list after a request that named it", "LORA-06")
    again = lora_pb2.UnloadLoraRequest(lora_name=adapter.lora_name)
    await ctx.refused(ctx.rpc.UnloadLora, again, Code.NOT_FOUND)


@case(
    "lora.changes_output",
    "lora_name changes the output, alone and beside a plain request; without it the output is as before.",
    "LORA-07",
    needs=[needs.GENERATES, needs.LORA, needs.LORA_PATH],
    exclusive=True,
)
async def changes_output(ctx: Context) -> None:
    adapter = _adapter(ctx)
    await _generate(ctx)
    plain = _output(await _generate(ctx))
    await _load(ctx, adapter)
    with_adapter = _output(await _generate(ctx, adapter.lora_name))
    if with_adapter == plain and not ctx.offer.generation.output_logprobs.supported:
        skip("the adapter is too weak to change this greedy output, and log-probabilities are not shown")
    expect(with_adapter != plain, "the output with the adapter is that without")
    together = await asyncio.gather(_generate(ctx, adapter.lora_name), _generate(ctx))
    ids = [[record.token_id for record in stream.first.records] for stream in together]
    expect_equal(ids[0], [token for token, _ in with_adapter], "the adapter's output beside a plain request")
    expect_equal(ids[1], [token for token, _ in plain], "the plain output beside the adapter's")
    await _unload(ctx, adapter.lora_name)
    expect_equal(_output(await _generate(ctx)), plain, "the plain output after unloading")


@case(
    "lora.unload_waits",
    "Unload waits for a running request of the adapter, or is rejected when the request outlasts its deadline.",
    "LORA-09",
    needs=[needs.GENERATES, needs.LORA, needs.LORA_PATH],
    exclusive=True,
)
async def unload_waits(ctx: Context) -> None:
    adapter = _adapter(ctx)
    await _load(ctx, adapter)
    running = await ctx.started(ctx.endless(lora_name=adapter.lora_name))
    try:
        await ctx.call(
            ctx.rpc.UnloadLora, lora_pb2.UnloadLoraRequest(lora_name=adapter.lora_name), timeout=0.5
        )
    except Refused as refused:
        allowed = (Code.FAILED_PRECONDITION, Code.DEADLINE_EXCEEDED)
        expect_in(refused.code, allowed, "the status of unloading an adapter in use")
    else:
        expect(False, "the adapter was unloaded while a request used it")
    await running.wait_tokens(len(running.first.records) + 2)
    unloading = asyncio.ensure_future(_unload(ctx, adapter.lora_name))
    try:
        await ctx.abort(running.id)
        async with asyncio.timeout(10):
            await unloading
    finally:
        unloading.cancel()
    await running.rest()
    expect(adapter.lora_name not in await _listed(ctx), "the adapter is still listed", "LORA-06")


@case(
    "lora.nothing_stale",
    "Another adapter under a freed name never answers from the old weights or the old cached prefix.",
    "LORA-09",
    needs=[needs.GENERATES, needs.LORA, needs.LORA_PATH],
    exclusive=True,
)
async def nothing_stale(ctx: Context) -> None:
    if len(ctx.options.lora) < 2:
        skip("no second adapter: give --lora PATH twice")
    prompt = ctx.unique_prompt(max(ctx.offer.info.kv_block_size, 16) * 2 + 4)
    one = _adapter(ctx)
    two = _adapter(ctx, ctx.options.lora[1])
    two.lora_id, two.lora_name = one.lora_id, one.lora_name
    outputs = []
    for adapter in (one, two, one):
        await _load(ctx, adapter)
        await _generate(ctx, adapter.lora_name, prompt)
        outputs.append(_output(await _generate(ctx, adapter.lora_name, prompt)))
        await _unload(ctx, adapter.lora_name)
    expect(outputs[0] != outputs[1], "the second adapter of a name gives the first one's output")
    expect_equal(outputs[2], outputs[0], "the output of the first adapter, loaded again")


@case(
    "lora.concurrent_changes",
    "Concurrent loads and unloads of one name each get a sound outcome, and the list agrees with the last.",
    "LORA-10",
    needs=[needs.LORA, needs.LORA_PATH],
    exclusive=True,
)
async def concurrent_changes(ctx: Context) -> None:
    adapter = _adapter(ctx)
    loads = await asyncio.gather(*(_load(ctx, adapter) for _ in range(4)))
    fresh = sum(not answer.already_loaded for answer in loads)
    expect_equal(fresh, 1, "the number of concurrent loads that were the first")
    unloads = await asyncio.gather(
        *(_unload(ctx, adapter.lora_name) for _ in range(3)), return_exceptions=True
    )
    done = [answer for answer in unloads if not isinstance(answer, BaseException)]
    refused = [answer.code for answer in unloads if isinstance(answer, Refused)]
    expect_equal(len(done), 1, "the number of concurrent unloads that succeeded")
    expect_equal(refused, [Code.NOT_FOUND] * 2, "the statuses of the others")
    expect(adapter.lora_name not in await _listed(ctx), "the adapter is still listed")
    mixed = [_load(ctx, adapter), _unload(ctx, adapter.lora_name), _load(ctx, adapter)]
    outcomes = await asyncio.gather(*mixed, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, Refused):
            expect_in(
                outcome.code, (Code.NOT_FOUND, Code.ALREADY_EXISTS), "the status of a concurrent change"
            )
        elif isinstance(outcome, BaseException):
            raise outcome
    if adapter.lora_name in await _listed(ctx) and ctx.offer.generates:
        await _generate(ctx, adapter.lora_name)
