"""Native events in the contract's form."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openengine.v1 import kv_pb2
from openengine_adapters.core.kv.messages import decimal_hash, event_message, native_hash
from openengine_adapters.core.kv.native import Hash, decode
from tests.core.kv.publisher import cleared, payload, removed, stored


@pytest.mark.parametrize(
    ("value", "encoding", "written"),
    [
        (1, "int64", b"\0\0\0\0\0\0\0\x01"),
        (2**64 - 2, "int64", b"\xff\xff\xff\xff\xff\xff\xff\xfe"),
        (b"\x00\xff" * 16, "bytes", b"\x00\xff" * 16),
        ("hé", "string", "hé".encode()),
    ],
)
def test_native_hashes(value: Hash, encoding: str, written: bytes) -> None:
    assert native_hash(value) == kv_pb2.KvBlockHash(value=written, encoding=encoding)


@pytest.mark.parametrize(
    ("value", "encoding", "written"),
    [(1, "decimal_int64", b"1"), (2**64 - 2, "decimal_int64", b"-2"), (2**63, "decimal_int64", b"-9223372036854775808"),
     (b"\x01", "bytes", b"\x01")],
)  # fmt: skip
def test_decimal_hashes(value: Hash, encoding: str, written: bytes) -> None:
    assert decimal_hash(value) == kv_pb2.KvBlockHash(value=written, encoding=encoding)


@given(st.integers(0, 2**64 - 1))
def test_both_encodings_name_the_same_number(value: int) -> None:
    signed = int.from_bytes(native_hash(value).value, signed=True)
    assert decimal_hash(value).value == str(signed).encode()
    assert signed % 2**64 == value


def _message(event: Any) -> kv_pb2.KvEvent:
    (decoded,) = decode(payload(event)).events
    return event_message(decoded, native_hash)


def test_a_stored_event_in_full() -> None:
    message = _message(
        stored(
            7, 8, parent=6, lora_id=2, lora_name="ada", group_idx=3, kv_cache_spec_kind="full_attention",
            kv_cache_spec_sliding_window=9, extra_keys=[["salt", b"\xab\xcd", ["image-1", 3]], None],
        )
    ).block_stored  # fmt: skip
    assert [block.value for block in message.block_hashes] == [(7).to_bytes(8), (8).to_bytes(8)]
    assert message.parent_block_hash.value == (6).to_bytes(8)
    assert list(message.token_ids) == [7, 8, 8, 9]
    assert (message.block_size, message.lora_id, message.lora_name) == (2, 2, "ada")
    assert message.medium == kv_pb2.STORAGE_MEDIUM_GPU
    assert (message.group_idx, message.kv_cache_spec_kind, message.kv_cache_spec_sliding_window) == (
        3,
        "full_attention",
        9,
    )
    assert [list(keys.values) for keys in message.extra_keys] == [["salt", "abcd", '["image-1",3]'], []]


def test_a_first_block_has_no_parent_and_no_keys() -> None:
    message = _message(stored(7, extra_keys=[None])).block_stored
    assert not message.HasField("parent_block_hash")
    assert not message.extra_keys


@pytest.mark.parametrize(
    ("medium", "expected"),
    [
        ("GPU", kv_pb2.STORAGE_MEDIUM_GPU),
        ("CPU", kv_pb2.STORAGE_MEDIUM_CPU_PINNED),
        ("CPU_PINNED", kv_pb2.STORAGE_MEDIUM_CPU_PINNED),
        ("DISK", kv_pb2.STORAGE_MEDIUM_DISK),
        ("STORAGE", kv_pb2.STORAGE_MEDIUM_DISK),
        ("EXTERNAL", kv_pb2.STORAGE_MEDIUM_EXTERNAL),
        ("ABACUS", kv_pb2.STORAGE_MEDIUM_UNSPECIFIED),
        (None, kv_pb2.STORAGE_MEDIUM_UNSPECIFIED),
    ],
)
def test_media(medium: str | None, expected: kv_pb2.StorageMedium.ValueType) -> None:
    assert _message(removed(7, group_idx=4) | {"medium": medium}).block_removed.medium == expected


def test_cleared_and_removed() -> None:
    assert _message(cleared()).HasField("all_blocks_cleared")
    gone = _message(removed(7, 8, group_idx=4)).block_removed
    assert [block.value for block in gone.block_hashes] == [(7).to_bytes(8), (8).to_bytes(8)]
    assert gone.group_idx == 4
