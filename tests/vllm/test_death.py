"""Death and hang of each engine process, memory that ends, and starts that fail (ERR-04, ERR-07, HEALTH-04).

Every case is a server process of its own, started before it is needed so that the starts overlap.
"""

from __future__ import annotations

from collections.abc import Iterator
from signal import SIGKILL, SIGSTOP, Signals

import pytest

from tests.support import cpu_env, death
from tests.support.server import Server, serving

HANG_S = 5.0
"""Above the longest wait for a core that others use as well."""

CORE, WORKER = "EngineCore", "Worker"
CASES: list[tuple[Signals | None, str, bool]] = [
    # How it is struck (None: its memory ends), the process, whether the server stays up.
    (SIGKILL, CORE, True),
    (SIGKILL, WORKER, False),
    (SIGSTOP, CORE, False),
    (SIGSTOP, WORKER, True),
    (None, WORKER, False),
]


@pytest.fixture(scope="module")
def servers() -> Iterator[list[Server]]:
    """One server for each case; each starts while the case before it is looked at."""
    flags = [*cpu_env.vllm_flags(cpu_env.TINY_LLAMA), "--hang-timeout", str(HANG_S)]
    made = [
        Server("vllm", [*flags, *(["--stay-up"] if stay_up else [])], cpu_env.vllm_env())
        for _, _, stay_up in CASES
    ]
    made[0].start()
    yield made
    for server in made:
        server.stop(grace=30)


@pytest.mark.parametrize(
    ("number", "case"),
    [*enumerate(CASES)],
    ids=[f"{blow.name if blow else 'memory'}-{victim}" for blow, victim, _ in CASES],
)
async def test_every_open_stream_ends_and_no_process_stays(
    servers: list[Server], number: int, case: tuple[Signals | None, str, bool]
) -> None:
    """And the exit status is 3."""
    blow, victim, stay_up = case
    server = servers[number]
    server.wait_ready()
    if number + 1 < len(servers):
        servers[number + 1].start()
    await death.prove(server, victim, blow or death.out_of_memory(server), stay_up=stay_up)


@pytest.mark.parametrize("victim", ["EngineCore_DP1", "DPCoordinator"])
async def test_two_ranks_die_together(victim: str) -> None:
    """Of one of them, or of what coordinates them: what the others hold is lost as well."""
    with serving("vllm", flags=["--data-parallel-size", "2"]) as server:
        await death.prove(server, victim, SIGKILL, stay_up=False)


async def test_a_hung_rank_is_noticed_beside_a_busy_one() -> None:
    """ERR-07."""
    flags = ["--data-parallel-size", "2", "--hang-timeout", str(HANG_S)]
    with serving("vllm", flags=flags) as server:
        await death.prove_hang_of_rank_1(server, "EngineCore_DP1")


STARTS_THAT_FAIL: dict[str, tuple[list[str], dict[str, str], str]] = {
    # Flags, environment, and what the last line says.
    "memory": ([], {"VLLM_CPU_KVCACHE_SPACE": "1000000"}, "vLLM did not start"),
    "adapter": (
        [*cpu_env.lora_flags("vllm"), "--lora-modules", "given=/nowhere/adapter"],
        {},
        "'given' of --lora-modules",
    ),
}


@pytest.mark.parametrize("what", STARTS_THAT_FAIL)
def test_a_start_that_fails_ends_with_one_sentence_and_no_process(what: str) -> None:
    """More memory than any machine has, and an adapter that is not there; the exit status is 1."""
    flags, env, said = STARTS_THAT_FAIL[what]
    assert said in death.refused_start("vllm", flags, env)
