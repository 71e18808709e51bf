"""The contract's messages for native events: hashes, media and extra keys in their written form.

Extra keys are what an engine mixes into a block's hash beside its tokens: adapter name, salt, media. They leave
as text: text as it is, bytes in hexadecimal, anything else as compact JSON, such as `["<media id>",3]`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from openengine.v1 import errors_pb2, kv_pb2
from openengine_adapters.core.kv.native import Event, Hash, Removed, Stored

HashEncoder: TypeAlias = Callable[[Hash], kv_pb2.KvBlockHash]

_UINT64 = (1 << 64) - 1
_SIGN = 1 << 63

_MEDIA = {
    "GPU": kv_pb2.STORAGE_MEDIUM_GPU,
    "CPU": kv_pb2.STORAGE_MEDIUM_CPU_PINNED,
    "CPU_PINNED": kv_pb2.STORAGE_MEDIUM_CPU_PINNED,
    "DISK": kv_pb2.STORAGE_MEDIUM_DISK,
    "STORAGE": kv_pb2.STORAGE_MEDIUM_DISK,
    "EXTERNAL": kv_pb2.STORAGE_MEDIUM_EXTERNAL,
}

CLEARED = kv_pb2.KvEvent(all_blocks_cleared=kv_pb2.AllBlocksCleared())


def native_hash(value: Hash) -> kv_pb2.KvBlockHash:
    """The encodings of KVE-08: `int64` is 8 bytes big-endian, `bytes` the raw digest, `string` UTF-8."""
    if isinstance(value, int):
        return kv_pb2.KvBlockHash(value=(value & _UINT64).to_bytes(8), encoding="int64")
    if isinstance(value, bytes):
        return kv_pb2.KvBlockHash(value=value, encoding="bytes")
    return kv_pb2.KvBlockHash(value=value.encode(), encoding="string")


def decimal_hash(value: Hash) -> kv_pb2.KvBlockHash:
    """Numbers as `decimal_int64`, the signed 64-bit value in ASCII; hashes that are no numbers as ever."""
    if not isinstance(value, int):
        return native_hash(value)
    signed = ((value + _SIGN) & _UINT64) - _SIGN
    return kv_pb2.KvBlockHash(value=str(signed).encode(), encoding="decimal_int64")


HASH_ENCODERS: dict[str, HashEncoder] = {"native": native_hash, "decimal_int64": decimal_hash}


def event_message(event: Event, encode: HashEncoder) -> kv_pb2.KvEvent:
    """One native event (KVE-01)."""
    if isinstance(event, Stored):
        return kv_pb2.KvEvent(block_stored=stored_message(event, encode))
    if isinstance(event, Removed):
        return kv_pb2.KvEvent(block_removed=removed_message(event, encode))
    return CLEARED


def stored_message(event: Stored, encode: HashEncoder) -> kv_pb2.BlockStored:
    """The blocks of one BlockStored."""
    return kv_pb2.BlockStored(
        block_hashes=[encode(value) for value in event.hashes],
        parent_block_hash=None if event.parent is None else encode(event.parent),
        token_ids=event.token_ids,
        block_size=event.block_size,
        lora_id=event.lora_id,
        lora_name=event.lora_name,
        medium=_MEDIA.get(event.medium, kv_pb2.STORAGE_MEDIUM_UNSPECIFIED),
        extra_keys=_extra_keys(event.extra_keys),
        group_idx=event.group,
        kv_cache_spec_kind=event.spec_kind,
        kv_cache_spec_sliding_window=event.sliding_window,
    )


def removed_message(event: Removed, encode: HashEncoder) -> kv_pb2.BlockRemoved:
    """The blocks of one BlockRemoved."""
    return kv_pb2.BlockRemoved(
        block_hashes=[encode(value) for value in event.hashes],
        medium=_MEDIA.get(event.medium, kv_pb2.STORAGE_MEDIUM_UNSPECIFIED),
        group_idx=event.group,
    )


def error_response(error: errors_pb2.EngineError) -> kv_pb2.SubscribeKvEventsResponse:
    """The last response of a subscription that failed."""
    return kv_pb2.SubscribeKvEventsResponse(error=error)


def _extra_keys(blocks: Sequence[Sequence[Any]]) -> list[kv_pb2.OpaqueKeyTuple]:
    if not any(blocks):
        return []
    return [kv_pb2.OpaqueKeyTuple(values=[_key_text(key) for key in keys]) for keys in blocks]


def _key_text(key: Any) -> str:
    if isinstance(key, str):
        return key
    if isinstance(key, bytes):
        return key.hex()
    return json.dumps(key, separators=(",", ":"), ensure_ascii=False, default=_json_default)


def _json_default(value: Any) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)
