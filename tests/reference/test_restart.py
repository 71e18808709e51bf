"""Restarts of the reference server as a process: nothing accepted is lost, and nobody sees a reset."""

from __future__ import annotations

from openengine_adapters.reference.settings import MODEL_ID
from tests.support import restarts
from tests.support.server import Server

ROUNDS = 4
CLIENTS = 16


async def test_a_rolling_restart_under_load_loses_no_accepted_request() -> None:
    """DRAIN-02, DRAIN-05, GEN-05: again and again, since what can go wrong goes wrong in moments."""
    replicas = [Server("reference", ["--max-running", "64"], {}) for _ in range(2)]
    with restarts.stopping(replicas):
        for replica in replicas:
            replica.start()
        for replica in replicas:
            replica.wait_ready()
        tally = await restarts.rolling(replicas, MODEL_ID, rounds=ROUNDS, max_tokens=60, clients=CLIENTS)
    assert not tally.lost, tally
    assert tally.finished > 0 and tally.refused["draining"] > 0
