# SPDX-License-Identifier: Apache-2.0
"""Models, environment and engine flags for running the real engines on a CPU, as data.

Tests, `make demo`, the benchmarks and `make conformance` all take them from here.  Only the standard library
is imported, so that every virtual environment, and none, can use it.  As a script it prints for the shell:

    python tests/support/cpu_env.py model tiny-llama       # the folder
    python tests/support/cpu_env.py env vllm               # NAME=value, one a line
    python tests/support/cpu_env.py flags vllm tiny-llama  # one word a line
    python tests/support/cpu_env.py lora-flags vllm        # one word a line
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

SMOLLM2: Final = "SmolLM2-135M-Instruct"
TINY_LLAMA: Final = "tiny-llama"

LORA_ATTENTION: Final = "tiny-llama-lora-attention"
"""An adapter of the tiny Llama: rank 4 on the attention's queries and values."""

LORA_EVERYWHERE: Final = "tiny-llama-lora-everywhere"
"""Another one: rank 8, with its own scaling, on every linear layer."""

ENGINES: Final = ("vllm", "sglang")

SGLANG_STAND_INS: Final = Path(__file__).resolve().parent / "sglang_cpu"
VLLM_PLUGIN: Final = Path(__file__).resolve().parent / "vllm_cpu"
NIXL_PLUGIN: Final = Path(__file__).resolve().parent / "vllm_nixl"

# No engine may look for models or send statistics over the network.
_COMMON_ENV: Final[Mapping[str, str]] = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def models_dir() -> Path:
    """The cache folder of the models: `$OPENENGINE_MODELS`, or under the user's cache folder."""
    given = os.environ.get("OPENENGINE_MODELS")
    if given:
        return Path(given).expanduser().absolute()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser().absolute() / "openengine-adapters" / "models"


def model(name: str) -> Path:
    """The folder of a model; FileNotFoundError, with the remedy, when it was not built yet."""
    folder = models_dir() / name
    if not folder.is_dir():
        raise FileNotFoundError(f"model {name} is not in {folder.parent}: run `make models` first")
    return folder


UNPAUSED: Final = {"VLLM_PLUGINS": ""}
"""What a measurement needs besides, so that vLLM's workers do not sleep between steps."""


def vllm_env() -> dict[str, str]:
    """What vLLM needs in its environment here, to be laid over `os.environ`.

    Unbound threads and one OpenMP thread each: with vLLM's own binding, processes that share a core spin
    against each other and a token takes seconds. And a plugin of ours, which has its workers sleep between steps.
    """
    return {
        **_COMMON_ENV,
        "PYTHONPATH": _python_path(VLLM_PLUGIN),
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
    }


def vllm_flags(name: str) -> list[str]:
    """The vLLM flags to serve a model of ours."""
    return [
        *("--model", str(model(name))),
        *("--dtype", "bfloat16"),
        *("--max-model-len", "1024"),
        *("--max-num-seqs", "64"),
        "--enforce-eager",
        *("--block-size", "32"),
        *("--seed", "0"),
    ]


def sglang_env() -> dict[str, str]:
    """What SGLang needs in its environment here, the path to our stand-ins for CUDA packages included.

    Without compiled kernels: the first request with a seed or a repetition penalty would wait half a minute for a
    C++ compiler, in each scheduler.
    """
    return {
        **_COMMON_ENV,
        "OMP_WAIT_POLICY": "PASSIVE",
        "PYTHONPATH": _python_path(SGLANG_STAND_INS),
        "SGLANG_USE_CPU_ENGINE": "1",
        "TORCH_COMPILE_DISABLE": "1",
    }


def sglang_flags(name: str) -> list[str]:
    """The SGLang flags to serve a model of ours.

    Its default attention back end wants AMX instructions, and idle schedulers would take a core each.
    """
    return [
        *("--model-path", str(model(name))),
        *("--device", "cpu"),
        *("--dtype", "bfloat16"),
        *("--attention-backend", "torch_native"),
        *("--sampling-backend", "pytorch"),
        *("--grammar-backend", "xgrammar"),
        "--disable-cuda-graph",
        *("--context-length", "1024"),
        *("--max-total-tokens", "8192"),
        *("--max-running-requests", "64"),
        *("--random-seed", "0"),
        "--sleep-on-idle",
    ]


def lora_flags(engine: str) -> list[str]:
    """More flags for an engine that serves the tiny Llama, to take the adapters of build_lora_adapters.py."""
    ranks = ["--enable-lora", "--max-lora-rank", "8"]
    if engine == "vllm":
        return [*ranks, "--max-loras", "2", "--max-cpu-loras", "3"]
    return [
        *ranks,
        *("--lora-target-modules", "all"),
        *("--lora-backend", "torch_native"),
        *("--max-loras-per-batch", "3"),  # requests without an adapter count as one
        *("--max-loaded-loras", "3"),
    ]


def vision_env(*plugins: Path) -> dict[str, str]:
    """What a vLLM server with a model that sees needs besides: torchvision, which needs its stand-in (venv.sh).

    `plugins` are what its own environment has on the path beside ours, which this replaces.
    """
    vision = SGLANG_STAND_INS.parents[2] / ".venv" / "vllm" / "vision"
    return {"PYTHONPATH": _python_path(VLLM_PLUGIN, *plugins, SGLANG_STAND_INS, vision)}


def nixl_env() -> dict[str, str]:
    """What vLLM's prefill and decode servers need besides: a plugin of ours has NIXL sleep while nothing arrives."""
    return {
        "PYTHONPATH": _python_path(VLLM_PLUGIN, NIXL_PLUGIN),
        "UCX_RCACHE_MAX_UNRELEASED": "1024",  # vLLM's own value, which it sets unless NIXL is imported before
    }


def mooncake_env() -> dict[str, str]:
    """What SGLang's prefill and decode servers need besides: Mooncake over TCP, and the library that it loads."""
    verbs = SGLANG_STAND_INS.parents[2] / ".venv" / "sglang" / "verbs"
    folders = [str(folder) for folder in sorted(verbs.glob("**/x86_64-linux-gnu"))]
    paths = [*folders, *filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep))]
    return {
        "LD_LIBRARY_PATH": os.pathsep.join(paths),
        "MOONCAKE_PROTOCOL": "tcp",
        "SGLANG_HOST_IP": "127.0.0.1",
    }


def _python_path(*first: Path) -> str:
    paths = [*map(str, first), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return os.pathsep.join(dict.fromkeys(paths))


def env(engine: str) -> dict[str, str]:
    """`vllm_env()` or `sglang_env()`."""
    return {"vllm": vllm_env, "sglang": sglang_env}[engine]()


def flags(engine: str, name: str) -> list[str]:
    """`vllm_flags(name)` or `sglang_flags(name)`."""
    return {"vllm": vllm_flags, "sglang": sglang_flags}[engine](name)


def main(words: list[str]) -> int:
    """Print what the words ask for, one item a line."""
    try:
        match words:
            case ["models-dir"]:
                lines = [str(models_dir())]
            case ["model", name]:
                lines = [str(model(name))]
            case ["env", "vllm" | "sglang" as engine]:
                lines = [f"{key}={value}" for key, value in sorted(env(engine).items())]
            case ["flags", "vllm" | "sglang" as engine, name]:
                lines = flags(engine, name)
            case ["lora-flags", "vllm" | "sglang" as engine]:
                lines = lora_flags(engine)
            case _:
                print(__doc__, file=sys.stderr)
                return 2
    except FileNotFoundError as error:
        print(error, file=sys.stderr)
        return 1
    print(*lines, sep="\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
