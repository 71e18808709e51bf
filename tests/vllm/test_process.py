"""`openengine-vllm` as a process: its command line, its signals, and that nothing outlives it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support import cpu_env
from tests.support.server import Server, executable

PATIENCE_S = 120.0


def command(*arguments: str, timeout: float = PATIENCE_S) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    return subprocess.run(
        [executable("vllm", "openengine-vllm"), *arguments],
        env={**os.environ, **cpu_env.vllm_env()},
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


@pytest.fixture
def server() -> Iterator[Server]:
    """A server process on tiny-llama; the test starts it."""
    one = Server("vllm", cpu_env.vllm_flags(cpu_env.TINY_LLAMA), cpu_env.vllm_env())
    yield one
    one.stop(grace=30)


def test_help_and_mistakes_answer_without_importing_vllm() -> None:
    """Our own options stand in a group of their own; a module that poisons vLLM proves that it is not imported."""
    code = (
        "import sys; sys.modules['vllm'] = None\n"
        "from openengine_adapters.vllm.__main__ import main\n"
        "main(sys.argv[1:])"
    )
    python = Path(executable("vllm", "python"))
    for arguments, status, text in (
        (["--help"], 0, "OpenEngine server"),
        ([], 2, "--model is required"),
        (["--model", "x", "--port", "99999"], 2, "--port"),
        (["--model", "x", "--schema-release", "main"], 2, "moving name"),
    ):
        done = subprocess.run([python, "-c", code, *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == status, done.stderr
        assert text in done.stdout + done.stderr
    assert "usage" in command("--help").stdout


def test_a_flag_that_vllm_does_not_know_is_a_usage_error() -> None:
    """Typos never start an engine."""
    done = command("--model", "x", "--max-modle-len", "5")
    assert done.returncode == 2
    assert "--max-modle-len" in done.stderr


def test_a_bad_model_ends_the_start_with_one_sentence_and_no_process() -> None:
    """The start-up failure leaves nothing behind; the exit status is 1."""
    done = command("--model", "/nowhere/model", "--port", "0")
    assert done.returncode == 1
    assert "cannot start" in done.stderr.splitlines()[-1]


def test_a_port_in_use_is_said_before_the_engine_starts() -> None:
    """The message names the port and the way out."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = command(*cpu_env.vllm_flags(cpu_env.TINY_LLAMA), "--host", "127.0.0.1", "--port", str(port))
    assert done.returncode == 1
    assert str(port) in done.stderr and "--port" in done.stderr


def test_print_capabilities_is_discovery_as_json() -> None:
    """MODEL-07: what an operator sees is what clients see."""
    done = command(*cpu_env.vllm_flags(cpu_env.TINY_LLAMA), "--print-capabilities")
    found = json.loads(done.stdout)
    assert done.returncode == 0
    assert found["engine"]["engine_name"] == "vllm"
    assert found["model"]["generation"]["output_logprobs"]["max_top_n"] == 20


def test_sigterm_stops_cleanly(server: Server) -> None:
    """DRAIN-05: exit status 0, and no process left."""
    server.start()
    server.wait_ready()
    process = psutil.Process(server.pid)
    tree = [process, *process.children(recursive=True)]
    process.terminate()
    assert server.wait(PATIENCE_S) == 0
    wait_for(lambda: gone(tree), "every process ended")


def test_an_interrupt_while_the_engine_starts_stops_cleanly_too(server: Server) -> None:
    """No process is left in the middle of a start either."""
    server.start()
    process = psutil.Process(server.pid)
    wait_for(lambda: len(process.children(recursive=True)) >= 3, "engine processes are there")
    tree = [process, *process.children(recursive=True)]
    process.send_signal(signal.SIGINT)
    assert server.wait(PATIENCE_S) == 0
    wait_for(lambda: gone(tree), "every process ended")


def test_a_killed_server_leaves_no_engine_behind(server: Server) -> None:
    """SIGKILL in the middle of the start, when vLLM itself leaves orphans."""
    server.start()
    process = psutil.Process(server.pid)
    wait_for(lambda: len(process.children(recursive=True)) >= 3, "engine processes are there")
    children = process.children(recursive=True)
    process.kill()
    wait_for(lambda: gone(children), "every process ended")


def test_a_dead_engine_ends_the_server_with_its_own_status(server: Server) -> None:
    """ERR-04: not zero, and no process left."""
    server.start()
    server.wait_ready()
    process = psutil.Process(server.pid)
    tree = [process, *process.children(recursive=True)]
    core = next(child for child in tree if "EngineCore" in " ".join(child.cmdline()))
    core.kill()
    assert server.wait(PATIENCE_S) == 3
    wait_for(lambda: gone(tree), "every process ended")
