# SPDX-License-Identifier: Apache-2.0
"""A black-box conformance suite for servers of `openengine.v1`.

It talks gRPC to a running server and knows no engine. `run` is its library form; `openengine-conformance` its
command.
"""

from importlib import metadata

try:
    SUITE_VERSION = metadata.version("openengine-adapters")
except metadata.PackageNotFoundError:
    SUITE_VERSION = "0"

from openengine_conformance.library import run, run_async

__all__ = ["SUITE_VERSION", "run", "run_async"]
