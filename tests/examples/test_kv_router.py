"""The example is documentation: this keeps it honest."""

from __future__ import annotations

import asyncio
import re
import subprocess
from pathlib import Path

from examples.kv_router import Replica
from openengine_adapters.client import OpenEngineClient
from tests.support.server import executable, serving

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "kv_router.py"
SMALL_CACHE = ("--kv-blocks", "110", "--speed", "0")
"""Room for half of the documents, so that it matters which server gets which."""


def test_routing_by_prefix_beats_round_robin() -> None:
    with serving("reference", flags=SMALL_CACHE) as one, serving("reference", flags=SMALL_CACHE) as two:
        run = subprocess.run(
            [executable("reference", "python"), str(EXAMPLE), one.target, two.target, "--at-once", "1"],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
    blind, informed = (float(share) for share in re.findall(r"([\d.]+)%", run.stdout))
    assert informed > 70
    assert informed > blind + 20


async def test_a_view_comes_back_with_its_server() -> None:
    """KVE-02: whatever ended the subscription, the next one begins with a snapshot."""
    with serving("reference") as server:
        async with await OpenEngineClient.connect(server.target) as client:
            replica = Replica(client)
            following = asyncio.create_task(replica.follow())
            try:
                async with asyncio.timeout(60):
                    await replica.synchronised.wait()
                    await asyncio.to_thread(server.stop)
                    replica.synchronised.clear()
                    server.start()
                    await replica.synchronised.wait()
            finally:
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)
