"""The command as a process: signals, pipes, terminals, and a server that dies."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "openengine_adapters.client"]
DEADLINE = 20.0


class Server:
    def __init__(self) -> None:
        arguments = [sys.executable, "-m", "tests.client.serve"]
        self.process = subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        self.target = self.line()

    def line(self) -> str:
        assert self.process.stdout
        readable, _, _ = select.select([self.process.stdout], [], [], DEADLINE)
        assert readable, "the server said nothing"
        return self.process.stdout.readline().strip()

    def close(self) -> None:
        self.process.kill()
        self.process.wait(DEADLINE)
        if self.process.stdout:
            self.process.stdout.close()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """One server for all tests that leave it as it was."""
    with contextlib.closing(Server()) as server:
        yield server


@pytest.fixture
def own_server() -> Iterator[Server]:
    """A server for a test that kills it or waits for what it says."""
    with contextlib.closing(Server()) as server:
        yield server


def environment(server: Server | None = None, **more: str) -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS")}
    return env | ({"OPENENGINE_TARGET": server.target} if server else {}) | more


@contextlib.contextmanager
def running(server: Server, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start the command with pipes for its three streams."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [*COMMAND, *arguments], cwd=ROOT, env=environment(server), stdin=pipe, stdout=pipe, stderr=pipe
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def test_help_is_fast_and_imports_nothing_heavy() -> None:
    code = (
        "import sys, contextlib\n"
        "from openengine_adapters.client.__main__ import main\n"
        "with contextlib.suppress(SystemExit): main(['--help'])\n"
        "print(sorted({'grpc', 'google.protobuf', 'rich'} & set(sys.modules)))"
    )
    begin = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.endswith("[]\n")
    assert "generate" in done.stdout
    assert time.monotonic() - begin < 5, "far above the half second that it should take"


def test_standard_input_is_the_prompt(server: Server) -> None:
    with running(server, "generate", "--quiet") as process:
        out, err = process.communicate(b"short\n", DEADLINE)
    assert (process.returncode, out, err) == (0, b"hello\n", b"")


def test_tokens_appear_before_the_end(server: Server) -> None:
    with running(server, "generate", "hang") as process:
        assert process.stdout
        assert process.stdout.read(5) == b"hello"


def test_ctrl_c_cancels_the_request_and_exits_130(own_server: Server) -> None:
    with running(own_server, "generate", "hang") as process:
        assert process.stdout
        assert process.stdout.read(5) == b"hello"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 130
    assert err == b""
    assert own_server.line() == "cancelled"


def test_ctrl_c_while_the_prompt_is_read_exits_130(server: Server) -> None:
    with running(server, "generate") as process:
        assert process.stdin
        process.stdin.write(b"half a prompt")
        process.stdin.flush()
        _wait_until_reading(process)
        process.send_signal(signal.SIGINT)
        assert process.wait(DEADLINE) == 130
        assert process.stderr
        assert process.stderr.read() == b""


def test_ctrl_c_during_a_drain_says_that_the_server_goes_on(server: Server) -> None:
    with running(server, "drain") as process:
        assert process.stdout
        assert process.stdout.readline() == b"started\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=DEADLINE)
    assert (process.returncode, err) == (130, b"the server goes on draining\n")


def test_a_server_that_dies_in_mid_stream(own_server: Server) -> None:
    with running(own_server, "generate", "hang") as process:
        assert process.stdout
        assert process.stdout.read(5) == b"hello"
        own_server.process.kill()
        _, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 1
    assert re.fullmatch(
        rb"openengine: Generate was cut off: .* \(the server stopped or the network broke\)\n", err
    )


def test_a_reader_that_goes_away_ends_the_request(server: Server) -> None:
    with running(server, "generate", "endless") as process:
        assert process.stdout
        assert process.stdout.read(5) == b"word "
        process.stdout.close()
        assert process.wait(DEADLINE) == 141
        assert process.stderr
        assert process.stderr.read() == b""


def test_output_that_the_locale_cannot_write_is_spelt_out(server: Server) -> None:
    env = environment(server, PYTHONIOENCODING="ascii")
    arguments = [*COMMAND, "generate", "unicode"]
    done = subprocess.run(arguments, cwd=ROOT, env=env, capture_output=True, timeout=DEADLINE)
    assert (done.returncode, done.stdout) == (0, b"\\xe9\\U0001f642\n")


# ------------------------------------------------------------------------------------------ on a terminal


def on_a_terminal(server: Server, *arguments: str, until: str, **env: str) -> str:
    """Run the command on a terminal until it has printed `until`, interrupt it, and return all it printed."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, *arguments],
        cwd=ROOT,
        env=environment(server, TERM="xterm-256color", COLUMNS="200", LINES="40", **env),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    printed = b""
    end = time.monotonic() + DEADLINE
    try:
        with contextlib.suppress(OSError):  # how a terminal says that the other side has closed
            while until.encode() not in printed and time.monotonic() < end:
                if select.select([ours], [], [], 0.1)[0]:
                    printed += os.read(ours, 65536)
        process.send_signal(signal.SIGINT)
        process.wait(DEADLINE)
    finally:
        process.kill()
        os.close(ours)
    assert until in printed.decode()
    return printed.decode()


def test_colour_on_a_terminal_only(server: Server) -> None:
    assert "\x1b[31m" in on_a_terminal(server, "health", until="not scripted")
    done = subprocess.run(
        [*COMMAND, "health"], cwd=ROOT, env=environment(server), capture_output=True, timeout=DEADLINE
    )
    assert b"\x1b" not in done.stderr


def test_no_color_is_respected(server: Server) -> None:
    assert "\x1b[31m" not in on_a_terminal(server, "health", until="not scripted", NO_COLOR="1")


def test_load_watch_keeps_a_view_on_the_terminal(server: Server) -> None:
    printed = on_a_terminal(server, "load", "--watch", "0.1", until="running requests")
    assert re.search(r"running requests +3", printed)


def test_kv_watch_keeps_a_view_on_the_terminal(server: Server) -> None:
    printed = on_a_terminal(server, "kv", "watch", until="   9 ")
    assert re.search(r"rank +blocks +chains +longest", printed)
    assert re.search(r"\n.* 0 +5 +1 +5 ", printed)


def _wait_until_reading(process: subprocess.Popen[bytes]) -> None:
    """Wait until the process sleeps in a read of its standard input."""
    end = time.monotonic() + DEADLINE
    while time.monotonic() < end:
        with contextlib.suppress(OSError):
            if "pipe_read" in Path(f"/proc/{process.pid}/wchan").read_text():
                return
            system_call = Path(f"/proc/{process.pid}/syscall").read_text().split()
            if system_call[:2] == ["0", "0x0"]:
                return
        time.sleep(0.05)
    pytest.skip("this kernel does not say what a process waits for")
