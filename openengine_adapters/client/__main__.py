"""The command `openengine`: everything the contract offers, from a shell.

Exit codes: 0 done; 1 the server rejected the request, or it failed; 2 wrong use of the command; 3 the server
cannot be reached or is not compatible; 130 interrupted; 141 the reader of the output went away.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from openengine_adapters.client.commands import UsageError

if TYPE_CHECKING:
    from openengine_adapters.client.terminal import Terminal

_COMMANDS = {
    "generate": "continue a prompt and print the answer as it comes",
    "info": "who the server is: engine, role, contract revision, parallelism",
    "models": "limits and abilities of the served models",
    "health": "whether the server is ready; --wait waits until it is",
    "load": "running and waiting requests, KV blocks",
    "abort": "stop one request or all of them",
}

_FAILED, _USAGE, _NO_SERVER, _INTERRUPTED, _BROKEN_PIPE = 1, 2, 3, 130, 141


class _Parser(argparse.ArgumentParser):
    """Reports wrong use on one line."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        sys.stderr.write(f"openengine: {message} (see `{self.prog} --help`)\n")
        raise SystemExit(_USAGE)


class _Command(_Parser):
    """Loads a command's module only when that command is the one asked for."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Add the command's own arguments, then parse."""
        name = self.prog.rpartition(" ")[2]
        module = importlib.import_module(f"openengine_adapters.client.commands.{name}")
        module.add_arguments(self)
        self.set_defaults(run=module.run)
        return super().parse_known_args(args, namespace)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # what went wrong is said once, by us
    try:
        args = _parser().parse_args(argv)
        return _run(args)
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        # Python flushes standard output once more at exit; let that go nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="openengine",
        description="Talk to an inference engine that serves OpenEngine v1.",
        epilog="Exit codes: 0 done, 1 rejected or failed, 2 wrong use, 3 no reachable compatible server, "
        "130 interrupted, 141 the output's reader went away.",
        parents=[_global_options(defaults=True)],
    )
    # The same options after the command's name too; without defaults, else they would undo those before it.
    after = _global_options(defaults=False)
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=_Command)
    for name, summary in _COMMANDS.items():
        commands.add_parser(
            name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.", parents=[after]
        )
    return parser


def _global_options(*, defaults: bool) -> Any:
    def default(value: Any) -> Any:
        return value if defaults else argparse.SUPPRESS

    env = os.environ.get
    parser = _Parser(add_help=False)
    group = parser.add_argument_group("connection and output")
    group.add_argument(
        "--target",
        metavar="HOST:PORT",
        default=default(env("OPENENGINE_TARGET") or "127.0.0.1:50051"),
        help="the server, or unix:PATH (default: $OPENENGINE_TARGET, else 127.0.0.1:50051)",
    )
    group.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=_seconds,
        default=default(None),
        help="give up on a call after so long (default: 30, none for streams)",
    )
    group.add_argument(
        "--connect-timeout",
        metavar="SECONDS",
        type=_seconds,
        default=default(10.0),
        help="give up on connecting after so long (default: 10)",
    )
    group.add_argument(
        "--output",
        choices=("text", "json"),
        default=default("text"),
        help="text for people, or one JSON object a line (default: text)",
    )
    group.add_argument("--tls", action="store_true", default=default(False), help="encrypt the connection")
    group.add_argument(
        "--ca",
        metavar="FILE",
        default=default(None),
        help="certificate authority that the server must have",
    )
    group.add_argument(
        "--cert", metavar="FILE", default=default(None), help="our own certificate, for mutual TLS"
    )
    group.add_argument("--key", metavar="FILE", default=default(None), help="the key of our own certificate")
    group.add_argument(
        "--tls-name", metavar="NAME", default=default(""), help="the name in the server's certificate"
    )
    group.add_argument(
        "--token-file",
        metavar="FILE",
        default=default(None),
        help="bearer token (default: $OPENENGINE_TOKEN)",
    )
    return parser


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e9:
        raise ValueError
    return value


_seconds.__name__ = "number of seconds"  # argparse puts it in its message


def _run(args: argparse.Namespace) -> int:
    from openengine_adapters.client.errors import ClientError
    from openengine_adapters.client.terminal import Terminal

    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    terminal = Terminal(json=args.output == "json")
    try:
        code = asyncio.run(args.run(args, terminal))
    except UsageError as error:
        terminal.error(str(error), code="USAGE")
        return _USAGE
    except ClientError as error:
        return _report(error, terminal)
    sys.stdout.flush()
    return int(code)


def _report(error: Exception, terminal: Terminal) -> int:
    import grpc

    from openengine_adapters.client import errors

    match error:
        case errors.Unreachable():
            hint = "is the server running there, and does --target say where it listens?"
            terminal.error(
                f"cannot reach {error.target}: {_cause(error.reason)}", code="UNREACHABLE", hint=hint
            )
            return _NO_SERVER
        case errors.Incompatible():
            terminal.error(
                str(error), code="INCOMPATIBLE", hint="use a client and a server of the same release"
            )
            return _NO_SERVER
        case errors.RpcRejected():
            hints = {
                grpc.StatusCode.UNAVAILABLE: "`openengine health --wait 60` waits until it is ready",
                grpc.StatusCode.UNIMPLEMENTED: "this server does not offer it",
                grpc.StatusCode.RESOURCE_EXHAUSTED: "try again when it has less to do",
                grpc.StatusCode.UNAUTHENTICATED: "give the token with --token-file or $OPENENGINE_TOKEN",
            }
            terminal.error(str(error), code=error.code.name, hint=hints.get(error.code, ""))
        case errors.EngineError():
            after = f" after {error.retry_after_ms / 1000:g} s" if error.retry_after_ms else ""
            hint = f"the same request can succeed{after}: try again" if error.retryable else ""
            terminal.error(f"the request failed: {error}", code=error.code, hint=hint)
        case errors.TimedOut():
            terminal.error(str(error), code="DEADLINE_EXCEEDED", hint="--timeout allows more")
        case errors.ConnectionLost():
            terminal.error(str(error), code="CONNECTION_LOST", hint="the server stopped or the network broke")
        case _:
            terminal.error(str(error), code="CONTRACT_VIOLATION")
    return _FAILED


def _cause(reason: str) -> str:
    """Return the last and plainest part of gRPC's account of a failed connection."""
    known = {
        "refused": "connection refused",
        "handshake failed": "the TLS handshake failed; does the server speak TLS, and do --ca and --tls-name fit?",
        "http1": "something else than a gRPC server answers there, or one that wants --tls",
        "resol": "no such host name",
        "Domain name not found": "no such host name",
        "No such file": "no such socket",
    }
    return next((text for mark, text in known.items() if mark in reason), reason)


if __name__ == "__main__":
    sys.exit(main())
