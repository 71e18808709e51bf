"""The gRPC server: one port with OpenEngine, grpc.health.v1 and reflection."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from openengine.v1 import service_pb2, service_pb2_grpc
from openengine_adapters.core.lifecycle import Phase
from openengine_adapters.core.servicer import OpenEngineServicer
from openengine_adapters.hangup import hang_up

SERVICE = service_pb2.DESCRIPTOR.services_by_name["OpenEngine"].full_name

KEEPALIVE_MS = 60_000


class Server:
    """Serves one servicer on one port."""

    def __init__(
        self, servicer: OpenEngineServicer, host: str, port: int, max_message_mib: int = 256
    ) -> None:
        self._servicer = servicer
        self._host = host
        self._port = port
        self._grpc = grpc.aio.server(options=_channel_options(max_message_mib))
        self._health = health.aio.HealthServicer()
        service_pb2_grpc.add_OpenEngineServicer_to_server(servicer, self._grpc)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._grpc)
        reflection.enable_server_reflection(
            (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), self._grpc
        )
        self._changed = asyncio.Event()
        self._follower: asyncio.Task[None] | None = None

    async def start(self) -> int:
        """Bind and answer, as STARTING until the servicer is opened (DISC-13). Returns the port.

        Raises OSError when the address cannot be bound.
        """
        try:
            self._port = self._grpc.add_insecure_port(f"{_bracketed(self._host)}:{self._port}")
        except RuntimeError as error:
            raise OSError(
                f"cannot listen on {self._host}:{self._port}; another process may hold the port, choose another --port"
            ) from error
        self._servicer.reachable = dataclasses.replace(
            self._servicer.reachable, listen_host=self._host, port=self._port
        )
        await self._publish_health()
        self._servicer.lifecycle.listen(lambda _phase: self._changed.set())
        self._follower = asyncio.create_task(self._follow_phases(), name="health-phases")
        await self._grpc.start()
        return self._port

    async def _follow_phases(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            await self._publish_health()

    async def _publish_health(self) -> None:
        """Let grpc.health.v1 say what Health says (HEALTH-05)."""
        serving = self._servicer.lifecycle.phase is Phase.READY
        status = (
            health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        )
        for name in ("", SERVICE):
            await self._health.set(name, status)

    async def stop(self, grace_s: float) -> None:
        """Let running calls end within `grace_s` seconds, then close; whoever still asks finds UNAVAILABLE."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._servicer.calls.none()
        hang_up(self._port)
        await self._grpc.stop(grace_s)
        if self._follower is not None:
            self._follower.cancel()
            await asyncio.gather(self._follower, return_exceptions=True)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def _channel_options(max_message_mib: int) -> list[tuple[str, int]]:
    """Room for long prompts, and patience with clients that ping on long idle streams."""
    size = max_message_mib * 1024 * 1024
    return [
        ("grpc.max_receive_message_length", size),
        ("grpc.max_send_message_length", size),
        ("grpc.so_reuseport", 0),
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_MS // 3),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    ]
