# SPDX-License-Identifier: Apache-2.0
"""Run the conformance suite against one of our servers.

Usage: conformance.py reference|vllm|sglang [--with-lora] [suite option]...

With --with-lora the server takes LoRA adapters, and the cases of LoRA run on two of ours.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.support import cpu_env
from tests.support.server import ServerFailed, executable, serving

WITH_LORA = "--with-lora"


def main(arguments: list[str]) -> int:
    """Start the server, run the suite on it, stop it, and return the suite's exit status."""
    if not arguments or arguments[0] not in ("reference", "vllm", "sglang"):
        print(__doc__, file=sys.stderr)
        return 2
    engine, *options = arguments
    suite = [executable("reference", "openengine-conformance")]
    flags: list[str] = []
    if WITH_LORA in options:
        options.remove(WITH_LORA)
        flags = cpu_env.lora_flags(engine)
        suite += ["--area", "lora"]
        for name in (cpu_env.LORA_ATTENTION, cpu_env.LORA_EVERYWHERE):
            suite += ["--lora", str(cpu_env.model(name))]
    try:
        with serving(engine, flags=flags) as server:
            return subprocess.run([*suite, "--target", server.target, *options], check=False).returncode
    except ServerFailed as error:
        print(f"conformance: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
