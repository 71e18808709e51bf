"""JSON values as grammars, by a subset of JSON Schema.

What is generated is always valid, and often narrower than the schema: members in the order of the schema, bounded
lengths where the schema sets none. A keyword that cannot be enforced is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from openengine_adapters.reference.guided.grammar import (
    CodeRanges,
    GuideError,
    Rule,
    Symbols,
    characters,
    complement,
    either,
    intersect,
    literal,
    repeat,
    text,
)
from openengine_adapters.reference.guided.regex import DIGIT, compile_regex

_NOTES = frozenset(
    {
        "$schema",
        "$id",
        "$anchor",
        "$comment",
        "$defs",
        "definitions",
        "title",
        "description",
        "default",
        "examples",
    }
    | {"deprecated", "readOnly", "writeOnly", "format"}
)
_KEYWORDS: Mapping[str, frozenset[str]] = {
    "object": frozenset({"properties", "required", "additionalProperties"}),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems"}),
    "string": frozenset({"minLength", "maxLength", "pattern"}),
    "integer": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
    "boolean": frozenset(),
    "null": frozenset(),
}

_MORE_CHARACTERS = 24  # of a string, items of an array and members of an object, beyond the least
_MORE_ITEMS = 3
_MORE_MEMBERS = 3
_DEPTH = 2  # of a value that may be anything

_PLAIN: CodeRanges = complement([(0, 0x1F), (0x22, 0x22), (0x5C, 0x5C), (0x7F, 0x7F)])
_DIGIT = characters(DIGIT)
_NATURAL = either([text("0"), (*characters([(0x31, 0x39)]), *repeat(_DIGIT, 0, 8))])
_SIGN = repeat(text("-"), 0, 1)
_FRACTION = repeat((*text("."), *repeat(_DIGIT, 1, 4)), 0, 1)
_KEY = (*text('"'), *repeat(characters([(0x61, 0x7A), (0x5F, 0x5F)]), 1, 10), *text('"'))


def compile_schema(source: str) -> Symbols:
    """Return the grammar of a schema in JSON. Raises `GuideError`."""
    try:
        schema = json.loads(source)
    except ValueError as error:
        raise GuideError(f"is not JSON: {error}") from None
    return schema_grammar(schema)


def schema_grammar(schema: Any) -> Symbols:
    """Return the grammar of a parsed schema. Raises `GuideError`."""
    return _Compiler(schema).value(schema, "#")


def any_object() -> Symbols:
    """Some JSON object."""
    return _free_object(_anything(_DEPTH - 1))


class _Compiler:
    def __init__(self, root: Any) -> None:
        self._root = root
        self._references: dict[str, Rule] = {}

    def value(self, schema: Any, where: str) -> Symbols:
        """The values that `schema`, found at `where`, allows."""
        if schema is True:
            return _anything(_DEPTH)
        if not isinstance(schema, dict):
            raise GuideError(f"{where}: a schema must be an object or true")
        if "$ref" in schema:
            self._only(schema, {"$ref"}, where)
            return self._reference(schema["$ref"], where)
        if "const" in schema:
            self._only(schema, {"const", "type"}, where)
            return _constant(schema["const"])
        if "enum" in schema:
            self._only(schema, {"enum", "type"}, where)
            values = schema["enum"]
            if not isinstance(values, list) or not values:
                raise GuideError(f"{where}/enum: must be a list with at least one value")
            return either(_constant(value) for value in values)
        if "anyOf" in schema:
            self._only(schema, {"anyOf"}, where)
            return either(self.value(each, f"{where}/anyOf") for each in self._list(schema, "anyOf", where))
        return self._typed(schema, where)

    def _typed(self, schema: dict[str, Any], where: str) -> Symbols:
        kinds = schema.get("type")
        if kinds is None:
            kinds = [kind for kind, words in _KEYWORDS.items() if words & schema.keys()][:1]
            if not kinds:
                self._only(schema, set(), where)
                return _anything(_DEPTH)
        kinds = kinds if isinstance(kinds, list) else [kinds]
        if not kinds or not all(isinstance(kind, str) and kind in _KEYWORDS for kind in kinds):
            raise GuideError(f"{where}/type: {schema.get('type')!r} is not a JSON type")
        self._only(schema, {"type"}.union(*(_KEYWORDS[kind] for kind in kinds)), where)
        return either(self._one_type(kind, schema, where) for kind in kinds)

    def _one_type(self, kind: str, schema: dict[str, Any], where: str) -> Symbols:
        if kind == "object":
            return self._object(schema, where)
        if kind == "array":
            return self._array(schema, where)
        if kind == "string":
            return self._string(schema, where)
        if kind in ("integer", "number"):
            return _number(schema, kind, where)
        return text("null") if kind == "null" else either([text("true"), text("false")])

    def _object(self, schema: dict[str, Any], where: str) -> Symbols:
        properties = schema.get("properties", {})
        required = schema.get("required", [])
        if not isinstance(properties, dict) or not isinstance(required, list):
            raise GuideError(f"{where}: properties must be an object and required a list")
        more = schema.get("additionalProperties", True)
        named = {name: self.value(each, f"{where}/properties/{name}") for name, each in properties.items()}
        for name in required:
            if name not in named:
                if more is False:
                    raise GuideError(f"{where}/required: {name!r} is not among the properties")
                named[name] = self.value(more, f"{where}/additionalProperties")
        if not named:
            value = () if more is False else self.value(more, f"{where}/additionalProperties")
            return text("{}") if more is False else _free_object(value)
        first: Symbols = ()  # what can follow when no member was written yet,
        later: Symbols = ()  # and when one was
        for name, value in reversed(named.items()):
            member = (*text(json.dumps(name) + ": "), *value)
            skip = [] if name in required else [first]
            first, later = (
                either([(*member, *later), *skip]),
                either([(*text(", "), *member, *later), *([later] if skip else [])]),
            )
        return (*text("{"), *first, *text("}"))

    def _array(self, schema: dict[str, Any], where: str) -> Symbols:
        prefix = [self.value(each, f"{where}/prefixItems") for each in schema.get("prefixItems", [])]
        rest = schema.get("items", True)
        least = _count(schema, "minItems", where, len(prefix))
        most = _count(
            schema, "maxItems", where, max(least, len(prefix)) + (0 if rest is False else _MORE_ITEMS)
        )
        if most < least or len(prefix) > most or (rest is False and least > len(prefix)):
            raise GuideError(f"{where}: no array has {least} to {most} such items")
        items = list(prefix)
        if rest is not False and most > len(prefix):
            items += [self.value(rest, f"{where}/items")] * (most - len(prefix))
        tail: Symbols = ()
        for position in reversed(range(len(items))):
            one = (*(text(", ") if position else ()), *items[position], *tail)
            tail = one if position < max(least, len(prefix)) else either([(), one])
        return (*text("["), *tail, *text("]"))

    def _string(self, schema: dict[str, Any], where: str) -> Symbols:
        if "pattern" in schema:
            self._only(schema, {"pattern", "type"}, where)
            if not isinstance(schema["pattern"], str):
                raise GuideError(f"{where}/pattern: must be a string")
            inside = compile_regex(schema["pattern"], _in_string)
        else:
            least = _count(schema, "minLength", where, 0)
            most = _count(schema, "maxLength", where, least + _MORE_CHARACTERS)
            if most < least:
                raise GuideError(f"{where}: maxLength is below minLength")
            inside = repeat(characters(_PLAIN), least, most)
        return (*text('"'), *inside, *text('"'))

    def _reference(self, reference: Any, where: str) -> Symbols:
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise GuideError(f"{where}/$ref: only references inside the schema are followed")
        if reference not in self._references:
            rule = self._references[reference] = Rule()
            target = self._root
            for step in reference[1:].split("/")[1:]:
                step = step.replace("~1", "/").replace("~0", "~")
                if not isinstance(target, dict) or step not in target:
                    raise GuideError(f"{where}/$ref: {reference!r} is not in the schema")
                target = target[step]
            rule.choices = [self.value(target, reference)]
        return (self._references[reference],)

    def _only(self, schema: dict[str, Any], known: set[str] | frozenset[str], where: str) -> None:
        unknown = sorted(schema.keys() - known - _NOTES)
        if unknown:
            raise GuideError(f"{where}: {', '.join(unknown)} cannot be enforced here")

    def _list(self, schema: dict[str, Any], name: str, where: str) -> list[Any]:
        found = schema[name]
        if not isinstance(found, list) or not found:
            raise GuideError(f"{where}/{name}: must be a list with at least one entry")
        return found


def _constant(value: Any) -> Symbols:
    return text(json.dumps(value, ensure_ascii=False))


def _in_string(ranges: CodeRanges) -> Symbols:
    """A character inside a JSON string; one that needs an escape only when the pattern names it by itself."""
    plain = intersect(ranges, _PLAIN)
    if not plain and len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return text(json.dumps(chr(ranges[0][0]))[1:-1])
    return characters(plain)


def _anything(depth: int) -> Symbols:
    string = (*text('"'), *repeat(characters(_PLAIN), 0, _MORE_CHARACTERS), *text('"'))
    choices = [string, (*_SIGN, *_NATURAL, *_FRACTION), text("true"), text("false"), text("null")]
    if depth > 0:
        inner = _anything(depth - 1)
        choices += [_free_object(inner), (*text("["), *_listed(inner, _MORE_ITEMS), *text("]"))]
    return either(choices)


def _free_object(value: Symbols) -> Symbols:
    return (*text("{"), *_listed((*_KEY, *text(": "), *value), _MORE_MEMBERS), *text("}"))


def _listed(item: Symbols, most: int) -> Symbols:
    return either([(), (*item, *repeat((*text(", "), *item), 0, most - 1))])


def _count(schema: dict[str, Any], name: str, where: str, default: int) -> int:
    value = schema.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= 10_000:
        raise GuideError(f"{where}/{name}: must be a whole number from 0 to 10000")
    return value


def _number(schema: dict[str, Any], kind: str, where: str) -> Symbols:
    bounds = {word: schema[word] for word in _KEYWORDS[kind] if word in schema}
    if not all(isinstance(bound, int | float) and not isinstance(bound, bool) for bound in bounds.values()):
        raise GuideError(f"{where}: bounds must be numbers")
    fraction = _FRACTION if kind == "number" else ()
    if not bounds:
        return (*_SIGN, *_NATURAL, *fraction)
    # Between two bounds, and next to a single one, whole numbers are listed one by one.
    lows = [-(-bounds["minimum"] // 1)] if "minimum" in bounds else []
    lows += [bounds["exclusiveMinimum"] // 1 + 1] if "exclusiveMinimum" in bounds else []
    highs = [bounds["maximum"] // 1] if "maximum" in bounds else []
    highs += [-(-bounds["exclusiveMaximum"] // 1) - 1] if "exclusiveMaximum" in bounds else []
    low = int(max(lows)) if lows else int(min(highs)) - 999
    high = int(min(highs)) if highs else low + 999
    if low > high:
        raise GuideError(f"{where}: no whole number lies within the bounds")
    return either(literal(str(value).encode()) for value in range(low, min(high, low + 999) + 1))
