# SPDX-License-Identifier: Apache-2.0
"""What `make demo` shows: a real model behind the contract, answering token by token.

It prints each command before it runs it, so that a reader can do the same by hand.
"""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.support import cpu_env
from tests.support.server import PREFERRED_PORT, Server, ServerFailed, executable, free_port

PROMPT = "The capital of France is"


def show(line: str) -> None:
    """Print a command as a shell would show it."""
    print(f"$ {line}", flush=True)


def run(command: list[str]) -> int:
    """Print a client command, then run it on this terminal."""
    show(shlex.join(command))
    status = subprocess.run([executable("vllm", command[0]), *command[1:]], check=False).returncode
    print(flush=True)
    return status


def main() -> int:
    """Start the server, ask it one thing, stop it."""
    # `kill` ends the demo as Ctrl-C does: with the server stopped.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    server = Server(
        "vllm",
        cpu_env.vllm_flags(cpu_env.SMOLLM2),
        cpu_env.vllm_env(),
        free_port(PREFERRED_PORT),
    )
    show("source .venv/vllm/bin/activate")
    show("export " + " ".join(f"{name}={shlex.quote(value)}" for name, value in server.env.items()))
    show(shlex.join(server.command) + " &")
    server.start()
    status = 1
    try:
        print(f"  (process {server.pid}, log in {server.log}; waiting until it is READY)", flush=True)
        seconds = server.wait_ready()
        print(f"  (READY after {seconds:.0f} s)\n", flush=True)
        status = run(server.health_command())
        options = ["--max-tokens", "24", "--temperature", "0", "--target", server.target]
        status |= run(["openengine", "generate", PROMPT, *options])
    except ServerFailed as error:
        print(error, file=sys.stderr)
    except KeyboardInterrupt:
        status = 128 + signal.SIGINT
    finally:
        show(f"kill {server.pid}")
        stopped = server.stop()
    print(f"  (the server exited with status {stopped})")
    if status == 0 and stopped == 0:
        server.log.unlink()
        return 0
    print(f"demo: something went wrong; the server's log is {server.log}", file=sys.stderr)
    return status or 1


if __name__ == "__main__":
    raise SystemExit(main())
