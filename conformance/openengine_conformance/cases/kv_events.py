# SPDX-License-Identifier: Apache-2.0
"""SubscribeKvEvents: the prefix cache as a stream, with snapshot and replay."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable

from openengine.v1 import errors_pb2, kv_pb2
from openengine_conformance import needs, probes
from openengine_conformance.case import case
from openengine_conformance.cases.lora import load_adapter
from openengine_conformance.checks import Code, Refused, expect, expect_equal, expect_in, fail, skip
from openengine_conformance.context import Context
from openengine_conformance.subscription import Subscription

Request = kv_pb2.SubscribeKvEventsRequest
Batch = kv_pb2.KvEventBatch
Events = Subscription[kv_pb2.SubscribeKvEventsResponse]
QUIET = 0.5
PATIENCE = 10.0
ENCODINGS = ("int64", "string", "bytes", "engine_specific", "decimal_int64")


async def _subscribe(
    ctx: Context, *, snapshot: bool = False, start: int = 0, ranks: Iterable[int] = ()
) -> Events:
    request = Request(data_parallel_ranks=ranks, include_snapshot=snapshot, start_sequence_number=start)
    subscription = ctx.subscribe(ctx.rpc.SubscribeKvEvents, request)
    try:
        await subscription.accepted(rule="KVE-07")
    except Refused as refused:
        if refused.code is Code.UNIMPLEMENTED:
            skip(f"KV events are not enabled: {refused.details}")
        raise
    return subscription


async def _collect(subscription: Events, *, at_least: int = 0) -> list[kv_pb2.KvEventBatch]:
    responses = await subscription.collect(QUIET, at_least, PATIENCE)
    for response in responses:
        if response.HasField("error"):
            fail(f"the subscription ended with an EngineError: {response.error.message}", "KVE-02")
    return [response.batch for response in responses]


def _prompt(ctx: Context) -> str | list[int]:
    """A prompt of a little over three blocks."""
    return ctx.unique_prompt(max(ctx.offer.info.kv_block_size, 8) * 3 + 2)


async def _work(ctx: Context, count: int = 1) -> list[str | list[int]]:
    prompts = [_prompt(ctx) for _ in range(count)]
    for prompt in prompts:
        await ctx.generate(ctx.request(prompt, max_tokens=1))
    return prompts


def _stored(batches: Iterable[kv_pb2.KvEventBatch]) -> list[kv_pb2.BlockStored]:
    events = (event for batch in batches for event in batch.events)
    return [event.block_stored for event in events if event.HasField("block_stored")]


def _content(batches: Iterable[kv_pb2.KvEventBatch]) -> Counter[tuple[int, bytes]]:
    """The ranks and hashes that are cached after these batches, with the number of their copies."""
    cached: Counter[tuple[int, bytes]] = Counter()
    for batch in batches:
        rank = batch.data_parallel_rank
        for event in batch.events:
            match event.WhichOneof("event"):
                case "block_stored":
                    cached.update((rank, block.value) for block in event.block_stored.block_hashes)
                case "block_removed":
                    cached.subtract((rank, block.value) for block in event.block_removed.block_hashes)
                case "all_blocks_cleared":
                    cached = Counter({key: count for key, count in cached.items() if key[0] != rank})
    return Counter({key: count for key, count in cached.items() if count > 0})


def _expect_consecutive(batches: Iterable[kv_pb2.KvEventBatch], after: dict[int, int] | None = None) -> None:
    last = dict(after or {})
    for batch in batches:
        rank, number = batch.data_parallel_rank, batch.sequence_number
        if rank in last:
            expect(
                number == last[rank] + 1, f"rank {rank}: batch {number} follows batch {last[rank]}", "KVE-02"
            )
        last[rank] = number


@case(
    "kv_events.disabled",
    "KV events that are switched off are UNIMPLEMENTED, with a way to switch them on.",
    "KVE-06",
)
async def disabled(ctx: Context) -> None:
    subscription = ctx.subscribe(ctx.rpc.SubscribeKvEvents, Request())
    try:
        await subscription.accepted(rule="KVE-07")
    except Refused as refused:
        expect_equal(refused.code, Code.UNIMPLEMENTED, "the status")
        hints = ("--", "enable", "start", "set ")
        expect(any(hint in refused.details for hint in hints), f"the message names no way: {refused.details}")
        return
    skip("KV events are enabled")


@case(
    "kv_events.accepted",
    "Initial metadata comes at subscription, before any event.",
    "KVE-07",
    exclusive=True,
)
async def accepted(ctx: Context) -> None:
    for snapshot in (False, True):
        subscription = await _subscribe(ctx, snapshot=snapshot)
        await subscription.close()


@case(
    "kv_events.stored",
    "A new prompt's blocks are stored in a chain of parents, with its tokens, block size, time and rank.",
    "KVE-01",
    needs=[needs.GENERATES],
    exclusive=True,
)
async def stored(ctx: Context) -> None:
    subscription = await _subscribe(ctx)
    prompt = (await _work(ctx))[0]
    batches = await _collect(subscription, at_least=1)
    for batch in batches:
        expect(batch.timestamp_unix_nanos > 10**18, "a timestamp is not in nanoseconds since 1970")
        expect_in(batch.data_parallel_rank, ctx.offer.ranks, "data_parallel_rank")
        for event in batch.events:
            expect(event.WhichOneof("event"), "an event is empty")
    events = _stored(batches)
    expect(events, "a new prompt stored no block")
    chains: dict[bytes, list[int]] = {}
    for new in events:
        expect(new.block_size > 0, "block_size is 0")
        expect(new.block_hashes, "BlockStored names no block")
        expect_equal(len(new.token_ids), new.block_size * len(new.block_hashes), "the number of token_ids")
        chain = chains.get(new.parent_block_hash.value, []) if new.HasField("parent_block_hash") else []
        for place, block in enumerate(new.block_hashes):
            chain = [*chain, *new.token_ids[place * new.block_size : (place + 1) * new.block_size]]
            chains[block.value] = chain
    if isinstance(prompt, list):
        begin = range(probes.CHANCE + 1)  # where blocks are a token long, a first one may be known already
        own = [c for c in chains.values() if any(c == prompt[at : at + len(c)] for at in begin)]
        longest = max(own, key=len, default=[])
        whole = len(prompt) - len(prompt) % events[0].block_size
        # The last block may be left to the first decoding step.
        least = whole - max(events[0].block_size, probes.CHANCE + 1)
        expect(len(longest) >= least, f"only {len(longest)} of {len(prompt)} tokens are stored")


@case(
    "kv_events.hashes",
    "Hashes are encoded as they say: int64 in 8 bytes, strings in UTF-8.",
    "KVE-08",
    needs=[needs.GENERATES],
    exclusive=True,
)
async def hashes(ctx: Context) -> None:
    subscription = await _subscribe(ctx)
    await _work(ctx)
    blocks = [
        block for event in _stored(await _collect(subscription, at_least=1)) for block in event.block_hashes
    ]
    expect(blocks, "a new prompt stored no block", "KVE-01")
    expect_equal(len({block.encoding for block in blocks}), 1, "the number of different encodings")
    expect_equal(
        len({block.value for block in blocks}), len(blocks), "the number of different hashes", "KVE-01"
    )
    for block in blocks:
        expect_in(block.encoding, ENCODINGS, "the encoding")
        expect(block.value, "a hash is empty")
        if block.encoding == "int64":
            expect_equal(len(block.value), 8, "the length of an int64 hash")
        elif block.encoding in ("string", "decimal_int64"):
            try:
                text = block.value.decode()
            except UnicodeDecodeError:
                fail(f"a string hash is no UTF-8: {block.value!r}")
            expect(
                block.encoding == "string" or str(int(text)) == text, f"the hash {text!r} is not canonical"
            )


@case(
    "kv_events.sequence",
    "Sequence numbers of a rank go up by one: nothing is lost in silence.",
    "KVE-02",
    needs=[needs.GENERATES],
    exclusive=True,
)
async def sequence(ctx: Context) -> None:
    subscription = await _subscribe(ctx)
    await _work(ctx, 2)
    batches = await _collect(subscription, at_least=2)
    expect(len(batches) >= 2, f"{len(batches)} batches came for two new prompts", "KVE-01")
    _expect_consecutive(batches)


@case(
    "kv_events.replay",
    "start_sequence_number N replays from N exactly what came live.",
    "KVE-03",
    needs=[needs.GENERATES],
    exclusive=True,
)
async def replay(ctx: Context) -> None:
    rank = ctx.offer.ranks.start
    live = await _subscribe(ctx, ranks=[rank])
    await _work(ctx, 2)
    expected = [batch for batch in await _collect(live, at_least=1) if batch.sequence_number > 0]
    if not expected:
        skip("no batch came that could be replayed")
    replayed = await _collect(await _subscribe(ctx, start=expected[0].sequence_number, ranks=[rank]))
    expect_equal(replayed[: len(expected)], expected, "the list of replayed batches")
    _expect_consecutive(replayed)


@case(
    "kv_events.replay_from_the_first",
    "A replay begins at the number asked for, or is OUT_OF_RANGE: it never begins later in silence.",
    "KVE-03",
    needs=[needs.GENERATES],
    exclusive=True,
)
async def replay_from_the_first(ctx: Context) -> None:
    await _work(ctx, 2)
    try:
        subscription = await _subscribe(ctx, start=1, ranks=[ctx.offer.ranks.start])
    except Refused as refused:
        expect_equal(refused.code, Code.OUT_OF_RANGE, f"the status ({refused.details})")
        return
    batches = await _collect(subscription, at_least=1)
    expect(batches, "nothing was replayed")
    expect_equal(batches[0].sequence_number, 1, "the first replayed sequence number")
    _expect_consecutive(batches)


@case(
    "kv_events.snapshot",
    "A snapshot comes first: cleared, then the stored blocks, among them those of a prompt just computed.",
    "KVE-04",
    needs=[needs.GENERATES],
    exclusive=True,
)
async def snapshot(ctx: Context) -> None:
    live = await _subscribe(ctx)
    await _work(ctx)
    seen = _content(await _collect(live, at_least=1))
    batches = await _collect(await _subscribe(ctx, snapshot=True), at_least=1)
    for rank in ctx.offer.ranks:
        own = [batch for batch in batches if batch.data_parallel_rank == rank]
        if not own:
            continue
        kinds = [event.WhichOneof("event") for event in own[0].events]
        expect_equal(kinds[:1], ["all_blocks_cleared"], f"the first event of the snapshot of rank {rank}")
        expect_equal(set(kinds[1:]) - {"block_stored"}, set(), "the set of other events in the snapshot")
    missing = set(seen) - set(_content(batches))
    expect(not missing, f"the snapshot lacks {len(missing)} of {len(seen)} blocks that were just stored")


@case(
    "kv_events.snapshot_then_live",
    "After the snapshot come all later batches, none lost and none doubled, while the engine works.",
    "KVE-04",
    "KVE-02",
    needs=[needs.GENERATES],
    exclusive=True,
)
async def snapshot_then_live(ctx: Context) -> None:
    live = await _subscribe(ctx)
    await _work(ctx)
    streams = asyncio.gather(_work(ctx, 2), _work(ctx, 2))
    late = await _subscribe(ctx, snapshot=True)
    await streams
    everything, with_snapshot = await _collect(live, at_least=1), await _collect(late, at_least=1)
    _expect_consecutive(with_snapshot)
    for rank in ctx.offer.ranks:
        seen = {b.sequence_number: b for b in everything if b.data_parallel_rank == rank}
        own = [b for b in with_snapshot if b.data_parallel_rank == rank]
        if not own or not seen:
            continue
        begin, *later = own
        # The snapshot may be older than the other subscription, which then has only the later part.
        first = max(begin.sequence_number + 1, min(seen))
        numbers = [b.sequence_number for b in later if b.sequence_number >= first]
        expect_equal(
            numbers, [n for n in seen if n >= first], f"the numbers of rank {rank} after its snapshot"
        )
        for batch in later:
            if batch.sequence_number in seen:
                expect_equal(
                    batch, seen[batch.sequence_number], f"batch {batch.sequence_number} of rank {rank}"
                )


@case(
    "kv_events.snapshot_equals_history",
    "The snapshot is what the whole history adds up to.",
    "KVE-04",
    needs=[needs.GENERATES],
    exclusive=True,
)
async def snapshot_equals_history(ctx: Context) -> None:
    rank = ctx.offer.ranks.start
    await _work(ctx, 2)
    try:
        history = await _subscribe(ctx, start=1, ranks=[rank])
    except Refused:
        skip("the history is no longer held from its beginning")
    content = await _collect(await _subscribe(ctx, snapshot=True, ranks=[rank]), at_least=1)
    batches = [
        b for b in await _collect(history, at_least=1) if b.sequence_number <= content[0].sequence_number
    ]
    # Batch 0, if there is one, can't be asked for: 0 is "no replay". Blocks of it may be in the snapshot alone.
    snapshot_blocks, history_blocks = _content(content[:1]), _content(batches)
    missing = set(history_blocks) - set(snapshot_blocks)
    expect(not missing, f"the snapshot lacks {len(missing)} of {len(history_blocks)} blocks of the history")
    stored_once = set(snapshot_blocks) - set(history_blocks)
    stored_ever = {(rank, block.value) for event in _stored(batches) for block in event.block_hashes}
    removed = stored_once & stored_ever
    expect(not removed, f"the snapshot still holds {len(removed)} blocks that the history removed")


@case(
    "kv_events.ranks",
    "The rank filter filters; a rank that the server does not have is INVALID_ARGUMENT.",
    "KVE-05",
    needs=[needs.GENERATES],
    exclusive=True,
)
async def ranks(ctx: Context) -> None:
    subscriptions = {rank: await _subscribe(ctx, ranks=[rank]) for rank in ctx.offer.ranks}
    await _work(ctx, 2 * len(ctx.offer.ranks))
    for rank, subscription in subscriptions.items():
        found = {batch.data_parallel_rank for batch in await _collect(subscription)}
        expect(found <= {rank}, f"a subscription to rank {rank} got batches of {found}")
    request = Request(data_parallel_ranks=[ctx.offer.ranks.stop])
    await ctx.refused(ctx.rpc.SubscribeKvEvents, request, Code.INVALID_ARGUMENT, names="rank")


@case(
    "kv_events.subscribers_agree",
    "All subscribers see the same batches, also after another one has left.",
    "KVE-05",
    needs=[needs.GENERATES],
    exclusive=True,
)
async def subscribers_agree(ctx: Context) -> None:
    leaving, *staying = [await _subscribe(ctx) for _ in range(4)]
    await leaving.close()
    await _work(ctx, 2)
    first, *others = [await _collect(subscription, at_least=1) for subscription in staying]
    expect(first, "a new prompt brought no batch", "KVE-01")
    for other in others:
        expect_equal(other, first, "the list of batches of another subscriber")


@case(
    "kv_events.slow_subscriber",
    "A slow subscriber gets everything later, or one EngineError OVERLOADED; the others are not disturbed.",
    "KVE-05",
    "KVE-02",
    needs=[needs.GENERATES],
    exclusive=True,
)
async def slow_subscriber(ctx: Context) -> None:
    await (await _subscribe(ctx)).close()  # skips when KV events are off
    async with ctx.connect(tiny_window=True) as connection:
        call = connection.rpc.SubscribeKvEvents(Request(), timeout=60, metadata=connection.metadata)
        await call.initial_metadata()
        fast = await _subscribe(ctx)
        await _work(ctx, 3)
        expected = await _collect(fast, at_least=1)
        expect(expected, "the other subscriber got nothing")
        for batch in expected:
            response = await call.read()
            if not isinstance(response, kv_pb2.SubscribeKvEventsResponse):
                fail(f"the slow subscriber's stream ended {(await call.code()).name} without an EngineError")
            if response.HasField("error"):
                expect_equal(response.error.code, errors_pb2.ERROR_CODE_OVERLOADED, "the EngineError's code")
                break
            expect_equal(response.batch, batch, "the slow subscriber's batch")
        call.cancel()


@case(
    "kv_events.lora",
    "Blocks computed with an adapter carry its name.",
    "KVE-01",
    needs=[needs.GENERATES, needs.LORA, needs.LORA_PATH],
    exclusive=True,
)
async def lora(ctx: Context) -> None:
    subscription = await _subscribe(ctx)
    adapter = await load_adapter(ctx)
    await ctx.generate(ctx.request(_prompt(ctx), max_tokens=1, lora_name=adapter.lora_name))
    events = _stored(await _collect(subscription, at_least=1))
    expect(events, "a new prompt stored no block")
    names = {event.lora_name for event in events}
    expect_equal(names, {adapter.lora_name}, "the set of adapter names of the stored blocks")
