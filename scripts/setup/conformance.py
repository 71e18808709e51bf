# SPDX-License-Identifier: Apache-2.0
"""Run the conformance suite against one of our servers, and write its reports to build/conformance.

Usage: conformance.py reference|vllm|sglang [lora|ranks] [suite option]...

    lora    the server takes LoRA adapters, and the cases of LoRA run on two of ours
    ranks   two data-parallel ranks that publish KV events, and the cases of KV events, load and runtime events
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.support import cpu_env
from tests.support.server import REPOSITORY, ServerFailed, executable, serving

REPORTS = REPOSITORY / "build" / "conformance"
ENGINES = ("reference", "vllm", "sglang")


def _lora(engine: str) -> tuple[list[str], list[str]]:
    """The flags of the server and the options of the suite."""
    adapters = (cpu_env.model(name) for name in (cpu_env.LORA_ATTENTION, cpu_env.LORA_EVERYWHERE))
    options = [word for adapter in adapters for word in ("--lora", str(adapter))]
    return cpu_env.lora_flags(engine), ["--area", "lora", *options]


def _ranks(engine: str) -> tuple[list[str], list[str]]:
    """The flags of the server and the options of the suite."""
    flag = "--dp-size" if engine == "sglang" else "--data-parallel-size"
    flags = [flag, "2", "--kv-events", *([] if engine == "reference" else ["--kv-source", "both"])]
    return flags, ["--profile", "kv", "--profile", "observability"]


KINDS = {"lora": _lora, "ranks": _ranks}

# On a CPU SGLang wants to be told the cores of each data-parallel rank.
CORES = {"SGLANG_CPU_OMP_THREADS_BIND": "0|0"}


def main(arguments: list[str]) -> int:
    """Start the server, run the suite on it, stop it, and return the suite's exit status."""
    if not arguments or arguments[0] not in ENGINES:
        print(__doc__, file=sys.stderr)
        return 2
    engine, *options = arguments
    name, flags, env = engine, list[str](), dict[str, str]()
    if options and options[0] in KINDS:
        name = f"{engine}-{options[0]}"
        flags, chosen = KINDS[options[0]](engine)
        env = CORES if name == "sglang-ranks" else env
        options = [*chosen, *options[1:]]
    REPORTS.mkdir(parents=True, exist_ok=True)
    reports = (("--json", "json"), ("--html", "html"), ("--junit", "xml"))
    files = [word for option, kind in reports for word in (option, str(REPORTS / f"{name}.{kind}"))]
    suite = [executable("reference", "openengine-conformance"), *files, "--include-drain", *options]
    try:
        with serving(engine, flags=flags, env=env) as server:
            return subprocess.run([*suite, "--target", server.target], check=False).returncode
    except ServerFailed as error:
        print(f"conformance: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
