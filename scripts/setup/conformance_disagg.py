# SPDX-License-Identifier: Apache-2.0
"""Run the conformance suite's profile `disaggregation` on a pair of our servers.

Usage: conformance_disagg.py reference|vllm|sglang [suite option]...
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.support import cpu_env
from tests.support.pairs import pair_flags
from tests.support.server import Server, ServerFailed, executable


def servers(engine: str) -> list[Server]:
    """A prefill server, a decode server and one that does both, not started."""
    if engine == "reference":
        return [Server(engine, ["--role", role], {}) for role in ("prefill", "decode", "aggregated")]
    flags, env = cpu_env.flags(engine, cpu_env.TINY_LLAMA), cpu_env.env(engine)
    sides = [*pair_flags(engine), ([], {})]
    return [Server(engine, [*flags, *more], {**env, **own}) for more, own in sides]


def main(arguments: list[str]) -> int:
    """Start the servers, run the suite on them, stop them, and return the suite's exit status."""
    if not arguments or arguments[0] not in ("reference", "vllm", "sglang"):
        print(__doc__, file=sys.stderr)
        return 2
    engine, *options = arguments
    suite = executable("reference", "openengine-conformance")
    with contextlib.ExitStack() as started:
        prefill, decode, aggregated = servers(engine)
        for server in (prefill, decode, aggregated):
            started.callback(server.stop)
            server.start()
        try:
            for server in (prefill, decode, aggregated):
                server.wait_ready()
        except ServerFailed as error:
            print(f"conformance: {error}", file=sys.stderr)
            return 1
        targets = ["--target", prefill.target, "--peer", decode.target, "--aggregated", aggregated.target]
        command = [suite, *targets, "--profile", "disaggregation", *options]
        return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
