"""An async client for any server of the OpenEngine v1 contract, and the command `openengine`.

    async with await OpenEngineClient.connect("127.0.0.1:50051") as client:
        request = GenerateRequest(request_id="r1", model=client.default_model(), prompt="The capital of")
        async with client.generate(request) as generation:
            async for event in generation:
                ...

The client checks on connect that it and the server speak the same revision of the contract, repeats nothing
by itself, and reports every failure as a `ClientError`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from openengine_adapters.client.client import OpenEngineClient
    from openengine_adapters.client.compatibility import CLIENT_REVISION
    from openengine_adapters.client.connection import Tls
    from openengine_adapters.client.errors import (
        ClientError,
        ConnectionLost,
        ContractViolation,
        EngineError,
        Incompatible,
        RpcRejected,
        TimedOut,
        Unreachable,
    )
    from openengine_adapters.client.generate import (
        Finished,
        GenerateEvent,
        Generation,
        Output,
        PrefillReady,
        PromptTokens,
        Result,
        Tokens,
    )
    from openengine_adapters.client.streams import DrainStep

_HOMES = {
    "client": ("OpenEngineClient",),
    "compatibility": ("CLIENT_REVISION",),
    "connection": ("Tls",),
    "errors": (
        "ClientError",
        "ConnectionLost",
        "ContractViolation",
        "EngineError",
        "Incompatible",
        "RpcRejected",
        "TimedOut",
        "Unreachable",
    ),
    "generate": (
        "Finished",
        "GenerateEvent",
        "Generation",
        "Output",
        "PrefillReady",
        "PromptTokens",
        "Result",
        "Tokens",
    ),
    "streams": ("DrainStep",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "CLIENT_REVISION",
    "ClientError",
    "ConnectionLost",
    "ContractViolation",
    "DrainStep",
    "EngineError",
    "Finished",
    "GenerateEvent",
    "Generation",
    "Incompatible",
    "OpenEngineClient",
    "Output",
    "PrefillReady",
    "PromptTokens",
    "Result",
    "RpcRejected",
    "TimedOut",
    "Tls",
    "Tokens",
    "Unreachable",
]


# Names load when they are used: `openengine --help` must not wait for gRPC and the messages.
def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
