"""The life of LoRA adapters, through the wire, over a host whose every step the test decides."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from openengine.v1 import lora_pb2
from openengine_adapters.core.errors import EngineDied, invalid
from openengine_adapters.engine import Lora
from tests.core.conftest import SOON_S, Served, serve, until
from tests.core.fake_engine import FakeEngine, length_finish, token

Code = grpc.StatusCode


class LoraEngine(FakeEngine):
    """Keeps adapters by id; changes wait for `go`, and `failure` fails the next one."""

    def __init__(self, static: tuple[Lora, ...] = ()) -> None:
        super().__init__(lora=True)
        self.static = static
        self.held: dict[int, Lora] = {lora.id: lora for lora in static}
        self.failure: Exception | None = None
        self.log: list[str] = []
        self.go = asyncio.Event()
        self.go.set()
        self.unused = asyncio.Event()
        self.unused.set()

    def static_loras(self) -> tuple[Lora, ...]:
        return self.static

    async def load_lora(self, lora: Lora) -> None:
        await self._change(f"load {lora.name}")
        assert lora.id not in self.held
        self.held[lora.id] = lora

    async def lora_unused(self, lora: Lora) -> None:
        await self.unused.wait()

    async def unload_lora(self, lora: Lora) -> None:
        await self._change(f"unload {lora.name}")
        assert self.held.pop(lora.id) == lora
        assert not [call for call in self.calls if call.lora == lora and call.id in self.running]

    async def _change(self, what: str) -> None:
        self.log.append(what)
        await self.go.wait()
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure


class Adapters:
    """The three RPCs over one engine, and folders for adapters."""

    def __init__(self, served: Served, folder: Path) -> None:
        self.served = served
        self.engine: Any = served.engine
        self.folder = folder

    def adapter(self, number: int, name: str = "", path: str = "") -> lora_pb2.LoraAdapter:
        folder = self.folder / (path or f"p{number}")
        folder.mkdir(exist_ok=True)
        return lora_pb2.LoraAdapter(lora_id=number, lora_name=name or f"n{number}", source_path=str(folder))

    def load(self, adapter: lora_pb2.LoraAdapter, **options: Any) -> Any:
        return self.served.stub.LoadLora(lora_pb2.LoadLoraRequest(adapter=adapter), **options)

    def unload(self, name: str, **options: Any) -> Any:
        return self.served.stub.UnloadLora(lora_pb2.UnloadLoraRequest(lora_name=name), **options)

    async def listed(self) -> list[lora_pb2.LoraAdapter]:
        """What ListLoras says; once all is quiet the engine holds exactly that."""
        answer = await self.served.stub.ListLoras(lora_pb2.ListLorasRequest())
        return list(answer.adapters)

    async def agreed(self) -> list[str]:
        """The names that the table and the engine both have."""
        names = [adapter.lora_name for adapter in await self.listed()]
        assert sorted(names) == sorted(lora.name for lora in self.engine.held.values())
        return names

    async def using(self, name: str, request_id: str = "user") -> Any:
        return await self.served.accepted(self.served.request(request_id, lora_name=name))


async def within(awaitable: Any) -> Any:
    async with asyncio.timeout(SOON_S):
        return await awaitable


async def status(call: Any) -> Code:
    """How a unary call ended."""
    try:
        await within(call)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return Code.OK


@pytest.fixture
async def adapters(tmp_path: Path) -> AsyncIterator[Adapters]:
    async with serve(LoraEngine()) as served:
        yield Adapters(served, tmp_path)


async def test_arguments_are_checked_before_the_engine_sees_them(adapters: Adapters, tmp_path: Path) -> None:
    """LORA-01."""
    (tmp_path / "file").touch()
    good = adapters.adapter(1)
    for field, wrong in (
        ("lora_id", {"lora_id": 0}),
        ("lora_id", {"lora_id": -1}),
        ("lora_name", {"lora_name": ""}),
        ("source_path", {"source_path": ""}),
        ("source_path", {"source_path": "p1"}),
        ("source_path", {"source_path": str(tmp_path / "file")}),
        ("source_path", {"source_path": str(tmp_path / "missing")}),
        ("source_path", {"source_path": "/" + "x" * 5000}),
        ("source_path", {"source_path": f"{tmp_path}\0"}),
    ):
        adapter = lora_pb2.LoraAdapter(
            lora_id=good.lora_id, lora_name=good.lora_name, source_path=good.source_path
        )
        for name, value in wrong.items():
            setattr(adapter, name, value)
        code, message = await adapters.served.refused(adapters.load(adapter))
        assert code is Code.INVALID_ARGUMENT and f"adapter.{field}" in message
    assert await status(adapters.served.stub.LoadLora(lora_pb2.LoadLoraRequest())) is Code.INVALID_ARGUMENT
    assert await status(adapters.unload("")) is Code.INVALID_ARGUMENT
    assert adapters.engine.log == []


async def test_the_same_adapter_twice_is_one_load(adapters: Adapters) -> None:
    """LORA-02, LORA-06; a trailing slash names the same directory."""
    adapter = adapters.adapter(2**63 - 1)
    first = await within(adapters.load(adapter))
    assert (first.adapter, first.already_loaded) == (adapter, False)
    for path in (adapter.source_path, adapter.source_path + "/"):
        again = await within(
            adapters.load(
                lora_pb2.LoraAdapter(lora_id=adapter.lora_id, lora_name=adapter.lora_name, source_path=path)
            )
        )
        assert (again.adapter, again.already_loaded) == (adapter, True)
    assert await adapters.listed() == [adapter]
    assert adapters.engine.log == [f"load {adapter.lora_name}"]


async def test_conflicts_leave_the_loaded_one_as_it_was(adapters: Adapters) -> None:
    """LORA-03."""
    adapter = adapters.adapter(1, "a", "one")
    await within(adapters.load(adapter))
    for conflicting in (
        adapters.adapter(1, "b", "two"),
        adapters.adapter(2, "a", "two"),
        adapters.adapter(2, "b", "one"),
        adapters.adapter(1, "a", "two"),
        adapters.adapter(1, "b", "one"),
        adapters.adapter(2, "a", "one"),
    ):
        assert await status(adapters.load(conflicting)) is Code.ALREADY_EXISTS
    assert await adapters.listed() == [adapter]
    assert adapters.engine.log == ["load a"]


async def test_unknown_adapters_are_not_found(adapters: Adapters) -> None:
    """LORA-04, LORA-07."""
    assert await status(adapters.unload("n1")) is Code.NOT_FOUND
    code, message = await adapters.served.refused(
        adapters.served.stub.Generate(adapters.served.request(lora_name="n1"))
    )
    assert code is Code.NOT_FOUND and "lora_name" in message


async def test_without_lora_all_three_say_so() -> None:
    """LORA-05."""
    async with serve(FakeEngine()) as served:
        adapter = lora_pb2.LoraAdapter(lora_id=1, lora_name="a", source_path="/")
        for call in (
            served.stub.LoadLora(lora_pb2.LoadLoraRequest(adapter=adapter)),
            served.stub.UnloadLora(lora_pb2.UnloadLoraRequest(lora_name="a")),
            served.stub.ListLoras(lora_pb2.ListLorasRequest()),
        ):
            assert await status(call) is Code.FAILED_PRECONDITION


async def test_adapters_given_at_start_are_like_any_other() -> None:
    """LORA-06."""
    async with serve(LoraEngine((Lora(3, "c", "/c"), Lora(1, "a", "/a")))) as served:
        adapters = Adapters(served, Path("/"))
        assert [adapter.lora_name for adapter in await adapters.listed()] == ["a", "c"]
        served.engine.script = lambda call: [token(97), length_finish()]
        await served.collect(served.request(lora_name="c"))
        assert served.engine.calls[-1].lora == Lora(3, "c", "/c")
        await within(adapters.unload("c"))
        assert await adapters.agreed() == ["a"]


async def test_a_failed_load_leaves_nothing_behind(adapters: Adapters) -> None:
    """LORA-08: its id, name and path are free at once, and nobody sees it meanwhile."""
    adapters.engine.failure = invalid("adapter.source_path", "holds no adapter")
    adapters.engine.go.clear()
    loading = asyncio.ensure_future(adapters.load(adapters.adapter(1)))
    await until(lambda: bool(adapters.engine.log))
    assert await adapters.listed() == []
    refused = adapters.served.stub.Generate(adapters.served.request(lora_name="n1"))
    assert (await adapters.served.refused(refused))[0] is Code.NOT_FOUND
    adapters.engine.go.set()
    assert await status(loading) is Code.INVALID_ARGUMENT
    assert await adapters.agreed() == []
    await within(adapters.load(adapters.adapter(1)))
    assert await adapters.agreed() == ["n1"]


@pytest.mark.parametrize("deadline", [None, 30.0])
async def test_unload_waits_for_the_users_and_lets_no_new_one_in(
    adapters: Adapters, deadline: float | None
) -> None:
    """LORA-09."""
    await within(adapters.load(adapters.adapter(1)))
    users = [await adapters.using("n1", f"user-{number}") for number in range(3)]
    unloading = asyncio.ensure_future(adapters.unload("n1", timeout=deadline))
    late = adapters.served.request("late", lora_name="n1")
    entry = adapters.served.servicer._loras._entries["n1"]
    await until(lambda: not entry.settled.is_set())
    assert (await adapters.served.refused(adapters.served.stub.Generate(late)))[0] is Code.NOT_FOUND
    assert await adapters.agreed() == ["n1"]
    for user in users:
        assert not unloading.done()
        user.cancel()
    assert (await within(unloading)).adapter == adapters.adapter(1)
    assert await adapters.agreed() == []


@pytest.mark.parametrize("deadline", [0.5, 3.0])
async def test_unload_is_refused_before_its_deadline_and_the_adapter_stays(
    adapters: Adapters, deadline: float
) -> None:
    """LORA-09: the answer still reaches the caller, and says how many are in the way."""
    await within(adapters.load(adapters.adapter(1)))
    user = await adapters.using("n1")
    code, message = await adapters.served.refused(adapters.unload("n1", timeout=deadline))
    assert (code, "1 requests" in message) == (Code.FAILED_PRECONDITION, True)
    another = await adapters.using("n1", "another")
    for call in (user, another):
        call.cancel()
    await within(adapters.unload("n1"))
    assert await adapters.agreed() == []


async def test_unload_waits_for_what_the_engine_still_does_with_the_adapter(adapters: Adapters) -> None:
    """LORA-09: a KV session whose call is over is none of the core's users."""
    await within(adapters.load(adapters.adapter(1)))
    adapters.engine.unused.clear()
    code, message = await adapters.served.refused(adapters.unload("n1", timeout=0.1))
    assert (code, "an open KV session" in message) == (Code.FAILED_PRECONDITION, True)
    assert await adapters.agreed() == ["n1"]
    unloading = asyncio.ensure_future(adapters.unload("n1"))
    await until(lambda: not adapters.served.servicer._loras._entries["n1"].settled.is_set())
    assert adapters.engine.log == ["load n1"]
    adapters.engine.unused.set()
    await within(unloading)
    assert await adapters.agreed() == []


async def test_an_unload_that_waits_holds_up_no_other_adapter(adapters: Adapters) -> None:
    """LORA-10: changes are serial for one adapter, not for all."""
    await within(adapters.load(adapters.adapter(1)))
    user = await adapters.using("n1")
    unloading = asyncio.ensure_future(adapters.unload("n1"))
    await until(lambda: not adapters.served.servicer._loras._entries["n1"].settled.is_set())
    await within(adapters.load(adapters.adapter(2)))
    await within(adapters.unload("n2"))
    again = asyncio.ensure_future(adapters.load(adapters.adapter(1)))
    assert not unloading.done()
    user.cancel()
    await within(unloading)
    assert not (await within(again)).already_loaded
    assert await adapters.agreed() == ["n1"]
    assert adapters.engine.log == ["load n1", "load n2", "unload n2", "unload n1", "load n1"]


async def test_concurrent_changes_of_one_name_each_get_a_sound_outcome(adapters: Adapters) -> None:
    """LORA-10."""
    adapter = adapters.adapter(1)
    answers = await within(asyncio.gather(*(adapters.load(adapter) for _ in range(8))))
    assert sorted(answer.already_loaded for answer in answers) == [False] + [True] * 7
    codes = await asyncio.gather(*(status(adapters.unload("n1")) for _ in range(8)))
    assert sorted(code.name for code in codes) == ["NOT_FOUND"] * 7 + ["OK"]
    rivals = [adapters.adapter(number, "n1", f"p{number}") for number in range(1, 9)]
    codes = await asyncio.gather(*(status(adapters.load(rival)) for rival in rivals))
    assert sorted(code.name for code in codes) == ["ALREADY_EXISTS"] * 7 + ["OK"]
    assert await adapters.agreed() == ["n1"]


async def test_a_rival_that_waits_for_a_failing_load_takes_its_place(adapters: Adapters) -> None:
    """LORA-10: the outcome is what counts, not the attempt."""
    adapters.engine.failure = invalid("adapter.source_path", "holds no adapter")
    adapters.engine.go.clear()
    first = asyncio.ensure_future(adapters.load(adapters.adapter(1, "n", "bad")))
    await until(lambda: bool(adapters.engine.log))
    second = asyncio.ensure_future(adapters.load(adapters.adapter(2, "n", "good")))
    adapters.engine.go.set()
    assert (await status(first), await status(second)) == (Code.INVALID_ARGUMENT, Code.OK)
    assert await adapters.listed() == [adapters.adapter(2, "n", "good")]


@pytest.mark.parametrize("leave", ["cancel", "deadline"])
async def test_a_caller_who_leaves_midway_does_not_part_the_table_from_the_engine(
    adapters: Adapters, leave: str
) -> None:
    """LORA-10: what the engine was asked to do is waited for, load and unload alike."""
    load = functools.partial(adapters.load, adapters.adapter(1))
    unload = functools.partial(adapters.unload, "n1")
    changes: tuple[tuple[int, Any, list[str], Any], ...] = (
        (1, load, ["n1"], Code.OK),
        (2, unload, [], Code.NOT_FOUND),
    )
    for number, change, agreed, repeated in changes:
        adapters.engine.go.clear()
        call = asyncio.ensure_future(change(timeout=0.3 if leave == "deadline" else None))
        await until(functools.partial(lambda number: len(adapters.engine.log) == number, number))
        if leave == "cancel":
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
        else:
            assert await status(call) is Code.DEADLINE_EXCEEDED
        again = asyncio.ensure_future(change())
        adapters.engine.go.set()
        assert await status(again) is repeated
        assert await adapters.agreed() == agreed


async def test_an_engine_that_dies_in_a_change_is_unavailable(adapters: Adapters) -> None:
    """ERR-04."""
    adapters.engine.failure = EngineDied()
    assert await status(adapters.load(adapters.adapter(1))) is Code.UNAVAILABLE
    assert await adapters.listed() == []


async def test_an_unload_that_fails_leaves_the_adapter_to_be_unloaded_again(adapters: Adapters) -> None:
    """LORA-09: nothing is forgotten while the engine still holds it."""
    await within(adapters.load(adapters.adapter(1)))
    adapters.engine.failure = RuntimeError("does not answer")
    assert await status(adapters.unload("n1")) is Code.INTERNAL
    assert await adapters.agreed() == ["n1"]
    await within(adapters.unload("n1"))
    assert await adapters.agreed() == []
