"""A server's life: bind, start the engine, serve, drain on a signal, leave nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
from collections.abc import Callable

import uvloop
from google.protobuf import json_format

from openengine.v1 import lifecycle_pb2
from openengine_adapters import logs, orphans
from openengine_adapters.core import capabilities
from openengine_adapters.core.kv.discovery import Reachable
from openengine_adapters.core.kv.plane import KvOptions
from openengine_adapters.core.servicer import OpenEngineServicer
from openengine_adapters.core.watchdog import Limits
from openengine_adapters.engine import Engine, EngineDescription, StartupError
from openengine_adapters.options import ServerOptions
from openengine_adapters.server import Server

log = logging.getLogger(__name__)

EXIT_OK = 0
EXIT_STARTUP = 1
EXIT_DIED = 3

CLOSE_GRACE_S = 2.0
GIVE_UP_S = 30.0


def launch(make_engine: Callable[[], Engine], options: ServerOptions) -> int:
    """Run a server until a signal or the engine's death; returns the process's exit code."""
    logs.configure(options.log_level, options.log_format)
    guard = orphans.start_guard()
    try:
        return uvloop.run(_run(make_engine(), options, keep={guard.pid}))
    except StartupError as error:
        print(f"cannot start: {error}", file=sys.stderr)
        return EXIT_STARTUP
    finally:
        orphans.end_children(keep={guard.pid})


async def _run(engine: Engine, options: ServerOptions, keep: set[int]) -> int:
    # gRPC and asyncio objects belong to the loop that they are made in.
    return await _Launch(engine, options, keep).run()


class _Launch:
    def __init__(self, engine: Engine, options: ServerOptions, keep: set[int]) -> None:
        self._engine = engine
        self._options = options
        limits = Limits(stall_s=options.stall_timeout, hang_s=options.hang_timeout)
        kv = KvOptions(source=options.kv_source, hash_encoding=options.kv_hash_encoding)
        self._servicer = OpenEngineServicer(
            engine, options.instance_id, options.schema_release, limits, options.media, kv
        )
        self._servicer.reachable = Reachable(advertise_host=options.advertise_host)
        self._server = Server(self._servicer, options.host, options.port, options.max_message_mib)
        self._stop = asyncio.Event()
        self._keep = keep

    async def run(self) -> int:
        if self._options.print_capabilities:
            return await self._print_capabilities()
        with self._metrics():
            return await self._run()

    def _metrics(self) -> contextlib.AbstractContextManager[object]:
        port = self._options.metrics_port
        if port is None:
            return contextlib.nullcontext()
        try:
            from openengine_adapters import metrics
        except ImportError:
            raise StartupError(
                f"--metrics-port {port} needs prometheus-client: pip install 'openengine-adapters[metrics]'"
            ) from None
        return metrics.serving(self._options.host, port, self._servicer.kv.stats)

    async def _run(self) -> int:
        self._take_signals()
        try:
            port = await self._server.start()
        except OSError as error:
            raise StartupError(str(error)) from error
        log.info("listening on %s:%d, the engine is starting", self._options.host, port)
        starting = asyncio.create_task(self._engine.start(), name="engine-start")
        stopping = asyncio.create_task(self._stop.wait(), name="stop-signal")
        try:
            await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                log.info("stopped while starting")
                await self._give_up(starting)
                return EXIT_OK
            return await self._serve(starting.result(), stopping, port)
        finally:
            for task in (starting, stopping):
                task.cancel()
            await asyncio.gather(starting, stopping, return_exceptions=True)
            await self._servicer.closed()
            await self._server.stop(CLOSE_GRACE_S)
            await self._engine.stop()

    async def _give_up(self, starting: asyncio.Task[EngineDescription]) -> None:
        """Engines start in a thread that cannot be cancelled; without its processes the start fails soon."""
        end = asyncio.get_running_loop().time() + GIVE_UP_S
        while not starting.done():
            orphans.end_children(self._keep)
            await asyncio.wait({starting}, timeout=0.5)
            if asyncio.get_running_loop().time() > end:
                os._exit(EXIT_STARTUP)

    async def _serve(self, description: EngineDescription, stopping: asyncio.Task[object], port: int) -> int:
        self._servicer.opened(description)
        self._take_signals()  # an engine may have taken them over while it started
        log.info("ready: %s %s serves %s on port %d", description.engine_name, description.engine_version,
                 description.model_id, port)  # fmt: skip
        dead = asyncio.create_task(self._servicer.lifecycle.dead.wait(), name="engine-death")
        watch = asyncio.create_task(self._servicer.watchdog.run(), name="watchdog")
        try:
            await asyncio.wait({stopping, dead}, return_when=asyncio.FIRST_COMPLETED)
            if dead.done():
                if self._options.stay_up:
                    await stopping
                return EXIT_DIED
            await self._drain()
            return EXIT_DIED if self._servicer.lifecycle.died else EXIT_OK
        finally:
            for task in (dead, watch):
                task.cancel()
            await asyncio.gather(dead, watch, return_exceptions=True)

    async def _drain(self) -> None:
        """DRAIN-05: let running requests end, abort what outlasts the grace."""
        grace = self._options.drain_grace
        log.info("draining, at most %g s", grace)
        request = lifecycle_pb2.DrainRequest(
            stop_accepting_new_requests=True, deadline_ms=round(grace * 1000), abort_after_deadline=True
        )
        async for progress in self._servicer.drains.run(request):
            log.debug("drain: %s", progress)
        log.info("drained")

    async def _print_capabilities(self) -> int:
        # Engines and what they load print to standard output too; only the answer belongs there.
        answer = os.dup(1)
        os.dup2(2, 1)
        try:
            description = await self._engine.start()
            info = capabilities.engine_info(
                description, self._options.instance_id, self._options.schema_release
            )
            found = {
                "engine": json_format.MessageToDict(info, preserving_proto_field_name=True),
                "model": json_format.MessageToDict(
                    capabilities.model_info(description), preserving_proto_field_name=True
                ),
            }
            with os.fdopen(answer, "w") as out:
                print(json.dumps(found, indent=2), file=out)
        finally:
            await self._engine.stop()
        return EXIT_OK

    def _take_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        if self._stop.is_set():
            # A second signal: the operator does not want to wait. The guard ends the engine's processes.
            os._exit(EXIT_STARTUP)
        self._stop.set()
