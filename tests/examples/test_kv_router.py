"""The example is documentation: this keeps it honest."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from tests.support.server import executable, serving

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "kv_router.py"
SMALL_CACHE = ("--kv-blocks", "110", "--speed", "0")
"""Room for half of the documents, so that it matters which server gets which."""


def test_routing_by_prefix_beats_round_robin() -> None:
    with serving("reference", flags=SMALL_CACHE) as one, serving("reference", flags=SMALL_CACHE) as two:
        run = subprocess.run(
            [executable("reference", "python"), str(EXAMPLE), one.target, two.target],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
    blind, informed = (float(share) for share in re.findall(r"([\d.]+)%", run.stdout))
    assert informed > 70
    assert informed > blind + 20
