"""What vLLM's and SGLang's publishers send, decoded leniently.

A payload is a msgpack batch `[timestamp, events, rank]`; older and newer releases write events as arrays that begin
with the kind, or as maps. What is not known here is counted and passed over, never fatal: the engines add kinds
and fields from release to release.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgpack

Hash: TypeAlias = int | bytes | str
"""An engine's name for a block; numbers are kept as unsigned 64 bit, whichever way the engine writes them."""

_UINT32 = (1 << 32) - 1
_INT63 = (1 << 63) - 1
_UINT64 = (1 << 64) - 1

_STORED_FIELDS = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
)
_REMOVED_FIELDS = ("block_hashes", "medium", "group_idx")
_ORDER: Mapping[str, tuple[str, ...]] = {
    "BlockStored": _STORED_FIELDS,
    "BlockRemoved": _REMOVED_FIELDS,
    "AllBlocksCleared": (),
}
_MAP_ONLY = frozenset({"type", "cache_salt", "session_id", "locality", "ownership"})
_KNOWN = {kind: _MAP_ONLY.union(fields) for kind, fields in _ORDER.items()}


@dataclass(slots=True, kw_only=True)
class Stored:
    """Consecutive blocks entered the cache; `token_ids` are those of all of them, `block_size` those of one."""

    hashes: Sequence[Hash]
    parent: Hash | None = None
    token_ids: Sequence[int] = ()
    block_size: int = 0
    lora_id: int = 0
    lora_name: str = ""
    medium: str = ""
    extra_keys: Sequence[Sequence[Any]] = ()
    group: int = 0
    spec_kind: str = ""
    sliding_window: int = 0


@dataclass(slots=True, kw_only=True)
class Removed:
    """Blocks left the cache."""

    hashes: Sequence[Hash]
    medium: str = ""
    group: int = 0


@dataclass(slots=True)
class Cleared:
    """The cache is empty."""


Event: TypeAlias = Stored | Removed | Cleared


@dataclass(slots=True)
class Skipped:
    """What decoding passed over."""

    payloads: int = 0
    kinds: int = 0
    fields: int = 0
    events: int = 0  # of a known kind, but malformed

    def add(self, other: Skipped) -> None:
        """Sum up."""
        self.payloads += other.payloads
        self.kinds += other.kinds
        self.fields += other.fields
        self.events += other.events


@dataclass(slots=True)
class Batch:
    """One decoded payload; `timestamp_ns` is Unix time in nanoseconds."""

    timestamp_ns: int
    events: list[Event] = field(default_factory=list)
    skipped: Skipped = field(default_factory=Skipped)


def decode(payload: bytes) -> Batch:
    """Decode one payload; one that cannot be decoded is an empty batch, so that its number is no gap."""
    try:
        seconds, events = _unpack(payload)
        batch = Batch(int(min(max(seconds * 1e9, 0), _INT63)))
    except Exception:
        return Batch(time.time_ns(), skipped=Skipped(payloads=1))
    for raw in events:
        try:
            _decode_event(raw, batch)
        except (TypeError, ValueError, LookupError):
            batch.skipped.events += 1
    return batch


def _unpack(payload: bytes) -> tuple[float, list[Any]]:
    raw = msgpack.unpackb(payload, strict_map_key=False, unicode_errors="replace")
    if isinstance(raw, dict):
        raw = [raw["ts"], raw["events"]]
    seconds, events = raw[0], raw[1]
    if not isinstance(events, list):
        raise TypeError("events are not a list")
    return float(seconds), events


def _decode_event(raw: Any, batch: Batch) -> None:
    kind, fields, unknown = _fields(raw)
    match kind:
        case "BlockStored":
            batch.events.append(_stored(fields))
        case "BlockRemoved":
            hashes = _hashes(fields["block_hashes"])
            batch.events.append(
                Removed(hashes=hashes, medium=_medium(fields), group=_count(fields.get("group_idx")))
            )
        case "AllBlocksCleared":
            batch.events.append(Cleared())
        case _:
            batch.skipped.kinds += 1
            return
    batch.skipped.fields += unknown


def _fields(raw: Any) -> tuple[Any, Mapping[str, Any], int]:
    """The kind, the fields by name, and how many more there are than known."""
    if isinstance(raw, dict):
        kind = raw.get("type")
        return kind, raw, len(raw.keys() - _KNOWN[kind]) if kind in _KNOWN else 0
    kind, *values = raw
    order = _ORDER.get(kind, ())
    return kind, dict(zip(order, values, strict=False)), max(0, len(values) - len(order))


def _stored(fields: Mapping[str, Any]) -> Stored:
    hashes = _hashes(fields["block_hashes"])
    parent = fields.get("parent_block_hash")
    return Stored(
        hashes=hashes,
        parent=None if parent is None else _hash(parent),
        token_ids=_tokens(fields.get("token_ids") or ()),
        block_size=_count(fields.get("block_size")),
        lora_id=_count(fields.get("lora_id"), _INT63),
        lora_name=_text(fields.get("lora_name")),
        medium=_medium(fields),
        extra_keys=_extra_keys(fields, len(hashes)),
        group=_count(fields.get("group_idx")),
        spec_kind=_text(fields.get("kv_cache_spec_kind")),
        sliding_window=_count(fields.get("kv_cache_spec_sliding_window")),
    )


def _hashes(raw: Any) -> list[Hash]:
    if not isinstance(raw, list):
        raise TypeError("block hashes are not a list")
    return [_hash(value) for value in raw]


def _hash(raw: Any) -> Hash:
    if isinstance(raw, (bytes, str)):
        return raw
    if not isinstance(raw, int) or not -(1 << 63) <= raw <= _UINT64:
        raise TypeError(f"{raw!r} is no block hash")
    return raw & _UINT64


def _tokens(raw: Sequence[Any]) -> Sequence[int]:
    try:
        if not raw or 0 <= min(raw) <= max(raw) <= _UINT32:
            return raw
    except TypeError:
        # With EAGLE, SGLang names a token by the pair of itself and its successor.
        raw = [token[0] if isinstance(token, list) else token for token in raw]
    return [token & _UINT32 for token in raw]


def _extra_keys(fields: Mapping[str, Any], blocks: int) -> Sequence[Sequence[Any]]:
    keys = fields.get("extra_keys")
    if keys:
        return [block or () for block in keys]
    # SGLang tells the salt once for all blocks, vLLM in each block's keys.
    salt = fields.get("cache_salt")
    return [(salt,)] * blocks if salt else ()


def _medium(fields: Mapping[str, Any]) -> str:
    medium = _text(fields.get("medium"))
    # vLLM's second tiers are all "STORAGE"; only this tells a disk from something elsewhere.
    return "EXTERNAL" if medium == "STORAGE" and fields.get("locality") == "REMOTE" else medium


def _count(raw: Any, most: int = _UINT32) -> int:
    if raw is None:
        return 0
    if not isinstance(raw, int) or not 0 <= raw <= most:
        raise ValueError(f"{raw!r} is no count")
    return raw


def _text(raw: Any) -> str:
    return raw if isinstance(raw, str) else ""
