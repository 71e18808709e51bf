"""`openengine-reference`: the reference engine behind the OpenEngine contract."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from unittest import mock

from openengine.v1 import discovery_pb2
from openengine_adapters import launcher
from openengine_adapters.engine import StartupError
from openengine_adapters.launcher import launch
from openengine_adapters.options import (
    add_server_options,
    lora_argument,
    number_loras,
    server_options,
)
from openengine_adapters.reference.engine import ReferenceEngine
from openengine_adapters.reference.mutants import MUTANTS
from openengine_adapters.reference.settings import MODEL_ID, Faults, Settings

_ROLES = {
    "aggregated": discovery_pb2.ENGINE_ROLE_AGGREGATED,
    "prefill": discovery_pb2.ENGINE_ROLE_PREFILL,
    "decode": discovery_pb2.ENGINE_ROLE_DECODE,
}

_EPILOG = """\
This is a TEST TOOL. Its model is a toy that holds no knowledge; what is real is everything around it: streams,
log-probabilities, guides, the prefix cache and its events, sessions, load, failures.

example: openengine-reference --port 50051 --speed 50 --fail-after 20
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="openengine-reference",
        description="Serve the OpenEngine v1 contract with a small deterministic engine: a test tool, without a model.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    engine = parser.add_argument_group("engine")
    engine.add_argument("--model", default=MODEL_ID, help=f"model id to report (default: {MODEL_ID})")
    engine.add_argument("--served-model-name", default="", metavar="NAME", help="another name for the model")
    engine.add_argument("--model-seed", type=int, default=0, metavar="N", help="another toy of the same kind")
    engine.add_argument("--max-context", type=_at_least(32), default=2048, metavar="TOKENS")
    engine.add_argument(
        "--max-running", type=_at_least(1), default=8, metavar="N", help="requests at once, a rank"
    )
    engine.add_argument(
        "--max-waiting", type=_at_least(0), default=128, metavar="N", help="queued requests, a rank"
    )
    engine.add_argument(
        "--kv-blocks", type=_at_least(1), metavar="N", help="cache blocks of 16 tokens, a rank"
    )
    engine.add_argument(
        "--data-parallel-size", type=_at_least(1), default=1, metavar="N", help="number of ranks"
    )
    engine.add_argument("--enable-lora", action=argparse.BooleanOptionalAction, default=True)
    engine.add_argument("--lora", type=lora_argument, action="append", default=[], metavar="NAME=PATH")
    engine.add_argument(
        "--session-ttl", type=_number, default=30.0, metavar="S", help="life of a prefilled session"
    )
    faults = parser.add_argument_group("speed and failures")
    faults.add_argument(
        "--speed", type=_number, default=250.0, metavar="TOKENS_PER_S",
        help="tokens a second for each output, 0 for as fast as possible (default: 250)",
    )  # fmt: skip
    faults.add_argument(
        "--latency", type=_number, default=0.0, metavar="MS", help="least time to the first token"
    )
    faults.add_argument(
        "--fail-after", type=_at_least(1), metavar="N", help="fail each request after N tokens"
    )
    faults.add_argument("--die-after", type=_at_least(1), metavar="N", help="the engine dies after N tokens")
    faults.add_argument(
        "--hang-after", type=_at_least(1), metavar="N", help="the engine hangs after N tokens"
    )
    faults.add_argument(
        "--mutant", metavar="NAME", help="break one requirement; 'list' shows which there are"
    )
    add_server_options(parser)
    parser.set_defaults(kv_events=True)  # they cost nothing here
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the server; returns the process's exit code."""
    parser = _parser()
    parsed = parser.parse_args(arguments)
    if parsed.mutant == "list":
        return _list_mutants()
    try:
        settings = _settings(parsed)
    except (StartupError, ValueError) as error:
        parser.error(str(error))
    if not parsed.mutant:
        return launch(lambda: ReferenceEngine(settings), server_options(parsed))
    mutant = MUTANTS.get(parsed.mutant)
    if mutant is None:
        parser.error(f"there is no mutant {parsed.mutant!r}; --mutant list shows them")
    # The launcher makes the servicer itself, so a mutant hands it one that is spoilt from the start.
    with mock.patch.object(launcher, "OpenEngineServicer", mutant.servicer_type()):
        return launch(lambda: mutant.spoil_engine(ReferenceEngine(settings)), server_options(parsed))


def _list_mutants() -> int:
    for mutant in MUTANTS.values():
        flags = "".join(f" [{name}={value}]" for name, value in mutant.settings.items())
        print(f"{mutant.name:32} {mutant.breaks:10} {mutant.sentence}{flags}")
    return 0


def _settings(parsed: argparse.Namespace) -> Settings:
    if parsed.lora and not parsed.enable_lora:
        raise ValueError("--lora needs LoRA enabled")
    # By default every running request can use its whole context with one output.
    blocks = parsed.kv_blocks or max(1280, (parsed.max_running + 2) * parsed.max_context // 16)
    return Settings(
        model_id=parsed.model,
        served_model_name=parsed.served_model_name,
        role=_ROLES[parsed.role or "aggregated"],
        # Only sources that are advertised themselves have to be reachable from outside.
        host="127.0.0.1" if parsed.kv_source == "grpc" else parsed.host,
        seed=parsed.model_seed,
        speed=parsed.speed,
        latency=parsed.latency / 1000,
        max_context=parsed.max_context,
        max_running=parsed.max_running,
        max_waiting=parsed.max_waiting,
        kv_blocks=blocks,
        data_parallel_size=parsed.data_parallel_size,
        kv_events=parsed.kv_events,
        lora=parsed.enable_lora,
        loras=number_loras(parsed.lora),
        session_ttl=parsed.session_ttl,
        faults=Faults(fail_after=parsed.fail_after, die_after=parsed.die_after, hang_after=parsed.hang_after),
    )


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{text} is below {least}")
        return value

    return number


def _number(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number from 0 on")
    return value


if __name__ == "__main__":
    sys.exit(main())
