"""What a client makes of the batches it gets, done the plain way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from openengine.v1 import kv_pb2


@dataclass
class View:
    """The cache's content: how many copies of each block, and what each one is."""

    copies: Counter[tuple[bytes, int, int]] = field(default_factory=Counter)
    content: dict[tuple[bytes, int, int], tuple[bytes, tuple[int, ...], str]] = field(default_factory=dict)
    numbers: list[int] = field(default_factory=list)

    def apply(self, batch: kv_pb2.KvEventBatch) -> None:
        if self.numbers:
            assert batch.sequence_number == self.numbers[-1] + 1, "a gap, or a batch twice"
        self.numbers.append(batch.sequence_number)
        for event in batch.events:
            match event.WhichOneof("event"):
                case "block_stored":
                    self._store(event.block_stored)
                case "block_removed":
                    self._remove(event.block_removed)
                case "all_blocks_cleared":
                    self.copies.clear()
                    self.content.clear()

    def _store(self, event: kv_pb2.BlockStored) -> None:
        parent = event.parent_block_hash.value
        for at, block in enumerate(event.block_hashes):
            key = block.value, event.medium, event.group_idx
            self.copies[key] += 1
            tokens = event.token_ids[at * event.block_size : (at + 1) * event.block_size]
            self.content.setdefault(key, (parent, tuple(tokens), event.lora_name))
            parent = block.value

    def _remove(self, event: kv_pb2.BlockRemoved) -> None:
        for block in event.block_hashes:
            key = block.value, event.medium, event.group_idx
            if key in self.copies:
                self.copies[key] -= 1
                if not self.copies[key]:
                    del self.copies[key], self.content[key]


def view_of(batches: Iterable[kv_pb2.KvEventBatch]) -> View:
    """The content after all of `batches`."""
    view = View()
    for batch in batches:
        view.apply(batch)
    return view
