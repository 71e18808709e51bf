"""Contract messages as plain values: enum names without their prefix, and JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf import descriptor, json_format, struct_pb2
from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper
from google.protobuf.message import Message


def enum_name(enum: EnumTypeWrapper | Any, value: int) -> str:
    """Return READY for HEALTH_STATE_READY, and UNSPECIFIED for a value not known here (DISC-12)."""
    return _short_name(enum.DESCRIPTOR, value)


def enum_value(enum: EnumTypeWrapper | Any, name: str) -> Any:
    """Return the number of a short name, in any case and with `-` for `_`. Raises `KeyError`."""
    numbers = {enum_name(enum, number): number for number in enum.values()}
    return numbers[name.upper().replace("-", "_")]


def _short_name(enum: descriptor.EnumDescriptor, value: int) -> str:
    zero = enum.values_by_number[0].name
    prefix = zero.removesuffix("UNSPECIFIED")
    known = enum.values_by_number.get(value)
    return (known.name if known else zero).removeprefix(prefix)


def to_json(message: Message) -> dict[str, Any]:
    """Return a message under its own field names, ready for `json.dumps`.

    An optional field that is absent stays away, since absent and zero differ in the contract. Unlike in
    protobuf's JSON mapping 64-bit numbers stay numbers, enums lose their prefix, and bytes are hexadecimal.
    """
    if isinstance(message, struct_pb2.Struct):
        return json_format.MessageToDict(message)
    return {
        field.name: _plain(field, getattr(message, field.name))
        for field in message.DESCRIPTOR.fields
        if not field.has_presence or message.HasField(field.name)
    }


def _plain(field: Any, value: Any) -> Any:
    if isinstance(value, (str, bool)):
        return value
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Message):
        return to_json(value)
    if isinstance(value, Mapping):
        return dict(value)  # the contract's maps hold text only
    if isinstance(value, Sequence):
        return [_plain(field, item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no infinities
    if field.enum_type is not None:
        return _short_name(field.enum_type, value)
    return value
