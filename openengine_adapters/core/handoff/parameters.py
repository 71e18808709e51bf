"""Hand-off parameters in a session's Struct, and what makes two of them the same (PD-01, PD-02, PD-07)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf import struct_pb2

from openengine.v1 import inputs_pb2, kv_pb2
from openengine_adapters.core.errors import invalid
from openengine_adapters.engine import Lora, Media

EXACT = 2**53
"""A Struct's numbers are doubles, which hold every whole number up to here."""


LONGEST_ID = 128
"""Of a session, in characters; those of these adapters have 32."""


def to_struct(values: Mapping[str, Any]) -> struct_pb2.Struct:
    """Put parameters into a Struct; whole numbers that a double cannot hold become decimal strings."""
    struct = struct_pb2.Struct()
    struct.update({name: _exact(value) for name, value in values.items()})
    return struct


def _exact(value: Any) -> Any:
    if isinstance(value, int) and abs(value) > EXACT:
        return str(value)
    if isinstance(value, Mapping):
        return {str(name): _exact(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_exact(item) for item in value]
    return value


def from_struct(struct: struct_pb2.Struct) -> dict[str, Any]:
    """Take parameters out of a Struct; doubles that are whole become integers again."""
    return {name: _plain(value) for name, value in struct.fields.items()}


def _plain(value: struct_pb2.Value) -> Any:
    match value.WhichOneof("kind"):
        case "number_value":
            number = value.number_value
            return int(number) if number.is_integer() else number
        case "string_value":
            return value.string_value
        case "bool_value":
            return value.bool_value
        case "struct_value":
            return from_struct(value.struct_value)
        case "list_value":
            return [_plain(item) for item in value.list_value.values]
    return None


def read_reference(
    session: kv_pb2.KvSessionRef, backend: str, protocols: Sequence[str], attributes: str
) -> dict[str, Any]:
    """The engine's own parameters in a session reference, of which all the rest is checked (PD-03, PD-07).

    They lie under the name `attributes`; there must be one endpoint of each protocol. Raises `Rejected`.
    """
    name = "kv.session"
    if session.transfer_backend != backend:
        raise invalid(
            f"{name}.transfer_backend",
            f"{session.transfer_backend!r} is not this engine's {backend!r}",
            limit=backend,
        )
    if not 1 <= len(session.session_id) <= LONGEST_ID:
        raise invalid(f"{name}.session_id", f"must have 1 to {LONGEST_ID} characters", limit=LONGEST_ID)
    if [endpoint.protocol for endpoint in session.endpoints] != list(protocols):
        raise invalid(
            f"{name}.endpoints", f"must be of the protocols {' and '.join(protocols)}, in this order"
        )
    for position, endpoint in enumerate(session.endpoints):
        if not endpoint.host or not 1 <= endpoint.port <= 65535:
            raise invalid(f"{name}.endpoints[{position}]", "needs a host and a port from 1 to 65535")
    found = from_struct(session.attributes_struct)
    params = found.get(attributes)
    if len(found) != 1 or not isinstance(params, dict):
        raise invalid(f"{name}.attributes_struct", f"must hold the object {attributes!r} and nothing else")
    return params


def content_digest(token_ids: Sequence[int], lora: Lora | None, media: Sequence[Media] = ()) -> str:
    """What decides a prompt's KV blocks: its tokens, its media and its adapter.

    The cache salt is not among them: it says who may share blocks, not what is in them.
    """
    digest = hashlib.blake2b(digest_size=16)
    parts = [json.dumps([*token_ids]), "" if lora is None else lora.name]
    for item in media:
        parts += [inputs_pb2.Modality.Name(item.modality), hashlib.blake2b(item.data).hexdigest()]
    for part in parts:
        digest.update(f"{len(part)}:{part}".encode())
    return digest.hexdigest()


def checksum(session: kv_pb2.KvSessionRef, content: str) -> str:
    """Tell a session as the prefill server issued it, with the prompt that it was issued for, from any other."""
    told = [
        session.session_id,
        session.transfer_backend,
        [[endpoint.host, endpoint.port, endpoint.protocol] for endpoint in session.endpoints],
        session.dp_rank,
        from_struct(session.attributes_struct),
        content,
    ]
    return hashlib.blake2b(json.dumps(told, sort_keys=True).encode(), digest_size=16).hexdigest()
