# SPDX-License-Identifier: Apache-2.0
"""What a case says about what came back: expectations whose failures explain themselves."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise
from typing import NoReturn

import grpc

Code = grpc.StatusCode


class Failure(AssertionError):
    """The server broke a rule. `rule` is the requirement's id; empty means the first one of the case."""

    def __init__(self, problem: str, rule: str = "") -> None:
        super().__init__(problem)
        self.problem = problem
        self.rule = rule


class Skip(Exception):
    """The case can't tell anything about this server; the message says why."""


class Refused(Exception):
    """A call ended with a status before any response."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(f"{code.name}: {details}")
        self.code = code
        self.details = details


def skip(reason: str) -> NoReturn:
    """End the case without a verdict."""
    raise Skip(reason)


def fail(problem: str, rule: str = "") -> NoReturn:
    """End the case: the server broke a rule."""
    raise Failure(problem, rule)


def expect(condition: object, problem: str, rule: str = "") -> None:
    """Require `condition`; `problem` says what came instead, as a sentence about the server's answer."""
    if not condition:
        raise Failure(problem, rule)


def expect_equal(actual: object, expected: object, what: str, rule: str = "") -> None:
    """Require that `what` is `expected`."""
    if actual != expected:
        raise Failure(f"{what} is {shorten(actual)}, not {shorten(expected)}", rule)


def expect_in(actual: object, allowed: Collection[object], what: str, rule: str = "") -> None:
    """Require that `what` is one of `allowed`."""
    if actual not in allowed:
        raise Failure(f"{what} is {shorten(actual)}, not one of {shorten(list(allowed))}", rule)


def expect_close(actual: float, expected: float, tolerance: float, what: str, rule: str = "") -> None:
    """Require that a number is finite and within `tolerance` of `expected`."""
    if not math.isfinite(actual) or abs(actual - expected) > tolerance:
        raise Failure(f"{what} is {actual:.6g}, not {expected:.6g} (±{tolerance:g})", rule)


def expect_unique(values: Iterable[object], what: str, rule: str = "") -> None:
    """Require that no value repeats."""
    seen: set[object] = set()
    for value in values:
        if value in seen:
            raise Failure(f"{what} {shorten(value)} comes twice", rule)
        seen.add(value)


def expect_increasing(values: Sequence[float], what: str, rule: str = "", *, strictly: bool = True) -> None:
    """Require that every value is above the one before it (`strictly`), or at least not below."""
    for before, after in pairwise(values):
        if after < before or (strictly and after == before):
            raise Failure(f"{what} goes from {before} to {after}", rule)


_INTERNALS = ("Traceback (most recent call last)", 'File "/', "site-packages", ".py:", '.py", line')


def expect_clean_status(code: grpc.StatusCode, details: str) -> None:
    """Require what holds for every non-OK status: an explanation, and nothing of the server's insides."""
    if code is grpc.StatusCode.UNKNOWN:
        raise Failure(
            f"the status is UNKNOWN: an exception escaped the handler ({shorten(details)})", "ERR-06"
        )
    if not details.strip() and code is not grpc.StatusCode.CANCELLED:
        raise Failure(f"the status {code.name} has no message", "ERR-06")
    for sign in _INTERNALS:
        if sign in details:
            raise Failure(f"the status message shows the server's insides: {shorten(details)}", "ERR-06")


def shorten(value: object, limit: int = 300) -> str:
    """Return a readable form of `value` that fits a report."""
    text = value.name if isinstance(value, grpc.StatusCode) else repr(value)
    return text if len(text) <= limit else f"{text[: limit - 20]} … ({len(text)} characters)"
