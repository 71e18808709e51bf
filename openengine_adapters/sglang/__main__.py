"""`openengine-sglang`: SGLang behind the OpenEngine contract.

Our own options are parsed first, without importing SGLang, so that `--help` and mistakes in them answer at once.
Everything else goes to SGLang's own parser; where both have an option (--host, --port) it is ours.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from openengine_adapters.options import add_server_options, server_options

_EPILOG = """\
Every other flag goes to SGLang, for example --context-length, --tp-size, --mem-fraction-static,
--enable-priority-scheduling. `openengine-sglang --help-engine` lists them all (it imports SGLang, which takes some
seconds); those of its HTTP server have no effect here.

example: openengine-sglang --model Qwen/Qwen3-0.6B --port 50051 --context-length 8192
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="openengine-sglang",
        usage="openengine-sglang --model MODEL [server options] [any SGLang server flag]",
        description="Serve the OpenEngine v1 contract with an SGLang engine in this process.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--model", "--model-path", help="model name or directory, as SGLang takes it (required)"
    )
    parser.add_argument("--help-engine", action="store_true", help="list SGLang's own flags and exit")
    add_server_options(parser)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the server; returns the process's exit code."""
    parser = _parser()
    ours, engine_flags = parser.parse_known_args(arguments)
    if not ours.help_engine and not ours.model:
        parser.error("--model is required, for example --model Qwen/Qwen3-0.6B")
    options = server_options(ours)
    try:
        from openengine_adapters.sglang.config import parse_flags
    except ImportError as error:
        print(
            f"cannot start: SGLang cannot be imported ({error}); install openengine-adapters[sglang]",
            file=sys.stderr,
        )
        return 1
    args = parse_flags(["--help"] if ours.help_engine else [*engine_flags, "--model-path", ours.model])

    from openengine_adapters.launcher import launch
    from openengine_adapters.publishers import KvEventsWanted
    from openengine_adapters.sglang.engine import SglangEngine

    kv_events = KvEventsWanted(options.kv_events, reachable=options.kv_source != "grpc")
    return launch(lambda: SglangEngine(args, options.hand_off, kv_events), options)


# SGLang spawns its processes, and each of them imports this file once more under another name.
if __name__ == "__main__":
    sys.exit(main())
