"""LoRA on the real engine: PEFT's numbers, adapters that do not fit, names that are used again.

SGLang keeps its configuration once for a process, so that of several engines the last one's counts: tests that start
another engine come first or last here.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from openengine.v1 import generate_pb2, lora_pb2, model_pb2
from openengine_adapters.engine import StartupError
from tests.sglang.conftest import sglang_engine
from tests.support import cpu_env
from tests.support.cpu_env import LORA_ATTENTION, LORA_EVERYWHERE
from tests.support.lora import (
    LONG,
    MISFITS,
    PROMPTS,
    Greedy,
    adapter,
    greedy,
    listed,
    load,
    narrow,
    pickled,
    reference,
    same,
    settings,
    unload,
    weights,
)
from tests.support.wire import PATIENCE_S, Answer, Wire, serving

pytestmark = pytest.mark.asyncio(loop_scope="session")

STATIC = "given-at-start"
Code = grpc.StatusCode


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def wire() -> AsyncIterator[Wire]:
    """The tiny Llama in float32, so that its numbers are PEFT's, with one adapter given at the start."""
    flags = (
        *("--dtype", "float32"),
        *cpu_env.lora_flags("sglang"),
        *("--lora-paths", f"{STATIC}={cpu_env.model(LORA_ATTENTION)}"),
    )
    async with serving(sglang_engine(cpu_env.TINY_LLAMA, *flags)) as one:  # type: ignore[arg-type]  # untyped here
        yield one


async def peft() -> dict[str, list[Greedy]]:
    return await asyncio.to_thread(reference, "sglang")


async def names(wire: Wire) -> list[str]:
    """The listed adapters; SGLang itself holds as many, and remembers no other."""
    found = await listed(wire)
    manager = wire.engine.manager
    assert set(manager.lora_registry.get_all_adapters()) == set(manager.lora_ref_cache) == set(found)
    assert not manager.pending_lora_unloads
    return found


async def test_without_lora_it_is_advertised_as_missing_and_a_name_is_refused(tiny: Wire) -> None:
    """MODEL-08, LORA-05."""
    model = await tiny.stub.GetModelInfo(model_pb2.GetModelInfoRequest(model="tiny"))
    assert model.HasField("supports_lora") and not model.supports_lora
    code, message = await tiny.refused(lora_name="any")
    assert code is Code.INVALID_ARGUMENT and "lora_name" in message


async def test_lora_is_advertised_and_the_adapter_given_at_start_is_listed(wire: Wire) -> None:
    """MODEL-08, LORA-06."""
    model = await wire.stub.GetModelInfo(model_pb2.GetModelInfoRequest(model=wire.description.model_id))
    assert model.supports_lora
    answer = await wire.stub.ListLoras(lora_pb2.ListLorasRequest())
    assert list(answer.adapters) == [adapter(1, STATIC, cpu_env.model(LORA_ATTENTION))]
    assert await names(wire) == [STATIC]


async def test_every_output_is_pefts_alone_and_in_one_batch(wire: Wire) -> None:
    """LORA-07; ids are the caller's, whatever SGLang's own are."""
    big = adapter(2**62, "everywhere", cpu_env.model(LORA_EVERYWHERE))
    assert (await load(wire, big)).adapter == big
    served = {"": "", LORA_ATTENTION: STATIC, LORA_EVERYWHERE: "everywhere"}
    expected = await peft()
    for which, name in served.items():
        for prompt, best in zip(PROMPTS, expected[which], strict=True):
            same(await greedy(wire, name, prompt), best)
    pairs = [(which, number) for which in served for number in range(len(PROMPTS))] * 3
    batch = await asyncio.gather(*(greedy(wire, served[which], PROMPTS[number]) for which, number in pairs))
    for (which, number), answer in zip(pairs, batch, strict=True):
        same(answer, expected[which][number])
    await unload(wire, "everywhere")
    assert await names(wire) == [STATIC]


def without(*modules: str) -> Callable[[Path], None]:
    """Leave the weights of some modules out."""

    def spoil(folder: Path) -> None:
        weights(folder, lambda all_: {n: w for n, w in all_.items() if not any(m in n for m in modules)})

    return spoil


def saved_head(folder: Path) -> None:
    weights(folder, lambda all_: {**all_, "base_model.model.lm_head.weight": next(iter(all_.values()))})


def bias(folder: Path) -> None:
    """SGLang would take it for a matrix, and fail in the middle of a step."""
    weights(
        folder,
        lambda all_: {
            **all_,
            **{n.replace("weight", "bias"): w[:, 0] for n, w in all_.items() if "_B." in n},
        },
    )


OWN_MISFITS: dict[str, Callable[[Path], object]] = {
    "another scaling": lambda folder: settings(folder, use_rslora=True),
    "ranks of their own": lambda folder: settings(folder, rank_pattern={"q_proj": 4}),
    "alpha is no number": lambda folder: settings(folder, lora_alpha="8"),
    "changes the base model": lambda folder: settings(folder, init_lora_weights="pissa"),
    "targets by a pattern": lambda folder: settings(folder, target_modules=".*proj"),
    "no targets": lambda folder: settings(folder, target_modules=None),
    "more tokens": lambda folder: (folder / "added_tokens.json").write_text('{"<new>": 99999}'),
    "queries alone": without("v_proj"),
    "values alone": without("q_proj"),
    "a saved head": saved_head,
    "a bias": bias,
}
"""What SGLang would serve wrong, or die of."""


async def test_no_adapter_that_does_not_fit_reaches_the_engine(wire: Wire, tmp_path: Path) -> None:
    """LORA-08, GEN-10: each is refused with a reason, leaves nothing, and disturbs no running request."""
    running = await wire.accepted(lora_name=STATIC, stopping=LONG)
    for number, (what, spoil) in enumerate({**MISFITS, **OWN_MISFITS}.items(), start=2):
        folder = shutil.copytree(cpu_env.model(LORA_ATTENTION), tmp_path / str(number))
        spoil(folder)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            pytest.fail(f"{what}: {await load(wire, adapter(number, what, folder))}")
        assert caught.value.code() is Code.INVALID_ARGUMENT, what
        assert "source_path" in (caught.value.details() or ""), what
        assert await names(wire) == [STATIC], what
    responses = [response async for response in running]
    assert Answer(responses).usage.completion_tokens == LONG.max_tokens
    same(await greedy(wire, STATIC, PROMPTS[0]), (await peft())[LORA_ATTENTION][0])


async def test_a_pickled_adapter_is_measured_too(wire: Wire, tmp_path: Path) -> None:
    """LORA-08: older versions of PEFT wrote no safetensors."""
    folder = shutil.copytree(cpu_env.model(LORA_EVERYWHERE), tmp_path / "spoilt")
    pickled(folder, lambda weight: weight[:, :4])
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await load(wire, adapter(2, "pickled", folder))
    assert caught.value.code() is Code.INVALID_ARGUMENT
    folder = shutil.copytree(cpu_env.model(LORA_EVERYWHERE), tmp_path / "pickled")
    pickled(folder)
    await load(wire, adapter(2, "pickled", folder))
    same(await greedy(wire, "pickled", PROMPTS[0]), (await peft())[LORA_EVERYWHERE][0])
    await unload(wire, "pickled")


async def test_no_more_adapters_than_sglang_keeps(wire: Wire, tmp_path: Path) -> None:
    """LORA-08: SGLang would drop the one least used, and read it again for the next request."""
    folders = [shutil.copytree(cpu_env.model(LORA_EVERYWHERE), tmp_path / str(number)) for number in range(3)]
    await load(wire, adapter(10, "n10", folders[0]))
    await load(wire, adapter(11, "n11", folders[1]))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await load(wire, adapter(12, "n12", folders[2]))
    assert caught.value.code() is Code.RESOURCE_EXHAUSTED
    assert "--max-loaded-loras" in (caught.value.details() or "")
    for folder in folders:
        shutil.rmtree(folder)  # what is loaded needs its files no more
    expected = await peft()
    by_name = {"n10": LORA_EVERYWHERE, "n11": LORA_EVERYWHERE, STATIC: LORA_ATTENTION, "": ""}
    # One more than a batch takes, so that they also change places.
    answers = await asyncio.gather(*(greedy(wire, name, PROMPTS[0]) for name in [*by_name] * 2))
    for name, answer in zip([*by_name] * 2, answers, strict=True):
        same(answer, expected[by_name[name]][0])
    for name in ("n10", "n11"):
        await unload(wire, name)
    assert await names(wire) == [STATIC]


async def test_what_is_unloaded_sglang_loads_for_no_request(wire: Wire) -> None:
    """LORA-07, LORA-09: not by our way in, and it remembers nothing that it could load."""
    await load(wire, adapter(15, "gone", cpu_env.model(LORA_EVERYWHERE)))
    await greedy(wire, "gone", PROMPTS[0])
    await unload(wire, "gone")
    code, _ = await wire.refused(PROMPTS[0], lora_name="gone")
    assert code is Code.NOT_FOUND
    assert await names(wire) == [STATIC]


async def test_a_name_used_again_never_answers_from_what_was_there_before(wire: Wire, tmp_path: Path) -> None:
    """LORA-09: other weights under the same id and name, in another place and in the very same place."""
    expected = await peft()
    place = tmp_path / "place"
    for which in (LORA_ATTENTION, LORA_EVERYWHERE, LORA_ATTENTION):
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(cpu_env.model(which), place)
        await load(wire, adapter(20, "again", place))
        first, second = [await greedy(wire, "again", PROMPTS[0]) for _ in range(2)]
        same(first, expected[which][0])
        same(second, expected[which][0])
        assert first.usage.cached_prompt_tokens == 0 < second.usage.cached_prompt_tokens
        await unload(wire, "again")
        code, _ = await wire.refused(PROMPTS[0], lora_name="again")
        assert code is Code.NOT_FOUND
    await load(wire, adapter(20, "again", cpu_env.model(LORA_EVERYWHERE)))
    same(await greedy(wire, "again", PROMPTS[0]), expected[LORA_EVERYWHERE][0])
    await unload(wire, "again")
    same(await greedy(wire, "", PROMPTS[0]), expected[""][0])


async def test_unload_waits_for_a_running_request(wire: Wire) -> None:
    """LORA-09."""
    await load(wire, adapter(30, "used", cpu_env.model(LORA_EVERYWHERE)))
    running = await wire.accepted(lora_name="used", stopping=LONG)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await wire.stub.UnloadLora(lora_pb2.UnloadLoraRequest(lora_name="used"), timeout=0.5)
    assert caught.value.code() is Code.FAILED_PRECONDITION
    unloading = asyncio.ensure_future(unload(wire, "used"))
    async with asyncio.timeout(PATIENCE_S):
        answer = Answer([response async for response in running])
        assert answer.usage.completion_tokens == LONG.max_tokens
        await unloading
    assert await names(wire) == [STATIC]


async def test_requests_that_were_given_up_do_not_hold_an_adapter(wire: Wire) -> None:
    """LORA-09: SGLang counts users by itself, and unloads only when its count is zero."""
    await load(wire, adapter(35, "left", cpu_env.model(LORA_EVERYWHERE)))
    sampling = generate_pb2.SamplingParams(temperature=1.0, num_sequences=2)
    calls = [await wire.accepted(lora_name="left", stopping=LONG, sampling=sampling) for _ in range(4)]
    calls += [await wire.accepted(lora_name="left", stopping=LONG) for _ in range(4)]
    for call in calls[::2]:
        call.cancel()
    unloading = asyncio.ensure_future(unload(wire, "left"))
    for call in calls[1::2]:
        call.cancel()
    async with asyncio.timeout(PATIENCE_S):
        await unloading
    assert await names(wire) == [STATIC]
    await wire.until_idle()
    same(await greedy(wire, STATIC, PROMPTS[1]), (await peft())[LORA_ATTENTION][1])


async def test_loads_and_unloads_at_once_keep_sglang_and_the_list_alike(wire: Wire) -> None:
    """LORA-10, with callers that leave in between, while others generate."""
    one = adapter(40, "busy", cpu_env.model(LORA_EVERYWHERE))

    async def change(number: int) -> None:
        call: Any = (
            wire.stub.LoadLora(lora_pb2.LoadLoraRequest(adapter=one))
            if number % 2
            else wire.stub.UnloadLora(lora_pb2.UnloadLoraRequest(lora_name="busy"))
        )
        if number % 5 == 0:
            await asyncio.wait({asyncio.ensure_future(asyncio.wait_for(_quiet(call), number * 0.002))})
        else:
            await _quiet(call)

    running = await wire.accepted(lora_name=STATIC, stopping=LONG)
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*(change(number) for number in range(40)))
        await load(wire, one)
        assert await names(wire) == [STATIC, "busy"]
        await unload(wire, "busy")
        assert await names(wire) == [STATIC]
        assert Answer([response async for response in running]).usage.completion_tokens == LONG.max_tokens


@pytest.mark.parametrize("spoil", ["narrow", "two ranks"])
async def test_what_cannot_be_served_is_said_at_the_start(spoil: str, tmp_path: Path) -> None:
    """LORA-06, LORA-08: SGLang would die of the one later on, and of the other with the first LoadLora."""
    folder = shutil.copytree(cpu_env.model(LORA_ATTENTION), tmp_path / "adapter")
    flags = [*cpu_env.lora_flags("sglang"), "--lora-paths", f"one={folder}"]
    if spoil == "narrow":
        narrow(folder)
    else:
        flags += ["--dp-size", "2"]
    engine: Any = sglang_engine(cpu_env.TINY_LLAMA, *flags)
    try:
        with pytest.raises(StartupError, match="'one' of --lora-paths" if spoil == "narrow" else "--dp-size"):
            await engine.start()
    finally:
        await engine.stop()


async def _quiet(call: Any) -> None:
    with contextlib.suppress(grpc.aio.AioRpcError):
        await call
        return
    assert await call.code() is Code.NOT_FOUND
