"""Structural tags: free text in which certain beginnings oblige the model to a structure.

Two forms are taken: the older one with `structures` and `triggers`, and a `format` of nested parts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from openengine_adapters.reference.guided.ebnf import compile_ebnf
from openengine_adapters.reference.guided.grammar import (
    ANY,
    GuideError,
    Rule,
    Symbols,
    characters,
    complement,
    either,
    text,
)
from openengine_adapters.reference.guided.json_schema import schema_grammar
from openengine_adapters.reference.guided.regex import compile_regex


def compile_structural_tag(source: str) -> Symbols:
    """Return the grammar of a structural tag in JSON. Raises `GuideError`."""
    try:
        tag = json.loads(source)
    except ValueError as error:
        raise GuideError(f"is not JSON: {error}") from None
    if not isinstance(tag, dict) or tag.get("type", "structural_tag") != "structural_tag":
        raise GuideError('must be an object of "type": "structural_tag"')
    if "format" in tag:
        return _format(tag["format"])
    tags = [
        (_string(each, "begin"), schema_grammar(each.get("schema", True)), _string(each, "end"))
        for each in _objects(tag, "structures")
    ]
    return _triggered(tags, _strings(tag, "triggers"), at_least_one=False, stop_after_first=False)


def _format(part: Any) -> Symbols:
    if not isinstance(part, dict):
        raise GuideError("a format must be an object")
    kind = part.get("type")
    if kind == "const_string":
        return text(_string(part, "value"))
    if kind == "json_schema":
        return schema_grammar(part.get("json_schema"))
    if kind == "regex":
        return compile_regex(_string(part, "pattern"))
    if kind == "grammar":
        return compile_ebnf(_string(part, "grammar"))
    if kind == "any_text":
        return _free_text([])
    if kind == "sequence":
        return tuple(symbol for each in _objects(part, "elements") for symbol in _format(each))
    if kind == "or":
        return either(_format(each) for each in _objects(part, "elements"))
    if kind == "tag":
        begin, content, end = _tag(part)
        return (*text(begin), *content, *text(end))
    if kind == "triggered_tags":
        tags = [_tag(each) for each in _objects(part, "tags")]
        flags = {name: part.get(name, False) is True for name in ("at_least_one", "stop_after_first")}
        return _triggered(tags, _strings(part, "triggers"), **flags)
    raise GuideError(f"a format of type {kind!r} is not supported")


def _tag(part: dict[str, Any]) -> tuple[str, Symbols, str]:
    begin, end, content = _string(part, "begin"), _string(part, "end"), part.get("content")
    if isinstance(content, dict) and content.get("type") == "any_text":
        return begin, _text_before(end), ""
    return begin, _format(content), end


def _triggered(
    tags: Sequence[tuple[str, Symbols, str]],
    triggers: list[str],
    *,
    at_least_one: bool,
    stop_after_first: bool,
) -> Symbols:
    """Free text and tags in turn; after a trigger one of the tags that begin with it must follow."""
    after: Rule = Rule()  # what can come once a tag is complete
    follows = []
    for trigger in triggers:
        begun = [
            (*text(begin[len(trigger) :]), *content, *text(end), after)
            for begin, content, end in tags
            if begin.startswith(trigger)
        ]
        if not begun:
            raise GuideError(f"no structure begins with the trigger {trigger!r}")
        follows.append((trigger, either(begun)))
    free = _free_text(follows)
    after.choices = [()] if stop_after_first else [free]
    if not at_least_one:
        return free
    return either((*text(begin), *content, *text(end), after) for begin, content, end in tags)


def _free_text(follows: Sequence[tuple[str, Symbols]]) -> Symbols:
    """Any text that may end anywhere; once it ends with a trigger, what belongs to that follows."""
    return _scan([trigger for trigger, _ in follows], dict(follows), may_end=True)


def _text_before(end: str) -> Symbols:
    """Any text up to and with the first `end`."""
    return _scan([end], {end: ()}, may_end=False)


def _scan(words: list[str], after: dict[str, Symbols], *, may_end: bool) -> Symbols:
    """A rule for each beginning of a word that the text can currently end with."""
    beginnings = sorted({word[:cut] for word in words for cut in range(len(word))} | {""})
    states = {beginning: Rule() for beginning in beginnings}
    letters = sorted(set("".join(words)))
    others = complement([(ord(letter), ord(letter)) for letter in letters]) if letters else ANY
    for beginning, state in states.items():
        state.choices = [()] if may_end else []
        state.choices.append((*characters(others), states[""]))
        for letter in letters:
            ending = beginning + letter
            found = [word for word in words if ending.endswith(word)]
            if found:
                state.choices.append((*text(letter), *after[found[0]]))
            else:
                while ending not in states:
                    ending = ending[1:]
                state.choices.append((*text(letter), states[ending]))
    return (states[""],)


def _objects(part: dict[str, Any], name: str) -> list[dict[str, Any]]:
    found = part.get(name)
    if not isinstance(found, list) or not found or not all(isinstance(each, dict) for each in found):
        raise GuideError(f"{name} must be a list of objects, not empty")
    return found


def _strings(part: dict[str, Any], name: str) -> list[str]:
    found = part.get(name)
    if not isinstance(found, list) or not found or not all(isinstance(each, str) and each for each in found):
        raise GuideError(f"{name} must be a list of strings, not empty")
    return found


def _string(part: dict[str, Any], name: str) -> str:
    found = part.get(name)
    if not isinstance(found, str) or not found:
        raise GuideError(f"{name} must be a string, not empty")
    return found
