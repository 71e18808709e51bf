"""Two data-parallel ranks of the real SGLang: what is told of each."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.sglang.conftest import sglang_engine
from tests.support import cpu_env, ranks
from tests.support.wire import Wire, serving

pytestmark = pytest.mark.asyncio(loop_scope="session")

TWO_RANKS = ("--dp-size", "2")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def wire() -> AsyncIterator[Wire]:
    engine = sglang_engine(cpu_env.TINY_LLAMA, *TWO_RANKS)
    async with serving(engine) as one:  # type: ignore[arg-type]  # untyped here
        yield one


async def test_discovery_knows_both_ranks(wire: Wire) -> None:
    """DISC-09, LOAD-03."""
    assert list(wire.description.parallelism.ranks) == [0, 1]
    answer = await ranks.load(wire)
    ranks.adds_up(answer)
    assert answer.total_kv_blocks == wire.description.total_kv_blocks


async def test_requests_run_on_the_rank_they_name(wire: Wire) -> None:
    """KVOPT-03, LOAD-02."""
    await ranks.requests_run_on_the_rank_they_name(wire)


async def test_events_name_their_rank(wire: Wire) -> None:
    """RTE-01, RTE-02."""
    await ranks.events_name_their_rank(wire)


async def test_a_drain_counts_the_requests_of_all_ranks(wire: Wire) -> None:
    """DRAIN-01, DRAIN-02."""
    await ranks.a_drain_counts_the_requests_of_all_ranks(wire)


async def test_pollers_disturb_nobody(wire: Wire) -> None:
    """LOAD-04."""
    await ranks.pollers_disturb_nobody(wire)
