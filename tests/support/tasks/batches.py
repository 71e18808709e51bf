"""How a batch must behave on every engine, on a served embedder whose engine is in this process."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from openengine.v1 import lifecycle_pb2
from tests.support.tasks import asking
from tests.support.tasks.asking import close, embed_call, patiently, refused
from tests.support.wire import PATIENCE_S, Wire

MANY: list[Any] = [[number % 1000 + 5] * 900 for number in range(300)]
"""More long inputs than any engine here computes before it is told to stop."""


async def bounded_and_in_order(wire: Wire, most: int) -> None:
    """TASK-14: at most so many in the engine at once, in the order asked, each as by itself."""
    texts = [f"{number} cats" for number in range(300)]
    waiting = asyncio.ensure_future(patiently(embed_call(wire, texts)))
    seen = 0
    while not waiting.done():
        seen = max(seen, wire.engine.unfinished())
        await asyncio.sleep(0)
    response = await waiting
    assert 0 < seen <= most
    assert [output.item_id for output in response.outputs] == [f"i{n}" for n in range(300)]
    (alone,) = (await patiently(embed_call(wire, texts[150:151]))).outputs
    assert close(response.outputs[150].dense.values, alone.dense.values, 1e-4)


async def every_early_end_empties_the_engine(wire: Wire) -> None:
    """TASK-08, TASK-09, TASK-15: abort by the shared id, cancel, deadline, and one item that fails."""
    waiting = asyncio.ensure_future(refused(embed_call(wire, MANY, {"request_id": "long"})))
    await _inside(wire)
    await wire.stub.Abort(lifecycle_pb2.AbortRequest(request_id="long"))
    assert (await waiting)[0] is grpc.StatusCode.CANCELLED
    await wire.until_idle()

    call = embed_call(wire, MANY)
    waiting = asyncio.ensure_future(refused(call))
    await _inside(wire)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await wire.until_idle()

    code, _ = await refused(embed_call(wire, MANY, timeout=0.5))
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED
    await wire.until_idle()

    code, details = await refused(embed_call(wire, [*MANY[:40], "cat " * 1200, *MANY[40:]]))
    assert (code, details.partition(":")[0]) == (grpc.StatusCode.INVALID_ARGUMENT, "inputs[40].text")
    await wire.until_idle()
    await patiently(asking.embed_call(wire, ["still there"]))


async def _inside(wire: Wire) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not wire.engine.unfinished():
            await asyncio.sleep(0.01)
