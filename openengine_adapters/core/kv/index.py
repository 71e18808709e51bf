"""What one rank's cache holds at present, as far as its events tell."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

from openengine.v1 import kv_pb2
from openengine_adapters.core.kv.messages import HashEncoder, stored_message
from openengine_adapters.core.kv.native import Event, Hash, Removed, Stored

_Key: TypeAlias = tuple[Hash, str, int]  # hash, medium, group


class _Block:
    __slots__ = ("copies", "record")

    def __init__(self, record: bytes) -> None:
        self.record = record
        self.copies = 0


class BlockIndex:
    """The stored blocks in the order in which they came, so that a parent precedes its children.

    Engines hold several copies of a block and report each one's store and removal, so copies are counted for each
    medium and cache group. A block is kept as a serialised batch of the one event that stores it: the smallest form,
    and since serialised protobuf messages concatenate, a snapshot is a join.

    `complete` says that the index holds the whole cache. When part of the history was lost it starts empty and holds
    what was stored since: it never claims a block that is gone, but misses what was there before.
    """

    def __init__(self, encode: HashEncoder) -> None:
        self.complete = True
        self.unknown_removals = 0
        self._encode = encode
        self._blocks: dict[_Key, _Block] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def restart(self, *, complete: bool) -> None:
        """Forget everything; `complete` when the cache is known to be empty."""
        self._blocks.clear()
        self.complete = complete

    def apply(self, event: Event, message: kv_pb2.KvEvent) -> None:
        """Follow one event; `message` is its form for clients."""
        if isinstance(event, Stored):
            self._store(event, message)
        elif isinstance(event, Removed):
            for value in event.hashes:
                self._remove((value, event.medium, event.group))
        else:
            self.restart(complete=True)

    def records(self) -> Iterator[bytes]:
        """One serialised batch for each copy of each block."""
        for block in self._blocks.values():
            for _ in range(block.copies):
                yield block.record

    def _store(self, event: Stored, message: kv_pb2.KvEvent) -> None:
        for number, value in enumerate(event.hashes):
            key = value, event.medium, event.group
            block = self._blocks.get(key)
            if block is None:
                block = self._blocks[key] = _Block(self._record(event, number, message))
            block.copies += 1

    def _remove(self, key: _Key) -> None:
        block = self._blocks.get(key)
        if block is None:
            self.unknown_removals += 1
            return
        block.copies -= 1
        if not block.copies:
            del self._blocks[key]

    def _record(self, event: Stored, number: int, message: kv_pb2.KvEvent) -> bytes:
        if len(event.hashes) > 1:
            stored = stored_message(one_block(event, number), self._encode)
            message = kv_pb2.KvEvent(block_stored=stored)
        return kv_pb2.KvEventBatch(events=[message]).SerializeToString()


def one_block(event: Stored, number: int) -> Stored:
    """The event as if it had stored only that one of its blocks.

    Groups that cache only some blocks of a span (sliding windows) report the tokens of the whole span, which no
    longer tell the blocks apart; such a block has no tokens.
    """
    hashes, size = event.hashes, event.block_size
    if len(hashes) == 1:
        return event
    aligned = len(event.token_ids) == size * len(hashes)
    return Stored(
        hashes=[hashes[number]],
        parent=hashes[number - 1] if number else event.parent,
        token_ids=event.token_ids[number * size : (number + 1) * size] if aligned else (),
        block_size=size,
        lora_id=event.lora_id,
        lora_name=event.lora_name,
        medium=event.medium,
        extra_keys=event.extra_keys[number : number + 1],
        group=event.group,
        spec_kind=event.spec_kind,
        sliding_window=event.sliding_window,
    )
