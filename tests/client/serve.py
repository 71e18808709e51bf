"""The scripted server as a process of its own, for tests that kill it: prints its target, then serves."""

from __future__ import annotations

import asyncio

from openengine.v1 import kv_pb2, lifecycle_pb2, observability_pb2
from tests.client.fake import HANG, FakeServer, serving
from tests.client.responses import batch, finished, stored, tokens

# A prompt of one word for each behaviour.
_GENERATE = {
    "short": [tokens("hello"), finished()],
    "unicode": [tokens("é🙂"), finished()],
    "hang": [tokens("hello"), HANG],
    "endless": [step for _ in range(20_000) for step in (tokens("word " * 50), 0.001)],
}


async def main() -> None:
    fake = FakeServer()
    fake.answers |= {
        "Generate": lambda request: _GENERATE[request.prompt.strip()],
        "GetLoad": observability_pb2.LoadInfo(running_requests=3),
        "Drain": [lifecycle_pb2.DrainResponse(state=lifecycle_pb2.DRAIN_STATE_STARTED), HANG],
        "SubscribeKvEvents": [
            kv_pb2.SubscribeKvEventsResponse(batch=batch(9, stored(1, 2, 3, 4, 5))),
            HANG,
        ],
    }
    async with serving(fake):
        print(fake.target, flush=True)
        await fake.cancelled.wait()
        print("cancelled", flush=True)
        await asyncio.sleep(60)


if __name__ == "__main__":
    asyncio.run(main())
