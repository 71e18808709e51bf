"""`openengine-vllm`: vLLM behind the OpenEngine contract.

Our own options are parsed first, without importing vLLM, so that `--help` and mistakes in them answer at once.
Everything else goes to vLLM's own parser.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Sequence

from openengine_adapters.options import add_server_options, lora_argument, number_loras, server_options

_EPILOG = """\
Every other flag goes to vLLM, for example --max-model-len, --tensor-parallel-size, --enable-prefix-caching,
--kv-events-config. `openengine-vllm --help-engine` lists them all (it imports vLLM, which takes some seconds).

example: openengine-vllm --model Qwen/Qwen3-0.6B --port 50051 --max-model-len 8192
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="openengine-vllm",
        usage="openengine-vllm --model MODEL [server options] [any vLLM engine flag]",
        description="Serve the OpenEngine v1 contract with a vLLM engine in this process.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--model", help="model name or directory, as vLLM takes it (required)")
    parser.add_argument(
        "--score-template", type=_file, metavar="FILE",
        help="chat template with the roles query and document that Score renders for a reranker; instructions are "
        "taken when it uses the variable instruction (default: what the model itself brings)",
    )  # fmt: skip
    parser.add_argument(
        "--lora-modules", type=lora_argument, nargs="+", default=[], metavar="NAME=PATH",
        help="LoRA adapters to load at the start; they need vLLM's --enable-lora (default: none)",
    )  # fmt: skip
    parser.add_argument("--help-engine", action="store_true", help="list vLLM's own flags and exit")
    add_server_options(parser)
    return parser


def _file(name: str) -> str:
    try:
        return pathlib.Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(f"{name!r} cannot be read ({error})") from None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the server; returns the process's exit code."""
    parser = _parser()
    ours, engine_flags = parser.parse_known_args(arguments)
    if not ours.help_engine and not ours.model:
        parser.error("--model is required, for example --model Qwen/Qwen3-0.6B")
    options = server_options(ours)
    try:
        from vllm import AsyncEngineArgs
        from vllm.utils.argparse_utils import FlexibleArgumentParser
    except ImportError as error:
        print(
            f"cannot start: vLLM cannot be imported ({error}); install openengine-adapters[vllm]",
            file=sys.stderr,
        )
        return 1
    engine_parser = AsyncEngineArgs.add_cli_args(
        FlexibleArgumentParser(prog="openengine-vllm", usage="openengine-vllm --model MODEL [flags below]")
    )
    parsed = engine_parser.parse_args(
        ["--help"] if ours.help_engine else [*engine_flags, "--model", ours.model]
    )

    from openengine_adapters.launcher import launch
    from openengine_adapters.publishers import KvEventsWanted
    from openengine_adapters.vllm.engine import VllmEngine

    kv_events = KvEventsWanted(options.kv_events, reachable=options.kv_source != "grpc")
    return launch(
        lambda: VllmEngine.from_flags(
            parsed,
            kv_events,
            ours.score_template or "",
            number_loras(ours.lora_modules),
            options.hand_off,
        ),
        options,
    )


if __name__ == "__main__":
    sys.exit(main())
