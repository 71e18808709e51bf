"""Route each request to the server that already has most of its prompt in its cache, and see what that is worth.

Start two servers that publish KV events, then give their addresses:

    openengine-vllm --model Qwen/Qwen3-0.6B --kv-events --port 50051 &
    openengine-vllm --model Qwen/Qwen3-0.6B --kv-events --port 50052 &
    python examples/kv_router.py 127.0.0.1:50051 127.0.0.1:50052

`Replica` is all that a router needs to know a server's cache: one subscription that begins with a snapshot, and three
kinds of events. A server with several data-parallel ranks has one cache for each; this example takes them for one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import random
from collections import Counter
from collections.abc import Callable

from openengine.v1 import generate_pb2, inputs_pb2, kv_pb2
from openengine_adapters.client import ClientError, OpenEngineClient

Prompt = list[int]


class Replica:
    """One server, and the blocks in its cache as a tree: from a parent's hash and the next tokens to a child's hash."""

    def __init__(self, client: OpenEngineClient) -> None:
        self.client = client
        self.busy = 0
        self.served = 0
        self.synchronised = asyncio.Event()
        self._block_size = 0
        self._copies: Counter[bytes] = Counter()  # an engine may hold a block several times
        self._children: dict[tuple[bytes, tuple[int, ...]], bytes] = {}
        self._place: dict[bytes, tuple[bytes, tuple[int, ...]]] = {}

    async def follow(self) -> None:
        """Keep up with the cache. After any failure, a restart too, a new snapshot puts everything right again."""
        while True:
            with contextlib.suppress(ClientError):
                async with self.client.kv_events(snapshot=True) as batches:
                    async for batch in batches:
                        self._apply(batch)
                        self.synchronised.set()
            await asyncio.sleep(0.5)

    def cached(self, prompt: Prompt) -> int:
        """How many of the prompt's first tokens are in the cache."""
        parent, found = b"", 0
        while size := self._block_size:
            block = self._children.get((parent, tuple(prompt[found : found + size])))
            if block is None:
                break
            parent, found = block, found + size
        return found

    def _apply(self, batch: kv_pb2.KvEventBatch) -> None:
        for event in batch.events:
            match event.WhichOneof("event"):
                case "block_stored":
                    self._store(event.block_stored)
                case "block_removed":
                    for block in event.block_removed.block_hashes:
                        self._remove(block.value)
                case "all_blocks_cleared":
                    self._copies.clear()
                    self._children.clear()
                    self._place.clear()

    def _store(self, stored: kv_pb2.BlockStored) -> None:
        self._block_size = size = stored.block_size
        parent = stored.parent_block_hash.value
        for at, block in enumerate(stored.block_hashes):
            self._copies[block.value] += 1
            self._place[block.value] = place = (parent, tuple(stored.token_ids[at * size : (at + 1) * size]))
            self._children[place] = parent = block.value

    def _remove(self, block: bytes) -> None:
        self._copies[block] -= 1
        if self._copies[block] <= 0:
            del self._copies[block]
            self._children.pop(self._place.pop(block, (b"", ())), None)


def by_prefix(replicas: list[Replica]) -> Callable[[Prompt], Replica]:
    """The server with the longest cached prefix; among equals the one with least to do, then with least done so far."""
    return lambda prompt: max(
        replicas, key=lambda replica: (replica.cached(prompt), -replica.busy, -replica.served)
    )


def round_robin(replicas: list[Replica]) -> Callable[[Prompt], Replica]:
    """One server after the other."""
    turn = itertools.cycle(replicas)
    return lambda _: next(turn)


def workload(documents: int, questions: int, length: int, seed: int) -> list[Prompt]:
    """Several questions about each of several documents, mixed; token ids stand in for text."""
    chance = random.Random(seed)
    texts = [[chance.randrange(100, 200) for _ in range(length)] for _ in range(documents)]
    prompts = [
        text + [chance.randrange(100, 200) for _ in range(20)] for text in texts for _ in range(questions)
    ]
    chance.shuffle(prompts)
    return prompts


async def hit_rate(route: Callable[[Prompt], Replica], prompts: list[Prompt], at_once: int) -> float:
    """Serve the prompts and return which share of their tokens came from a cache, as the engines count it."""
    slots = asyncio.Semaphore(at_once)
    total = cached = 0

    async def serve(number: int, prompt: Prompt) -> None:
        nonlocal total, cached
        async with slots:
            replica = route(prompt)
            replica.busy += 1
            request = generate_pb2.GenerateRequest(
                request_id=f"question-{number}-{random.getrandbits(64):x}",
                model=replica.client.default_model(),
                token_ids=inputs_pb2.TokenIds(ids=prompt),
                stopping=generate_pb2.StoppingOptions(max_tokens=4),
            )
            async with replica.client.generate(request) as generation:
                usage = (await generation.collect()).usage
            assert usage is not None
            replica.busy -= 1
            replica.served += 1
            total += usage.prompt_tokens
            cached += usage.cached_prompt_tokens

    await asyncio.gather(*(serve(number, prompt) for number, prompt in enumerate(prompts)))
    return cached / total


async def compare(
    targets: list[str], documents: int, questions: int, length: int, at_once: int
) -> tuple[float, float]:
    """The hit rates of round robin and of routing by prefix, on documents of their own each."""
    async with contextlib.AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(await OpenEngineClient.connect(target)) for target in targets
        ]
        replicas = [Replica(client) for client in clients]
        following = [asyncio.create_task(replica.follow()) for replica in replicas]
        try:
            async with asyncio.timeout(30):
                await asyncio.gather(*(replica.synchronised.wait() for replica in replicas))
            first, second = (workload(documents, questions, length, seed) for seed in (1, 2))
            blind = await hit_rate(round_robin(replicas), first, at_once)
            informed = await hit_rate(by_prefix(replicas), second, at_once)
        finally:
            for task in following:
                task.cancel()
            await asyncio.gather(*following, return_exceptions=True)
    return blind, informed


def main() -> None:
    """Compare the two ways to route on the servers of the command line."""
    parser = argparse.ArgumentParser(
        description="What routing by cached prefix is worth, on two or more servers."
    )
    parser.add_argument("targets", nargs="+", metavar="HOST:PORT")
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--questions", type=int, default=10, help="questions about each document")
    parser.add_argument("--length", type=int, default=320, help="tokens of a document")
    parser.add_argument("--at-once", type=int, default=2, help="requests that run at the same time")
    blind, informed = asyncio.run(compare(**vars(parser.parse_args())))
    print(f"round robin      {blind:6.1%} of prompt tokens from the cache")
    print(f"longest prefix   {informed:6.1%} of prompt tokens from the cache")


if __name__ == "__main__":
    main()
