# SPDX-License-Identifier: Apache-2.0
"""The flags of a prefill and a decode server, as data, for the tests, the demo and the conformance suite."""

from __future__ import annotations

import json
from typing import Any

from tests.support import cpu_env
from tests.support.server import free_port

BLOCKS = ["--num-gpu-blocks-override", "2048"]
"""Room for 64 prompts of full length. vLLM describes each block to NIXL, its own and each peer's; with a whole GiB of
the tiny model's small ones that takes a minute each time."""

Side = tuple[list[str], dict[str, str]]
"""Flags and environment of one server, to be laid over those of `cpu_env`."""


def vllm_side(connector: str, role: str, **extra: Any) -> Side:
    """One side of a hand-off with vLLM; `extra` goes to its connector."""
    config: dict[str, Any] = {"kv_connector": connector, "kv_role": role}
    if extra:
        config["kv_connector_extra_config"] = extra
    return ["--kv-transfer-config", json.dumps(config), *BLOCKS], cpu_env.nixl_env()


def vllm_pair(connector: str = "NixlConnector", **extra: Any) -> tuple[Side, Side]:
    """Both sides of it."""
    return vllm_side(connector, "kv_producer", **extra), vllm_side(connector, "kv_consumer", **extra)


def sglang_pair(*more: str) -> tuple[Side, Side]:
    """Both sides of a hand-off with SGLang, Mooncake over TCP; `more` flags go to both."""
    port = str(free_port())
    common = ["--disaggregation-bootstrap-port", port, *more]
    prefill = ["--disaggregation-mode", "prefill", *common]
    # What a decode engine takes back from a request, it can keep on a CPU only in this way.
    decode = [
        "--disaggregation-mode",
        "decode",
        "--disaggregation-decode-retraction-backup",
        "cpu_tensor",
        *common,
    ]
    return (prefill, cpu_env.mooncake_env()), (decode, cpu_env.mooncake_env())


def pair_flags(engine: str) -> tuple[Side, Side]:
    """The pair of an engine, with its defaults."""
    return vllm_pair() if engine == "vllm" else sglang_pair()
