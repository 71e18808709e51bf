# SPDX-License-Identifier: Apache-2.0
"""Run the conformance suite against one of our servers.

Usage: conformance.py reference|vllm|sglang [suite option]...
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.support.server import ServerFailed, executable, serving


def main(arguments: list[str]) -> int:
    """Start the server, run the suite on it, stop it, and return the suite's exit status."""
    if not arguments or arguments[0] not in ("reference", "vllm", "sglang"):
        print(__doc__, file=sys.stderr)
        return 2
    engine, *options = arguments
    suite = executable("reference", "openengine-conformance")
    try:
        with serving(engine) as server:
            return subprocess.run([suite, "--target", server.target, *options], check=False).returncode
    except ServerFailed as error:
        print(f"conformance: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
