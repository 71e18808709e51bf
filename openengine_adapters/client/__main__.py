"""The command `openengine`: everything the contract offers, from a shell.

Exit codes: 0 done; 1 the server rejected the request, or it failed; 2 wrong use of the command; 3 the server
cannot be reached or is not compatible; 130 interrupted; 141 the reader of the output went away.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import sys
from collections.abc import Coroutine, Sequence
from typing import Any

from openengine_adapters.client.arguments import Parser, UsageError, global_options

_COMMANDS = {
    "generate": "continue a prompt and print the answer as it comes",
    "embed": "turn texts into vectors",
    "classify": "give texts class values",
    "score": "rate candidates against a query",
    "info": "who the server is: engine, role, contract revision, parallelism",
    "models": "limits and abilities of the served models",
    "health": "whether the server is ready; --wait waits until it is",
    "load": "running and waiting requests, KV blocks",
    "abort": "stop one request or all of them",
    "drain": "let running requests end and take no new ones",
    "lora": "load, unload and list LoRA adapters",
    "events": "what the engine's scheduler does, as it happens",
    "kv": "where KV events come from, and what they tell of the prefix cache",
}

_INTERRUPTED, _BROKEN_PIPE = 130, 141


class _Command(Parser):
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
    try:
        return asyncio.run(prepare(argv))
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        # Python flushes standard output once more at exit; let that go nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE


def prepare(argv: Sequence[str] | None = None) -> Coroutine[Any, Any, int]:
    """Read arguments and inputs; return the coroutine that does the rest and gives the exit code.

    Raises `SystemExit` for wrong use.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # what went wrong is said once, by us
    args = _parser().parse_args(argv)
    # Not before the arguments are known to be right, for this takes a while.
    from openengine_adapters.client.report import report
    from openengine_adapters.client.terminal import Terminal

    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    terminal = Terminal(json=args.output == "json")
    try:
        work: Coroutine[Any, Any, int] = args.run(args, terminal)
    except UsageError as error:
        raise SystemExit(report(error, terminal)) from None

    async def finish() -> int:
        from openengine_adapters.client.errors import ClientError

        try:
            return await work
        except (UsageError, ClientError) as error:
            return report(error, terminal)

    return finish()


def _parser() -> Parser:
    before: Any = global_options(defaults=True)
    after: Any = global_options(defaults=False)
    parser = Parser(
        prog="openengine",
        description="Talk to an inference engine that serves OpenEngine v1.",
        epilog="Exit codes: 0 done, 1 rejected or failed, 2 wrong use, 3 no reachable compatible server, "
        "130 interrupted, 141 the output's reader went away.",
        parents=[before],
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=_Command)
    for name, summary in _COMMANDS.items():
        commands.add_parser(
            name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.", parents=[after]
        )
    return parser


if __name__ == "__main__":
    sys.exit(main())
