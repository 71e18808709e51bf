"""A rolling restart of two real servers under load: nothing accepted is lost, and nobody sees a reset."""

from __future__ import annotations

import pytest

from tests.support import cpu_env, restarts
from tests.support.server import Server

CLIENTS, PAUSE_S = 4, 0.5
"""More would take both cores of a small machine from the replica that starts."""


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
async def test_a_rolling_restart_under_load_loses_no_accepted_request(engine: str) -> None:
    """DRAIN-02, DRAIN-05, GEN-05: each replica ends with status 0, and every answer that began is whole."""
    flags = cpu_env.flags(engine, cpu_env.TINY_LLAMA)
    env = cpu_env.env(engine)
    replicas = [Server(engine, flags, env) for _ in range(2)]
    with restarts.stopping(replicas):
        for replica in replicas:
            replica.start()
        for replica in replicas:
            replica.wait_ready()
        model = str(cpu_env.model(cpu_env.TINY_LLAMA))
        tally = await restarts.rolling(
            replicas, model, rounds=1, max_tokens=300, clients=CLIENTS, pause=PAUSE_S
        )
    assert not tally.lost, tally
    assert tally.finished > CLIENTS and tally.refused.total() > 0
