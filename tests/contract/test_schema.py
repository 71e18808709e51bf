# SPDX-License-Identifier: Apache-2.0
"""The loaded schema is the contract: every fact of `schema_facts.txt`, and nothing beyond."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    ServiceDescriptorProto,
)

import openengine.v1

PACKAGE = "openengine.v1"
FACTS_FILE = Path(__file__).with_name("schema_facts.txt")
DOMAINS = (
    "discovery",
    "errors",
    "generate",
    "inputs",
    "kv",
    "lifecycle",
    "lora",
    "model",
    "observability",
    "service",
    "tasks",
)


def expected_facts() -> list[str]:
    """Return the facts of the table, without its comments."""
    lines = FACTS_FILE.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def loaded_files() -> dict[str, FileDescriptor]:
    """Import every generated message module and return its file descriptor by domain."""
    names = sorted(module.name for module in pkgutil.iter_modules(openengine.v1.__path__))
    domains = [name.removesuffix("_pb2") for name in names if name.endswith("_pb2")]
    return {domain: importlib.import_module(f"{PACKAGE}.{domain}_pb2").DESCRIPTOR for domain in domains}


def file_proto(descriptor: FileDescriptor) -> FileDescriptorProto:
    """Return the declaration that `descriptor` was built from."""
    proto = FileDescriptorProto()
    descriptor.CopyToProto(proto)
    return proto


def short_name(type_name: str) -> str:
    """Return a type's name as the table writes it: relative to the package of the contract."""
    return type_name.removeprefix(".").removeprefix(f"{PACKAGE}.")


def type_of(field: FieldDescriptorProto) -> str:
    """Return the type of `field` without its label."""
    scalar = FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
    return short_name(field.type_name) or scalar


def field_fact(message: DescriptorProto, field: FieldDescriptorProto) -> str:
    """Return the fact about one field; options that change its encoding would show at the end."""
    entries = {
        f"{message.name}.{nested.name}": nested for nested in message.nested_type if nested.options.map_entry
    }
    entry = entries.get(type_of(field))
    if entry is not None:
        spelled = f"map<{type_of(entry.field[0])}, {type_of(entry.field[1])}>"
    elif field.label == FieldDescriptorProto.LABEL_REPEATED:
        spelled = f"repeated {type_of(field)}"
    elif field.proto3_optional:
        spelled = f"optional {type_of(field)}"
    elif field.HasField("oneof_index"):
        spelled = f"oneof {message.oneof_decl[field.oneof_index].name} {type_of(field)}"
    else:
        spelled = type_of(field)
    options = f" {field.options}" if field.HasField("options") else ""
    return f"{message.name}.{field.name} = {field.number} {spelled}{options}"


def message_facts(message: DescriptorProto) -> Iterator[str]:
    """Yield the facts about a message; a type declared inside it would be one as well."""
    yield f"message {message.name}"
    for field in message.field:
        yield field_fact(message, field)
    for nested in message.nested_type:
        if not nested.options.map_entry:
            yield f"message {message.name}.{nested.name}"
    for enum in message.enum_type:
        yield f"enum {message.name}.{enum.name}"


def enum_facts(enum: EnumDescriptorProto) -> Iterator[str]:
    """Yield the facts about an enum."""
    yield f"enum {enum.name}"
    for value in enum.value:
        yield f"{enum.name}.{value.name} = {value.number}"


def service_facts(service: ServiceDescriptorProto) -> Iterator[str]:
    """Yield the facts about a service."""
    yield f"service {service.name}"
    for method in service.method:
        request = ("stream " if method.client_streaming else "") + short_name(method.input_type)
        response = ("stream " if method.server_streaming else "") + short_name(method.output_type)
        yield f"rpc {service.name}.{method.name}({request}) returns ({response})"


def file_facts(proto: FileDescriptorProto) -> Iterator[str]:
    """Yield the facts that one schema file states."""
    for message in proto.message_type:
        yield from message_facts(message)
    for enum in proto.enum_type:
        yield from enum_facts(enum)
    for service in proto.service:
        yield from service_facts(service)


def loaded_facts() -> list[str]:
    """Return the facts that the bindings state."""
    return [fact for descriptor in loaded_files().values() for fact in file_facts(file_proto(descriptor))]


def test_facts_are_stated_once() -> None:
    """A fact stated twice would hide that another one is missing."""
    for facts in (expected_facts(), loaded_facts()):
        assert len(facts) == len(set(facts))


def test_the_table_is_whole() -> None:
    """The table has not been shortened or emptied by accident."""
    assert len(expected_facts()) == 580


def test_nothing_is_missing() -> None:
    """The bindings state every fact of the contract."""
    assert sorted(set(expected_facts()) - set(loaded_facts())) == []


def test_nothing_is_added() -> None:
    """The bindings state nothing that the contract does not."""
    assert sorted(set(loaded_facts()) - set(expected_facts())) == []


def test_domains() -> None:
    """The schema is cut into exactly these files."""
    assert tuple(loaded_files()) == DOMAINS


@pytest.mark.parametrize("domain", DOMAINS)
def test_file_header(domain: str) -> None:
    """Each file is proto3, in the package of the contract, and sets no option."""
    proto = file_proto(loaded_files()[domain])
    assert (proto.name, proto.package, proto.syntax) == (f"openengine/v1/{domain}.proto", PACKAGE, "proto3")
    assert not proto.extension
    assert not proto.HasField("options")


def test_json_names_are_the_default_ones() -> None:
    """No field overrides the lowerCamelCase name it has in JSON."""
    for descriptor in loaded_files().values():
        for message in descriptor.message_types_by_name.values():
            for field in message.fields:
                head, *rest = field.name.split("_")
                assert field.json_name == head + "".join(part.capitalize() for part in rest), field.full_name
