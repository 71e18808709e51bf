"""Parameters pass through a Struct with their types, and a change to any of them shows."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openengine.v1 import inputs_pb2, kv_pb2
from openengine_adapters.core.errors import Rejected
from openengine_adapters.core.handoff.parameters import (
    EXACT,
    checksum,
    content_digest,
    from_struct,
    read_reference,
    to_struct,
)
from openengine_adapters.engine import Lora, Media

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-EXACT, EXACT) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.text(max_size=4), PLAIN, max_size=4))
def test_parameters_come_out_as_they_went_in(values: dict[str, Any]) -> None:
    wire = to_struct(values).SerializeToString()
    struct = to_struct({})
    struct.ParseFromString(wire)
    told = from_struct(struct)
    assert told == values
    assert {name: type(told[name]) for name in told} == {name: type(values[name]) for name in values}


def test_a_number_that_a_double_cannot_hold_is_a_decimal_string() -> None:
    assert from_struct(to_struct({"room": EXACT + 1, "rooms": [2**63, {"least": -(2**60)}]})) == {
        "room": str(EXACT + 1),
        "rooms": [str(2**63), {"least": str(-(2**60))}],
    }


def test_tuples_are_lists_and_fractions_stay() -> None:
    assert from_struct(to_struct({"blocks": ([1, 2], [3]), "age": 0.5})) == {
        "blocks": [[1, 2], [3]],
        "age": 0.5,
    }


def session() -> kv_pb2.KvSessionRef:
    return kv_pb2.KvSessionRef(
        session_id="one",
        transfer_backend="nixl",
        endpoints=[kv_pb2.KvEndpoint(host="a", port=1, protocol="tcp")],
        attributes_struct=to_struct({"blocks": [[1, 2]]}),
    )


@pytest.mark.parametrize(
    "field", ["session_id", "transfer_backend", "endpoints", "dp_rank", "attributes_struct"]
)
def test_the_checksum_covers_every_field(field: str) -> None:
    changed = session()
    match field:
        case "endpoints":
            changed.endpoints[0].port = 2
        case "dp_rank":
            changed.dp_rank = 1
        case "attributes_struct":
            changed.attributes_struct.update({"blocks": [[1, 3]]})
        case _:
            setattr(changed, field, "other")
    assert checksum(changed, "content") != checksum(session(), "content")
    assert checksum(session(), "other") != checksum(session(), "content")
    assert checksum(session(), "content") == checksum(session(), "content")


def test_the_content_is_tokens_adapter_and_media() -> None:
    image = Media(inputs_pb2.MODALITY_IMAGE, b"picture", "media[0]")
    other = Media(inputs_pb2.MODALITY_IMAGE, b"other", "media[0]")
    digests = [
        content_digest([1, 2], None),
        content_digest([12], None),
        content_digest([1, 2], Lora(1, "adapter", "/adapters/one")),
        content_digest([1, 2], None, [image]),
        content_digest([1, 2], None, [other]),
        content_digest([1, 2], None, [image, other]),
    ]
    assert len(set(digests)) == len(digests)
    # The id and the directory are the server's own, the name is the caller's.
    assert content_digest([1], Lora(1, "adapter", "/a")) == content_digest([1], Lora(7, "adapter", "/b"))


KEY = "engine.v1"


def reference(**changed: Any) -> kv_pb2.KvSessionRef:
    fields: dict[str, Any] = {
        "session_id": "session",
        "transfer_backend": "nixl",
        "endpoints": [
            kv_pb2.KvEndpoint(host="10.0.0.1", port=1, protocol="nixl"),
            kv_pb2.KvEndpoint(host="10.0.0.1", port=65535, protocol="openengine"),
        ],
        "attributes_struct": to_struct({KEY: {"blocks": [1]}}),
    }
    return kv_pb2.KvSessionRef(**{**fields, **changed})


def test_a_sound_reference_is_read() -> None:
    assert read_reference(reference(), "nixl", ("nixl", "openengine"), KEY) == {"blocks": [1]}


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("transfer_backend", "mooncake"),
        ("transfer_backend", ""),
        ("session_id", ""),
        ("session_id", "x" * 129),
        ("endpoints", []),
        ("endpoints", [kv_pb2.KvEndpoint(host="10.0.0.1", port=1, protocol="openengine")]),
        ("endpoints", [*reference().endpoints, reference().endpoints[1]]),
        ("endpoints", [reference().endpoints[0], kv_pb2.KvEndpoint(port=1, protocol="openengine")]),
        ("endpoints", [reference().endpoints[0], kv_pb2.KvEndpoint(host="h", protocol="openengine")]),
        (
            "endpoints",
            [reference().endpoints[0], kv_pb2.KvEndpoint(host="h", port=65536, protocol="openengine")],
        ),
        ("attributes_struct", to_struct({})),
        ("attributes_struct", to_struct({KEY: [1]})),
        ("attributes_struct", to_struct({KEY: None})),
        ("attributes_struct", to_struct({KEY: {}, "more": 1})),
        ("attributes_struct", to_struct({"another": {}})),
    ],
)
def test_what_is_wrong_with_a_reference_is_named(name: str, changed: Any) -> None:
    with pytest.raises(Rejected, match=rf"^kv\.session\.{name}"):
        read_reference(reference(**{name: changed}), "nixl", ("nixl", "openengine"), KEY)
