# SPDX-License-Identifier: Apache-2.0
"""Channels to a server, and the discovery that opens a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import grpc

from openengine.v1 import discovery_pb2, model_pb2
from openengine.v1.service_pb2_grpc import OpenEngineStub
from openengine_conformance.offer import Offer
from openengine_conformance.options import Access

if TYPE_CHECKING:
    from openengine.v1.service_pb2_grpc import OpenEngineAsyncStub

CONNECT_TIMEOUT = 10.0

# A position with every candidate of a large vocabulary exceeds the 4 MiB that gRPC takes by default.
_CHANNEL_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),
]

# The smallest window that HTTP/2 flow control takes here: a client that does not read is felt at once.
_TINY_WINDOW: list[tuple[str, int]] = [("grpc.http2.lookahead_bytes", 1), ("grpc.http2.bdp_probe", 0)]


class Unreachable(Exception):
    """The server does not answer; the message says what was tried."""


class Connection:
    """One channel to one server, with the metadata that every call carries."""

    def __init__(self, target: str, access: Access, *, tiny_window: bool = False) -> None:
        self.target = target
        options = _CHANNEL_OPTIONS + (_TINY_WINDOW if tiny_window else [])
        if access.tls:
            credentials = grpc.ssl_channel_credentials(
                access.ca.read_bytes() if access.ca else None,
                access.key.read_bytes() if access.key else None,
                access.cert.read_bytes() if access.cert else None,
            )
            self.channel = grpc.aio.secure_channel(target, credentials, options)
        else:
            self.channel = grpc.aio.insecure_channel(target, options)
        self.rpc: OpenEngineAsyncStub = OpenEngineStub(self.channel)
        self.metadata: Sequence[tuple[str, str]] = (
            [("authorization", f"Bearer {access.token}")] if access.token else []
        )

    async def discover(self, model: str) -> Offer:
        """Ask the server who it is. An RPC that it refuses leaves that part empty, for the cases to report."""
        timeout = CONNECT_TIMEOUT
        try:
            engine = await self.rpc.GetEngineInfo(
                discovery_pb2.GetEngineInfoRequest(),
                timeout=timeout,
                metadata=self.metadata,
                wait_for_ready=True,
            )
        except grpc.aio.AioRpcError as error:
            if error.code() in (
                grpc.StatusCode.UNIMPLEMENTED,
                grpc.StatusCode.INTERNAL,
                grpc.StatusCode.UNKNOWN,
            ):
                return Offer(model=model)
            raise Unreachable(f"{self.target} does not answer GetEngineInfo: {_explain(error)}") from None
        chosen, model = model, model or (engine.supported_models[0] if engine.supported_models else "")
        try:
            info = await self.rpc.GetModelInfo(
                model_pb2.GetModelInfoRequest(model=model), timeout=timeout, metadata=self.metadata
            )
        except grpc.aio.AioRpcError as error:
            if chosen:
                raise Unreachable(
                    f"{self.target} does not know the model {chosen!r}: {_explain(error)}"
                ) from None
            info = model_pb2.ModelInfo()
        return Offer(engine, info, model)

    async def why_dead(self) -> str:
        """Return "" when the server still answers, else how it fails to."""
        try:
            await self.rpc.GetEngineInfo(
                discovery_pb2.GetEngineInfoRequest(), timeout=CONNECT_TIMEOUT, metadata=self.metadata
            )
        except grpc.aio.AioRpcError as error:
            if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                return _explain(error)
        return ""

    async def close(self) -> None:
        """Close the channel and every call on it."""
        await self.channel.close()


def _explain(error: grpc.aio.AioRpcError) -> str:
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return f"no answer within {CONNECT_TIMEOUT:g} s"
    return f"{error.code().name}: {error.details()}"
