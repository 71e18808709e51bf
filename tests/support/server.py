# SPDX-License-Identifier: Apache-2.0
"""Run a server command of this project beside a test, a demo or the conformance suite.

Usage: `with serving("vllm", "tiny-llama") as server:`, and `server.target` is READY.
"""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tests.support import cpu_env

REPOSITORY: Final = Path(__file__).resolve().parents[2]
PREFERRED_PORT: Final = 50051
_VENVS: Final = {"reference": "dev", "vllm": "vllm", "sglang": "sglang"}


class ServerFailed(RuntimeError):
    """The server ended, or did not become ready in time; the message ends with its last log lines."""


def executable(engine: str, name: str) -> str:
    """The path of a command in the virtual environment of an engine."""
    return str(REPOSITORY / ".venv" / _VENVS[engine] / "bin" / name)


def free_port(preferred: int = 0) -> int:
    """The preferred port of the loopback interface if it is free, else another."""
    for port in (preferred, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise OSError("no free port")


class Server:
    """One server process; its output goes to a log file."""

    def __init__(self, engine: str, flags: Sequence[str], env: Mapping[str, str], port: int = 0) -> None:
        """Prepare a server that has not been started yet."""
        port = port or free_port()
        self.target = f"127.0.0.1:{port}"
        self.env = dict(env)
        self.command = [f"openengine-{engine}", *flags, "--host", "127.0.0.1", "--port", str(port)]
        self._executable = executable(engine, self.command[0])
        self._client = executable(engine, "openengine")
        self._process: subprocess.Popen[bytes] | None = None
        descriptor, log = tempfile.mkstemp(prefix=f"openengine-{engine}-", suffix=".log")
        os.close(descriptor)
        self.log = Path(log)

    @property
    def pid(self) -> int:
        """The process id of the started server."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start the process, in a session of its own so that stopping it can reach all that it left."""
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [self._executable, *self.command[1:]],
                env={**os.environ, **self.env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def health_command(self) -> list[str]:
        """The client command whose exit status is 0 once the server is READY."""
        return ["openengine", "health", "--target", self.target]

    def wait_ready(self, timeout: float = 600) -> float:
        """Wait until the server says READY and return how many seconds that took."""
        assert self._process is not None
        began = time.monotonic()
        asking = [self._client, *self.health_command()[1:], "--wait", f"{timeout:.0f}"]
        with subprocess.Popen(asking, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as client:
            try:
                while client.poll() is None:
                    if self._process.poll() is not None:
                        status = self._process.returncode
                        raise ServerFailed(f"{self._shown()} exited with {status}\n{self.tail()}")
                    time.sleep(0.1)
            finally:
                client.kill()
        if client.returncode == 0:
            return time.monotonic() - began
        raise ServerFailed(f"{self._shown()} was not ready after {timeout:.0f} s\n{self.tail()}")

    def wait(self, timeout: float) -> int:
        """Wait for the process to end by itself and return its exit status."""
        assert self._process is not None
        return self._process.wait(timeout)

    def stop(self, grace: float = 60) -> int:
        """End the server with SIGTERM, or with SIGKILL when it takes too long, and return its exit status."""
        if self._process is None:
            return 0
        if self._process.poll() is not None:
            return self._process.returncode
        self._process.terminate()
        try:
            return self._process.wait(grace)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            return self._process.wait()

    def tail(self, lines: int = 30) -> str:
        """The end of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def _shown(self) -> str:
        return shlex.join(self.command)


@contextmanager
def serving(
    engine: str,
    model: str = cpu_env.TINY_LLAMA,
    flags: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """A server on a model of ours that is READY, and stopped when the block is left.

    `flags` follow, and so override, those of `cpu_env`; the log is kept only when something failed.
    """
    own_flags = [] if engine == "reference" else cpu_env.flags(engine, model)
    own_env = {} if engine == "reference" else cpu_env.env(engine)
    server = Server(engine, [*own_flags, *flags], {**own_env, **(env or {})})
    server.start()
    try:
        server.wait_ready()
        yield server
    finally:
        server.stop()
    server.log.unlink()
