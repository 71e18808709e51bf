"""Native payloads, of every release: old arrays, new maps, what is unknown and what is broken."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from openengine_adapters.core.kv.channel import Channel
from openengine_adapters.core.kv.messages import native_hash
from openengine_adapters.core.kv.native import Cleared, Removed, Skipped, Stored, decode
from tests.core.kv.publisher import cleared, payload, removed, stored


def test_maps_and_arrays_say_the_same() -> None:
    maps = decode(payload(stored(7, 8, parent=6), removed(7), cleared(), at=12.5))
    arrays = decode(
        payload(
            ["BlockStored", [7, 8], 6, [7, 8, 8, 9], 2, None, "GPU"],
            ["BlockRemoved", [7], "GPU"],
            ["AllBlocksCleared"],
            at=12.5,
        )
    )
    assert maps == arrays
    assert maps.timestamp_ns == 12_500_000_000
    assert maps.events == [
        Stored(hashes=[7, 8], parent=6, token_ids=[7, 8, 8, 9], block_size=2, medium="GPU"),
        Removed(hashes=[7], medium="GPU"),
        Cleared(),
    ]
    assert maps.skipped == Skipped()


def test_the_oldest_arrays_end_early() -> None:
    (event,) = decode(payload(["BlockStored", [1], None, [5], 1])).events
    assert event == Stored(hashes=[1], token_ids=[5], block_size=1)


def test_the_batch_may_be_a_map() -> None:
    batch = decode(msgpack.packb({"ts": 1.0, "events": [cleared()], "data_parallel_rank": 0, "new": 1}))
    assert batch.events == [Cleared()]


def test_every_field_of_vllm() -> None:
    event = stored(
        b"\x01" * 32, lora_id=3, lora_name="a", extra_keys=[["a", ["img", 4]]], group_idx=2,
        kv_cache_spec_kind="sliding_window", kv_cache_spec_sliding_window=128, session_id="s", locality="LOCAL",
        ownership="x",
    )  # fmt: skip
    batch = decode(payload(event))
    assert batch.skipped == Skipped()
    (found,) = batch.events
    assert isinstance(found, Stored)
    assert (found.lora_id, found.lora_name, found.group) == (3, "a", 2)
    assert (found.spec_kind, found.sliding_window) == ("sliding_window", 128)
    assert found.hashes == [b"\x01" * 32]
    assert found.extra_keys == [["a", ["img", 4]]]


def test_sglang_salt_and_bigrams() -> None:
    event = {
        "type": "BlockStored", "block_hashes": [-1, 5], "parent_block_hash": None, "token_ids": [[1, 2], [2, 3]],
        "block_size": 1, "lora_id": None, "medium": "CPU_PINNED", "cache_salt": "s",
    }  # fmt: skip
    (found,) = decode(payload(event)).events
    assert isinstance(found, Stored)
    assert list(found.token_ids) == [1, 2]
    assert found.extra_keys == [("s",), ("s",)]
    assert found.hashes == [2**64 - 1, 5]  # one block, whether an engine writes it signed or unsigned


@pytest.mark.parametrize(
    ("locality", "medium"), [(None, "STORAGE"), ("LOCAL", "STORAGE"), ("REMOTE", "EXTERNAL")]
)
def test_storage_elsewhere_is_external(locality: str | None, medium: str) -> None:
    (found,) = decode(payload({**removed(1), "medium": "STORAGE", "locality": locality})).events
    assert isinstance(found, Removed)
    assert found.medium == medium


def test_the_unknown_is_counted_and_passed_over() -> None:
    batch = decode(
        payload(
            {"type": "BlockMoved", "block_hashes": [1]},
            ["BlockMoved", [1]],
            stored(1, colour="red", weight=2),
            ["BlockRemoved", [1], "GPU", 0, "more"],
        )
    )
    assert [type(event) for event in batch.events] == [Stored, Removed]
    assert batch.skipped == Skipped(kinds=2, fields=3)


@pytest.mark.parametrize(
    "event",
    [
        {"type": "BlockStored"},
        stored(1) | {"block_hashes": 5},
        stored(1) | {"block_hashes": [1.5]},
        stored(1) | {"block_hashes": [[1]]},
        stored(1) | {"parent_block_hash": {}},
        stored(1) | {"token_ids": ["a"]},
        stored(1) | {"block_size": -1},
        {"type": "BlockRemoved"},
        [],
        5,
        None,
        {},
    ],
)
def test_a_malformed_event_spoils_no_other(event: Any) -> None:
    batch = decode(payload(removed(1), event, removed(2)))
    assert batch.events == [Removed(hashes=[1], medium="GPU"), Removed(hashes=[2], medium="GPU")]
    assert batch.skipped.events + batch.skipped.kinds == 1


@pytest.mark.parametrize(
    "raw", [b"", b"\xc1", b"\x93\x01", msgpack.packb(5), msgpack.packb([1.0]), msgpack.packb([1, 2])]
)
def test_an_undecodable_payload_is_an_empty_batch(raw: bytes) -> None:
    batch = decode(raw)
    assert batch.events == []
    assert batch.skipped.payloads == 1
    assert batch.timestamp_ns > 0


@given(st.binary(max_size=200))
def test_no_bytes_raise(raw: bytes) -> None:
    decode(raw)


_anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=4)
    | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=6,
)
_names = [
    "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys",
    "group_idx", "kv_cache_spec_kind", "cache_salt", "locality",
]  # fmt: skip
_kinds = st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared", "Other"])


@given(
    st.lists(
        st.builds(
            lambda kind, fields: {**fields, "type": kind},
            _kinds,
            st.dictionaries(st.sampled_from(_names), _anything)
            | st.fixed_dictionaries(
                {"block_hashes": st.just([1])}, optional=dict.fromkeys(_names[1:], _anything)
            ),
        )
        | st.builds(lambda kind, values: [kind, *values], _kinds, st.lists(_anything, max_size=8)),
        max_size=4,
    )
)
def test_no_event_raises(events: list[Any]) -> None:
    batch = decode(payload(*events))
    assert len(batch.events) + batch.skipped.events + batch.skipped.kinds == len(events)
    channel = Channel(0, native_hash)
    channel.apply(0, payload(*events))
    assert channel.next == 1


@pytest.mark.parametrize(
    "broken",
    [
        {"token_ids": [[]]},
        {"token_ids": [1.5]},
        {"token_ids": [True]},
        {"group_idx": True},
        {"block_size": 1.0},
        {"extra_keys": [5]},
        {"extra_keys": [[{b"key": 1}]]},
    ],
    ids=str,
)
def test_a_broken_event_leaves_its_neighbours(broken: dict[str, Any]) -> None:
    """KVE-01: what cannot be told is counted, and the history goes on."""
    channel = Channel(0, native_hash)
    channel.apply(0, payload(stored(1), {**stored(2), **broken}, stored(3)))
    assert (channel.next, channel.stats.stored_blocks, channel.stats.skipped.events) == (1, 2, 1)


@pytest.mark.parametrize("seconds", [-1.0, 1e300])
def test_an_impossible_time_is_no_end(seconds: float) -> None:
    channel = Channel(0, native_hash)
    channel.apply(0, payload(stored(1), at=seconds))
    assert channel.stats.stored_blocks == 1
