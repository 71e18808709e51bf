"""Arbitrary valid protobuf messages, nasty values first; the same seed gives the same messages."""

from __future__ import annotations

import random
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

M = TypeVar("M", bound=Message)

_INTS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_ENUM: (0, 9),
}
_STRINGS = [
    "",
    " ",
    "\x00",
    "a",
    "é🦀",
    "}{",
    "[[[",
    "(" * 200,
    "x" * 5000,
    '{"type":"object"}',
    "root ::= root",
    "\u202e",
]
_FLOATS = [0.0, -0.0, 1.0, 0.5, -1.0, 1e-9, 1e308, -1e308, float("nan"), float("inf"), float("-inf"), 2.0]
_SMALL_INTS = [0, 1, 2, 3, 5, 8, 64, 1023, 1024, 49151, 49152]


def fill(message: M, chance: random.Random, density: float = 0.5, depth: int = 0) -> M:
    """Set a random part of the fields of `message`, nested ones included; returns it."""
    for field in message.DESCRIPTOR.fields:
        if chance.random() > density or depth > 4:
            continue
        if field.message_type is not None and field.message_type.full_name.startswith("google.protobuf."):
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            getattr(message, field.name)[chance.choice(_STRINGS)] = chance.choice(_STRINGS)
        elif field.is_repeated:
            for _ in range(chance.choice((0, 1, 1, 2, 3, 40))):
                _add(message, field, chance, density, depth)
        elif field.message_type is not None:
            child = getattr(message, field.name)
            child.SetInParent()
            fill(child, chance, density, depth + 1)
        else:
            setattr(message, field.name, _value(field, chance))
    return message


def _add(message: Message, field: Any, chance: random.Random, density: float, depth: int) -> None:
    if field.message_type is not None:
        fill(getattr(message, field.name).add(), chance, density, depth + 1)
    else:
        getattr(message, field.name).append(_value(field, chance))


def _value(field: Any, chance: random.Random) -> Any:
    kind = field.cpp_type
    if kind in _INTS:
        low, high = _INTS[kind]
        return chance.choice([low, high, *(value for value in _SMALL_INTS if low <= value <= high)])
    if kind in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return chance.choice(_FLOATS)
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return chance.random() < 0.5
    text = chance.choice(_STRINGS)
    return text.encode() if field.type == FieldDescriptor.TYPE_BYTES else text
