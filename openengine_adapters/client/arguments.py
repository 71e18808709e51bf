"""The command line's grammar: the options that every command has, and how wrong use is reported."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn, Protocol

USAGE = 2  # the exit code of wrong use


class UsageError(Exception):
    """The command was not used as intended; nothing was sent to be computed."""


class Parser(argparse.ArgumentParser):
    """Reports wrong use on one line."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        """Say what is wrong and where to read more."""
        sys.stderr.write(f"openengine: {message} (see `{self.prog} --help`)\n")
        raise SystemExit(USAGE)


class AddAction(Protocol):
    """Adds one action of a command."""

    def __call__(self, name: str, summary: str) -> argparse.ArgumentParser:
        """Return the action's parser."""


def add_actions(parser: argparse.ArgumentParser) -> AddAction:
    """Return what adds actions, such as `load` in `openengine lora load`; the choice is `args.action`."""
    actions = parser.add_subparsers(metavar="ACTION", dest="action", required=True, parser_class=Parser)
    after: Any = global_options(defaults=False)

    def add(name: str, summary: str) -> argparse.ArgumentParser:
        description = f"{summary[0].upper()}{summary[1:]}."
        return actions.add_parser(name, help=summary, description=description, parents=[after])

    return add


def global_options(*, defaults: bool) -> argparse.ArgumentParser:
    """Return the options that may stand before and after a command's name.

    The ones after it come without defaults, since these would undo what was given before it.
    """
    env = os.environ.get
    parser = Parser(add_help=False, argument_default=None if defaults else argparse.SUPPRESS)
    group = parser.add_argument_group("connection and output")

    def add(name: str, default: Any, summary: str, **options: Any) -> None:
        if defaults:
            options["default"] = default
        group.add_argument(name, help=summary, **options)

    target = env("OPENENGINE_TARGET") or "127.0.0.1:50051"
    where = "the server, or unix:PATH (default: $OPENENGINE_TARGET, else 127.0.0.1:50051)"
    add("--target", target, where, metavar="HOST:PORT")
    call = "give up on a call after so long (default: 30, 300 for long ones, none for streams)"
    add("--timeout", None, call, type=positive, metavar="SECONDS")
    connect = "give up on connecting after so long (default: 10)"
    add("--connect-timeout", 10.0, connect, type=positive, metavar="SECONDS")
    output = "text for people, or one JSON object a line (default: text)"
    add("--output", "text", output, choices=("text", "json"))
    group.add_argument(
        "--tls",
        action="store_true",
        default=False if defaults else argparse.SUPPRESS,
        help="encrypt the connection; the options below imply it",
    )
    add("--ca", None, "the authority that signed the server's certificate", metavar="FILE")
    add("--cert", None, "our own certificate, for mutual TLS", metavar="FILE")
    add("--key", None, "the key of our own certificate", metavar="FILE")
    add("--tls-name", "", "the name in the server's certificate", metavar="NAME")
    add("--token-file", None, "a bearer token (default: $OPENENGINE_TOKEN)", metavar="FILE")
    return parser


def _integer(low: int, high: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text} is not in {low} ... {high}")
        return value

    return read


# What a field of the contract can hold; whether the value makes sense is the server's to judge.
int32 = _integer(-(1 << 31), (1 << 31) - 1)
int64 = _integer(-(1 << 63), (1 << 63) - 1)
uint32 = _integer(0, (1 << 32) - 1)
uint64 = _integer(0, (1 << 64) - 1)
count = _integer(1, (1 << 32) - 1)


def seconds(text: str) -> float:
    """Read a duration; its milliseconds fit into the contract's field."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 4_294_967:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return value


def positive(text: str) -> float:
    """Read a duration above zero."""
    value = seconds(text)
    if value == 0:
        raise argparse.ArgumentTypeError("must be above 0")
    return value
