"""What the benchmarks need beside the load: clients in processes of their own, and the CPU time of a server's."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator

import psutil


def cpu_seconds(process: psutil.Process) -> float:
    """The CPU seconds of a process so far, its children left out."""
    times = process.cpu_times()
    return float(times.user + times.system)


@contextlib.contextmanager
def running(module: str, *words: str) -> Iterator[subprocess.Popen[str]]:
    """Run a module of ours, from the moment that it prints its first line until the block is left."""
    command = [sys.executable, "-m", module, *words]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            yield process
        finally:
            process.kill()
