"""`openengine-sglang` as a process: its command line, its signals, and that nothing outlives it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from openengine.v1 import generate_pb2, inputs_pb2, lifecycle_pb2, service_pb2_grpc
from tests.support import cpu_env
from tests.support.server import Server, executable

PATIENCE_S = 600.0
"""A slow machine may take minutes to start SGLang."""
PROCESSES = 5
"""The server, its guard, Python's resource tracker, a scheduler and a detokenizer; fewer are not all."""


def command(*arguments: str, timeout: float = PATIENCE_S) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    return subprocess.run(
        [executable("sglang", "openengine-sglang"), *arguments],
        env={**os.environ, **cpu_env.sglang_env()},
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )


def wait_for(condition: object, what: str) -> None:
    """Wait for a condition, with a deadline."""
    assert callable(condition)
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, f"{what}: not within {PATIENCE_S:g} s"
        time.sleep(0.1)


def gone(processes: list[psutil.Process]) -> bool:
    """Whether all of them have ended."""
    return not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes)


def tree_of(server: Server) -> list[psutil.Process]:
    process = psutil.Process(server.pid)
    return [process, *process.children(recursive=True)]


@pytest.fixture
def server() -> Iterator[Server]:
    """A server process on tiny-llama; the test starts it."""
    one = Server("sglang", cpu_env.sglang_flags(cpu_env.TINY_LLAMA), cpu_env.sglang_env())
    yield one
    one.stop(grace=30)


class Reader(threading.Thread):
    """Reads one long stream while the test does something to its server."""

    def __init__(self, stub: Any, max_tokens: int = 900) -> None:
        super().__init__(daemon=True)
        self.responses: list[generate_pb2.GenerateResponse] = []
        self._call = stub.Generate(
            generate_pb2.GenerateRequest(
                request_id=f"reader-{id(self)}",
                model=str(cpu_env.model(cpu_env.TINY_LLAMA)),
                token_ids=inputs_pb2.TokenIds(ids=[5, 6, 7]),
                stopping=generate_pb2.StoppingOptions(max_tokens=max_tokens, ignore_eos=True),
            )
        )

    def run(self) -> None:
        self.responses += self._call

    def started(self) -> None:
        """Start, and wait for a token."""
        self.start()
        wait_for(lambda: self._call.is_active(), "accepted")
        self._call.initial_metadata()


def test_help_and_mistakes_answer_without_importing_sglang() -> None:
    """Our own options stand in a group of their own; a module that poisons SGLang proves that it is not imported."""
    code = (
        "import sys; sys.modules['sglang'] = None\n"
        "from openengine_adapters.sglang.__main__ import main\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    python = Path(executable("sglang", "python"))
    for arguments, status, text in (
        (["--help"], 0, "OpenEngine server"),
        ([], 2, "--model is required"),
        (["--model", "x", "--port", "99999"], 2, "--port"),
        (["--model", "x", "--schema-release", "main"], 2, "moving name"),
        (["--model", "x"], 1, "SGLang cannot be imported"),
    ):
        done = subprocess.run([python, "-c", code, *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == status, done.stderr
        assert text in done.stdout + done.stderr
    assert "usage" in command("--help").stdout


def test_a_flag_that_sglang_does_not_know_is_a_usage_error() -> None:
    """Typos never start an engine."""
    done = command("--model", "x", "--context-lenght", "5")
    assert done.returncode == 2
    assert "--context-lenght" in done.stderr


def test_a_bad_model_ends_the_start_with_one_sentence_and_no_process() -> None:
    """The start-up failure leaves nothing behind; the exit status is 1."""
    done = command("--model", "/nowhere/model", "--port", "0", "--device", "cpu")
    assert done.returncode == 1
    assert "cannot start" in done.stderr.splitlines()[-1]


def test_a_port_in_use_is_said_before_the_engine_starts() -> None:
    """The message names the port and the way out."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = command(*cpu_env.sglang_flags(cpu_env.TINY_LLAMA), "--host", "127.0.0.1", "--port", str(port))
    assert done.returncode == 1
    assert str(port) in done.stderr and "--port" in done.stderr


def test_a_scheduler_that_dies_in_its_start_ends_it_with_one_sentence_too(tmp_path: Path) -> None:
    """SGLang itself would kill this process then: the weights cannot be read."""
    for file in cpu_env.model(cpu_env.TINY_LLAMA).iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    done = command(*cpu_env.sglang_flags(cpu_env.TINY_LLAMA), "--model-path", str(tmp_path), "--port", "0")
    assert done.returncode == 1, done.stderr[-2000:]
    assert "cannot start" in done.stderr.splitlines()[-1]


def test_print_capabilities_is_discovery_as_json() -> None:
    """MODEL-07: what an operator sees is what clients see."""
    done = command(*cpu_env.sglang_flags(cpu_env.TINY_LLAMA), "--print-capabilities")
    found = json.loads(done.stdout[done.stdout.index("{") :])
    assert done.returncode == 0
    assert found["engine"]["engine_name"] == "sglang"
    assert found["model"]["generation"]["output_logprobs"]["max_top_n"] == 128


@pytest.mark.parametrize("terminal", [False, True], ids=["SIGTERM", "terminal"])
def test_a_signal_drains_and_stops_cleanly(server: Server, terminal: bool) -> None:
    """DRAIN-05, DISC-13: SGLang would take the signal; running work ends as it should, and no process is left.

    A Ctrl-C on the terminal goes to every process of the group.
    """
    server.start()
    with grpc.insecure_channel(server.target) as channel:
        stub = service_pb2_grpc.OpenEngineStub(channel)
        health = stub.Health(lifecycle_pb2.HealthRequest(), wait_for_ready=True, timeout=PATIENCE_S)
        assert health.state == lifecycle_pb2.HEALTH_STATE_STARTING
        server.wait_ready()
        tree = tree_of(server)
        reader = Reader(stub, max_tokens=300)
        reader.started()
        if terminal:
            os.killpg(server.pid, signal.SIGINT)
        else:
            tree[0].terminate()
        reader.join(PATIENCE_S)
        assert reader.responses[-1].finished.reason == generate_pb2.FINISH_REASON_LENGTH
    assert server.wait(PATIENCE_S) == 0
    wait_for(lambda: gone(tree), "every process ended")


def test_an_interrupt_while_the_engine_starts_stops_cleanly_too(server: Server) -> None:
    """No process is left in the middle of a start either."""
    server.start()
    wait_for(lambda: len(tree_of(server)) >= PROCESSES, "engine processes are there")
    tree = tree_of(server)
    tree[0].send_signal(signal.SIGINT)
    assert server.wait(PATIENCE_S) == 0
    wait_for(lambda: gone(tree), "every process ended")


def test_a_killed_server_leaves_no_engine_behind(server: Server) -> None:
    """SIGKILL in the middle of the start."""
    server.start()
    wait_for(lambda: len(tree_of(server)) >= PROCESSES, "engine processes are there")
    tree = tree_of(server)
    tree[0].kill()
    wait_for(lambda: gone(tree), "every process ended")
