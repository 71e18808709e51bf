"""The prefix cache: full blocks of tokens under a hash of all that came before them.

A block is named by its parent's hash, its tokens, and what else its content depends on (adapter, salt, media). Blocks
that no request uses stay until room is needed; the one unused for longest goes first.
"""

from __future__ import annotations

import hashlib
import struct
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Namespace:
    """What separates equal tokens: the adapter, told apart by its weights, and the caller's salt."""

    salt: str = ""
    lora_id: int = 0
    lora_name: str = ""
    lora_digest: bytes = b""

    def key(self) -> bytes:
        """Bytes that are equal only for equal namespaces."""
        return hashlib.blake2b(self.lora_digest + b"\0" + self.salt.encode(), digest_size=16).digest()

    def extra_keys(self) -> list[str]:
        """The same in the form that KV events carry."""
        return [key for key in (self.lora_name, self.salt) if key]


@dataclass(slots=True)
class StoredEvent:
    """Consecutive new blocks of one request."""

    hashes: list[int]
    parent: int | None
    token_ids: list[int]
    namespace: Namespace
    extra_keys: list[list[str]]


@dataclass(slots=True)
class RemovedEvent:
    """A block that left."""

    hash: int


class ClearedEvent:
    """The cache is empty."""


CacheEvent = StoredEvent | RemovedEvent | ClearedEvent


@dataclass(slots=True)
class _Block:
    namespace: Namespace
    users: int = 1


class BlockCache:
    """The blocks of one data-parallel rank. Changes collect in `events` until somebody takes them."""

    def __init__(self, total: int, block_size: int) -> None:
        self.total = total
        self.block_size = block_size
        self.reserved = 0
        self.events: list[CacheEvent] = [ClearedEvent()]
        self._blocks: dict[int, _Block] = {}
        self._unused: OrderedDict[int, None] = OrderedDict()
        self._partial = 0

    @property
    def used(self) -> int:
        """Blocks that a request or session uses; what is only cached does not count."""
        return len(self._blocks) - len(self._unused) + self._partial

    def lease(self, blocks: int, namespace: Namespace) -> Lease | None:
        """Set `blocks` aside for one request, or return None when they are not free now."""
        if self.reserved + blocks > self.total:
            return None
        self.reserved += blocks
        return Lease(self, blocks, namespace)

    def holds(self, block: int) -> bool:
        """Whether the block can be hit."""
        return block in self._blocks

    def take(self, block: int) -> None:
        """Use a cached block."""
        self._blocks[block].users += 1
        self._unused.pop(block, None)

    def store(
        self, block: int, parent: int | None, tokens: Sequence[int], where: Namespace, media: str
    ) -> None:
        """Use a block whose tokens were just computed; it is new, or equal to one already there."""
        if self.holds(block):
            self.take(block)
            return
        self.make_room()
        self._blocks[block] = _Block(where)
        extra = where.extra_keys() + ([media] if media else [])
        last = self.events[-1] if self.events else None
        if isinstance(last, StoredEvent) and last.hashes[-1] == parent and last.namespace == where:
            last.hashes.append(block)
            last.token_ids.extend(tokens)
            last.extra_keys.append(extra)
        else:
            self.events.append(StoredEvent([block], parent, list(tokens), where, [extra]))

    def drop(self, block: int) -> None:
        """Stop using a block; it stays cached."""
        entry = self._blocks[block]
        entry.users -= 1
        if not entry.users:
            self._unused[block] = None

    def make_room(self) -> None:
        """Remove cached blocks until one more fits."""
        while self._unused and len(self._blocks) + self._partial >= self.total:
            self._remove(next(iter(self._unused)))

    def partial(self, change: int) -> None:
        """Count blocks that are not full yet, and thus nobody else's."""
        if change > 0:
            self.make_room()
        self._partial += change

    def forget_lora(self, digest: bytes) -> None:
        """Remove what an adapter cached; nobody uses it any more."""
        for block in [b for b in self._unused if self._blocks[b].namespace.lora_digest == digest]:
            self._remove(block)

    def _remove(self, block: int) -> None:
        del self._unused[block]
        del self._blocks[block]
        self.events.append(RemovedEvent(block))


@dataclass(slots=True)
class Lease:
    """What one request holds: its reservation and the chains of blocks of its prompt and outputs."""

    cache: BlockCache
    reserved: int
    namespace: Namespace
    _chains: list[Chain] = field(default_factory=list)

    def chain(self) -> Chain:
        """Begin a chain at the start of a sequence."""
        return self._add(Chain(self.cache, self.namespace))

    def fork(self, chain: Chain) -> Chain:
        """Begin a chain that goes on where another one is now."""
        return self._add(chain.copy())

    def shrink(self, blocks: int) -> None:
        """Give back all of the reservation but `blocks`."""
        self.cache.reserved -= self.reserved - blocks
        self.reserved = blocks

    def release(self) -> None:
        """Free everything. Safe to call twice."""
        # Leaves go first, so that a chain is later evicted from its end.
        for chain in reversed(self._chains):
            chain.release()
        self._chains.clear()
        self.shrink(0)

    def _add(self, chain: Chain) -> Chain:
        self._chains.append(chain)
        return chain


class Chain:
    """The blocks of one sequence, in order."""

    def __init__(self, cache: BlockCache, namespace: Namespace) -> None:
        self._cache = cache
        self._namespace = namespace
        self._key = namespace.key()
        self._parent: int | None = None
        self._tokens: list[int] = []
        self._media = b""
        self._held: list[int] = []

    def copy(self) -> Chain:
        """A chain that shares the blocks so far and holds none of them itself."""
        other = Chain(self._cache, self._namespace)
        other._parent, other._tokens, other._media = self._parent, list(self._tokens), self._media
        if other._tokens:
            self._cache.partial(+1)
        return other

    def match(self, token_ids: Sequence[int], media: Mapping[int, bytes]) -> int:
        """Use the cached blocks that `token_ids` begin with; return how many tokens they hold.

        The last token is never taken from the cache: computing it gives the first output.
        """
        size = self._cache.block_size
        matched = 0
        while matched + size < len(token_ids):
            digests = b"".join(media.get(at, b"") for at in range(matched, matched + size))
            block = self._hash(token_ids[matched : matched + size], digests)
            if not self._cache.holds(block):
                break
            self._cache.take(block)
            self._held.append(block)
            self._parent = block
            matched += size
        return matched

    def append(self, token: int, media: bytes = b"") -> None:
        """Add one computed token; a block that it fills is stored."""
        if not self._tokens:
            self._cache.partial(+1)
        self._tokens.append(token)
        self._media += media
        if len(self._tokens) == self._cache.block_size:
            block = self._hash(self._tokens, self._media)
            self._cache.partial(-1)
            self._cache.store(block, self._parent, self._tokens, self._namespace, self._media.hex())
            self._held.append(block)
            self._parent, self._tokens, self._media = block, [], b""

    def release(self) -> None:
        """Stop using the blocks."""
        for block in reversed(self._held):
            self._cache.drop(block)
        if self._tokens:
            self._cache.partial(-1)
        self._held, self._tokens = [], []

    def _hash(self, tokens: Sequence[int], media: bytes) -> int:
        parent = b"" if self._parent is None else struct.pack("<Q", self._parent)
        data = self._key + parent + struct.pack(f"<{len(tokens)}H", *tokens) + media
        return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest())


def as_wire(event: CacheEvent, block_size: int) -> dict[str, Any]:
    """The event as vLLM's publisher writes it: a tagged map without the fields that have nothing to say."""
    if isinstance(event, ClearedEvent):
        return {"type": "AllBlocksCleared"}
    if isinstance(event, RemovedEvent):
        return {"type": "BlockRemoved", "block_hashes": [event.hash], "medium": "GPU"}
    wire: dict[str, Any] = {
        "type": "BlockStored",
        "block_hashes": event.hashes,
        "parent_block_hash": event.parent,
        "token_ids": event.token_ids,
        "block_size": block_size,
        "lora_id": event.namespace.lora_id or None,
        "medium": "GPU",
        "lora_name": event.namespace.lora_name or None,
    }
    if any(event.extra_keys):
        wire["extra_keys"] = [keys or None for keys in event.extra_keys]
    return wire
