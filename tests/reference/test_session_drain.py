"""A drain ends what no decode server will fetch any more (PD-04, DRAIN-04)."""

from __future__ import annotations

from openengine.v1 import discovery_pb2, lifecycle_pb2
from openengine_adapters.reference.engine import ReferenceEngine
from openengine_adapters.reference.settings import Settings
from tests.support.wire import serving

PREFILL = Settings(role=discovery_pb2.ENGINE_ROLE_PREFILL, session_ttl=3600)


async def test_a_drain_that_may_abort_ends_open_sessions_at_its_deadline() -> None:
    async with serving(ReferenceEngine(PREFILL)) as wire:
        await wire.generate(max_tokens=1)
        drain = lifecycle_pb2.DrainRequest(
            stop_accepting_new_requests=True, deadline_ms=50, abort_after_deadline=True
        )
        events = [event async for event in wire.stub.Drain(drain)]
        assert events[0].open_kv_sessions == 1
        assert events[-1].state == lifecycle_pb2.DRAIN_STATE_COMPLETE
        assert events[-1].open_kv_sessions == 0


async def test_a_drain_that_may_not_abort_says_what_is_left() -> None:
    async with serving(ReferenceEngine(PREFILL)) as wire:
        await wire.generate(max_tokens=1)
        drain = lifecycle_pb2.DrainRequest(stop_accepting_new_requests=True, deadline_ms=50)
        (*_, last) = [event async for event in wire.stub.Drain(drain)]
        assert "0 requests were still running and 1 sessions open" in last.error.message
        assert last.open_kv_sessions == 1
