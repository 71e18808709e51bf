"""Death and hang of each process of SGLang, and a scheduler that fails by itself (ERR-04, ERR-07, HEALTH-04)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AbstractContextManager
from signal import SIGKILL, SIGSTOP, Signals

import pytest

from openengine.v1 import errors_pb2, generate_pb2, lifecycle_pb2
from tests.sglang.conftest import sglang_engine
from tests.support import cpu_env, death
from tests.support.server import Server
from tests.support.server import serving as ranks_serving
from tests.support.wire import PATIENCE_S, Answer, serving

HANG_S = 5.0
"""Above the longest wait for a core that others use as well."""

SCHEDULER, DETOKENIZER = "sglang::scheduler", "sglang::detokenizer"
CASES: list[tuple[Signals | None, str, bool, int]] = [
    # How it is struck (None: its memory ends), the process, whether the server stays up, and the tokens that a stream
    # asks for: a scheduler goes on without its detokenizer, so that a hang of that one shows when it has done its work.
    (SIGKILL, SCHEDULER, False, 1000),
    (SIGKILL, DETOKENIZER, True, 1000),
    (SIGSTOP, SCHEDULER, True, 1000),
    (SIGSTOP, DETOKENIZER, False, 100),
    (None, SCHEDULER, False, 1000),
]


@pytest.fixture(scope="module")
def servers() -> Iterator[list[Server]]:
    """One server for each case; each starts while the case before it is looked at."""
    flags = [*cpu_env.sglang_flags(cpu_env.TINY_LLAMA), "--hang-timeout", str(HANG_S)]
    made = [
        Server("sglang", [*flags, *(["--stay-up"] if stay_up else [])], cpu_env.sglang_env())
        for _, _, stay_up, _ in CASES
    ]
    made[0].start()
    yield made
    for server in made:
        server.stop(grace=30)


@pytest.mark.parametrize(
    ("number", "case"),
    [*enumerate(CASES)],
    ids=[f"{blow.name if blow else 'memory'}-{victim}" for blow, victim, _, _ in CASES],
)
async def test_every_open_stream_ends_and_no_process_stays(
    servers: list[Server], number: int, case: tuple[Signals | None, str, bool, int]
) -> None:
    """And the exit status is 3."""
    blow, victim, stay_up, max_tokens = case
    server = servers[number]
    server.wait_ready()
    if number + 1 < len(servers):
        servers[number + 1].start()
    strike = blow or death.out_of_memory(server)
    await death.prove(server, victim, strike, stay_up=stay_up, max_tokens=max_tokens)


def server_of_two(*flags: str) -> AbstractContextManager[Server]:
    """A server of two ranks, on whatever cores there are."""
    return ranks_serving(
        "sglang", flags=["--dp-size", "2", *flags], env={"SGLANG_CPU_OMP_THREADS_BIND": "0|0"}
    )


@pytest.mark.parametrize("victim", ["sglang::scheduler_DP1", "sglang::data_parallel_controller"])
async def test_two_ranks_die_together(victim: str) -> None:
    """Of one of them, or of what gives them their work: what the others hold is lost as well."""
    with server_of_two() as server:
        await death.prove(server, victim, SIGKILL, stay_up=False)


async def test_a_hung_rank_is_noticed_beside_a_busy_one() -> None:
    """ERR-07."""
    with server_of_two("--hang-timeout", str(HANG_S)) as server:
        await death.prove_hang_of_rank_1(server, "sglang::scheduler_DP1")


STARTS_THAT_FAIL: dict[str, tuple[list[str], str]] = {
    # Flags, and what the last line says.
    "memory": (["--mem-fraction-static", "0.0001"], "SGLang did not start"),
    "adapter": (
        [*cpu_env.lora_flags("sglang"), "--lora-paths", "given=/nowhere/adapter"],
        "SGLang did not start",
    ),
}


@pytest.mark.parametrize("what", STARTS_THAT_FAIL)
def test_a_start_that_fails_ends_with_one_sentence_and_no_process(what: str) -> None:
    """Less memory than the KV cache needs, and an adapter that is not there; the exit status is 1."""
    flags, said = STARTS_THAT_FAIL[what]
    assert said in death.refused_start("sglang", flags, {})


@pytest.mark.asyncio(loop_scope="session")
async def test_an_exception_in_the_scheduler_ends_the_streams_and_not_this_process() -> None:
    """GEN-10: an id outside the vocabulary, given to SGLang behind the adapter's back, which would refuse it."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    async with serving(sglang_engine(cpu_env.TINY_LLAMA)) as wire:  # type: ignore[arg-type]  # untyped here
        stopping = generate_pb2.StoppingOptions(max_tokens=1000, ignore_eos=True)
        calls = [await wire.accepted(stopping=stopping) for _ in range(2)]
        poison = GenerateReqInput(input_ids=[10**6], sampling_params={"max_new_tokens": 1}, stream=True)
        poisoned = asyncio.ensure_future(anext(wire.engine.manager.generate_request(poison, None)))
        async with asyncio.timeout(PATIENCE_S):
            answers = [Answer([response async for response in call]) for call in calls]
            health = await wire.stub.Health(lifecycle_pb2.HealthRequest())
        poisoned.cancel()
        await asyncio.gather(poisoned, return_exceptions=True)
        for answer in answers:
            error = answer.responses[-1].error
            assert (error.code, error.retryable) == (errors_pb2.ERROR_CODE_INTERNAL, True)
        assert health.state == lifecycle_pb2.HEALTH_STATE_NOT_READY
        assert "unavailable" in str((await wire.refused())[0]).lower()
