"""Context-free grammars over bytes, and the machine that follows one.

Every kind of guide becomes such a grammar. A sequence is a tuple of symbols: a terminal is a set of bytes, written as
the bits of an integer, and a rule is a choice between sequences. The machine keeps every stack of symbols that could
still be matched, so it knows what may follow, and how many bytes the shortest way to the end still needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

UNREACHABLE = 1 << 40
"""Length of what can never be completed."""

MOST_RULES = 20_000
MOST_STACKS = 5_000
MOST_STATES = 5_000
"""States whose continuations are remembered."""


class GuideError(ValueError):
    """The guide is malformed, or says something that this engine cannot enforce; the message tells which."""


class Rule:
    """A choice between sequences. `shortest` is filled in by `check`."""

    __slots__ = ("choices", "shortest")

    def __init__(self, choices: Iterable[Symbols] = ()) -> None:
        self.choices = list(choices)
        self.shortest = UNREACHABLE


Symbols = tuple["int | Rule", ...]

# ------------------------------------------------------------------------------------------------ combinators


def literal(data: bytes) -> Symbols:
    """Exactly these bytes."""
    return tuple(1 << byte for byte in data)


def text(characters: str) -> Symbols:
    """Exactly this text."""
    return literal(characters.encode())


def either(choices: Iterable[Symbols]) -> Symbols:
    """One of the choices."""
    found = list(dict.fromkeys(choices))
    return found[0] if len(found) == 1 else (Rule(found),)


def repeat(symbols: Symbols, least: int, most: int | None) -> Symbols:
    """The sequence `least` to `most` times, without end when `most` is None."""
    if max(least, most or 0) * max(len(symbols), 1) > MOST_RULES:
        raise GuideError(f"repeats something more than {MOST_RULES} times")
    if most is None:
        more = Rule()
        more.choices = [(), (*symbols, more)]
        return symbols * least + (more,)
    tail: Symbols = ()
    for _ in range(most - least):
        tail = either([(), symbols + tail])
    return symbols * least + tail


CodeRanges = Sequence[tuple[int, int]]

ANY: CodeRanges = ((0, 0xD7FF), (0xE000, 0x10FFFF))
"""Every character; both ends of a range belong to it."""


def intersect(ranges: CodeRanges, other: CodeRanges) -> list[tuple[int, int]]:
    """The characters that are in both."""
    common = [(max(a, c), min(b, d)) for a, b in ranges for c, d in other]
    return sorted((low, high) for low, high in common if low <= high)


def complement(ranges: CodeRanges) -> list[tuple[int, int]]:
    """The characters that are in none of `ranges`."""
    left, start = [], 0
    for low, high in sorted(ranges):
        if start < low:
            left.append((start, low - 1))
        start = max(start, high + 1)
    return intersect([*left, (start, 0x10FFFF)], ANY)


def characters(ranges: CodeRanges) -> Symbols:
    """One character out of `ranges`, as its UTF-8 bytes."""
    choices: dict[
        Symbols, int
    ] = {}  # by what follows the first byte, so that single bytes become one terminal
    for low, high in intersect(ranges, ANY):
        for first, last in ((0, 0x7F), (0x80, 0x7FF), (0x800, 0xFFFF), (0x10000, 0x10FFFF)):
            if max(low, first) <= min(high, last):
                lowest, highest = chr(max(low, first)).encode(), chr(min(high, last)).encode()
                for head, *tail in _byte_ranges(lowest, highest):
                    choices[tuple(tail)] = choices.get(tuple(tail), 0) | head
    if not choices:
        return (0,)
    return either((head, *tail) for tail, head in choices.items())


def _byte_ranges(low: bytes, high: bytes) -> list[list[int]]:
    """Cover the encodings from `low` to `high`, of one length, with products of byte sets."""
    if len(low) == 1:
        return [[_bits(low[0], high[0])]]
    if low[0] == high[0]:
        return [[1 << low[0], *tail] for tail in _byte_ranges(low[1:], high[1:])]
    rest = len(low) - 1
    start, end = low[0], high[0]
    covered = []
    if low[1:] != b"\x80" * rest:
        covered += [[1 << start, *tail] for tail in _byte_ranges(low[1:], b"\xbf" * rest)]
        start += 1
    if high[1:] != b"\xbf" * rest:
        covered += [[1 << end, *tail] for tail in _byte_ranges(b"\x80" * rest, high[1:])]
        end -= 1
    if start <= end:
        covered.append([_bits(start, end), *[_bits(0x80, 0xBF)] * rest])
    return covered


def _bits(first: int, last: int) -> int:
    return (1 << last + 1) - (1 << first)


# --------------------------------------------------------------------------------------------------- checking


def check(start: Symbols) -> None:
    """Compute every rule's shortest length. Raises `GuideError` for a grammar that cannot be followed."""
    rules = _reachable(start)
    changed = True
    while changed:
        changed = False
        for rule in reversed(rules):
            shortest = min([length(choice) for choice in rule.choices], default=UNREACHABLE)
            if shortest < rule.shortest:
                rule.shortest, changed = shortest, True
    if length(start) >= UNREACHABLE:
        raise GuideError("can never be completed")
    if _is_left_recursive(rules):
        raise GuideError("is left-recursive; write the recursion on the right")


def length(symbols: Symbols) -> int:
    """Bytes of the shortest match."""
    lengths = [
        (1 if symbol else UNREACHABLE) if isinstance(symbol, int) else symbol.shortest for symbol in symbols
    ]
    return min(sum(lengths), UNREACHABLE)


def _reachable(start: Symbols) -> list[Rule]:
    found: dict[Rule, None] = {}
    todo = [start]
    while todo:
        for symbol in todo.pop():
            if isinstance(symbol, Rule) and symbol not in found:
                found[symbol] = None
                todo.extend(symbol.choices)
        if len(found) > MOST_RULES:
            raise GuideError(f"is too large: more than {MOST_RULES} rules")
    return list(found)


def _is_left_recursive(rules: list[Rule]) -> bool:
    """Whether some rule can come back to itself without reading a byte, with more to match each time."""
    number = {rule: position for position, rule in enumerate(rules)}
    leads: list[
        list[tuple[int, bool]]
    ] = []  # the rules that can come first in a rule; whether something follows
    for rule in rules:
        first = []
        for choice in rule.choices:
            for position, symbol in enumerate(choice):
                if isinstance(symbol, int):
                    break
                first.append((number[symbol], position + 1 < len(choice)))
                if symbol.shortest:
                    break
        leads.append(first)
    reach = [0] * len(rules)
    changed = True
    while changed:
        changed = False
        for each in reversed(range(len(rules))):
            bits = reach[each]
            for other, _ in leads[each]:
                bits |= 1 << other | reach[other]
            if bits != reach[each]:
                reach[each], changed = bits, True
    return any(
        follows and (other == each or reach[other] >> each & 1)
        for each, first in enumerate(leads)
        for other, follows in first
    )


# ---------------------------------------------------------------------------------------------------- machine


class Stack:
    """Symbols still to be matched, topmost first; equal stacks are one object."""

    __slots__ = ("distance", "rest", "top")

    def __init__(self, top: int | Rule, rest: Stack | None) -> None:
        self.top = top
        self.rest = rest
        self.distance: int = length((top,)) + (rest.distance if rest is not None else 0)


State = frozenset["Stack | None"]
"""All ways to go on; None is the way that is at its end."""


class Machine:
    """Follows one checked grammar, byte by byte."""

    def __init__(self, start: Symbols) -> None:
        self._stacks: dict[tuple[int | Rule, Stack | None], Stack] = {}
        self._splits: dict[State, list[tuple[int, State]]] = {}
        self.start = self._expand([self._push(start, None)])

    def advance(self, state: State, byte: int) -> State:
        """The state after one more byte; empty when the byte does not fit."""
        for bits, after in self.split(state):
            if bits >> byte & 1:
                return after
        return frozenset()

    def split(self, state: State) -> list[tuple[int, State]]:
        """The bytes that fit, in groups that lead to the same state."""
        known = self._splits.get(state)
        if known is not None:
            return known
        groups: list[tuple[int, list[Stack | None]]] = [((1 << 256) - 1, [])]
        for stack in state:
            if stack is not None and isinstance(stack.top, int):
                top, rest = stack.top, stack.rest
                groups = [
                    group
                    for bits, after in groups
                    for group in ((bits & top, [*after, rest]), (bits & ~top, after))
                    if group[0]
                ]
        if len(self._splits) >= MOST_STATES:
            self._splits.clear()
        found = self._splits[state] = [(bits, self._expand(after)) for bits, after in groups if after]
        return found

    @staticmethod
    def distance(state: State) -> int:
        """Bytes to the nearest end."""
        return min(0 if stack is None else stack.distance for stack in state)

    def _push(self, symbols: Symbols, rest: Stack | None) -> Stack | None:
        for symbol in reversed(symbols):
            key = (symbol, rest)
            stack = self._stacks.get(key)
            if stack is None:
                stack = self._stacks[key] = Stack(symbol, rest)
            rest = stack
        return rest

    def _expand(self, stacks: Iterable[Stack | None]) -> State:
        """Replace rules on top by their choices until only terminals are on top."""
        todo = list(stacks)
        seen: set[Stack | None] = set()
        found: set[Stack | None] = set()
        while todo:
            stack = todo.pop()
            if stack is None or isinstance(stack.top, int):
                found.add(stack)
            elif stack not in seen:
                seen.add(stack)
                if len(seen) > MOST_STACKS:
                    raise GuideError("is too ambiguous to follow")
                todo.extend(self._push(choice, stack.rest) for choice in stack.top.choices)
        return frozenset(found)
