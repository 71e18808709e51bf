"""No engine process outlives its server, however the server ends.

A small process beside the server knows the server's descendants in two ways: it looks at the process tree, which
shows forked ones, and at a mark in the environment, which spawned ones inherit. When the server is gone, killed
with SIGKILL included, it ends those that are left. Run as `python -m openengine_adapters.orphans PID MARK`.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
import uuid

import psutil

MARK = "OPENENGINE_SERVER_TREE"

PERIOD_S = 0.25
ROUNDS = 8
"""Looks after the server's end: a dying engine may still start a process."""


def start_guard() -> subprocess.Popen[bytes]:
    """Mark this process's future children and start their guard; it ends by itself soon after this process."""
    mark = uuid.uuid4().hex
    guard = subprocess.Popen(
        [sys.executable, "-m", "openengine_adapters.orphans", str(os.getpid()), mark],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # a Ctrl-C on the terminal must not end the guard before the server
    )
    os.environ[MARK] = mark
    return guard


def end_children(keep: set[int]) -> int:
    """Kill every descendant of this process but `keep`; returns how many there were."""
    left = [child for child in psutil.Process().children(recursive=True) if child.pid not in keep]
    _kill(left)
    return len(left)


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        # psutil compares creation times, so a reused pid is left alone.
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _children(process: psutil.Process) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return [child for child in process.children(recursive=True) if child.pid != os.getpid()]
    return []


def _marked(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(MARK) == mark:
                found.append(process)
    return found


def _watch(pid: int, mark: str) -> None:
    server = psutil.Process(pid)
    known: dict[int, psutil.Process] = {}
    while os.getppid() == pid:
        known.update((child.pid, child) for child in _children(server))
        known = {number: child for number, child in known.items() if child.is_running()}
        time.sleep(PERIOD_S)
    for _ in range(ROUNDS):
        left = [
            *known.values(),
            *(orphan for child in known.values() for orphan in _children(child)),
            *_marked(mark),
        ]
        _kill(left)
        time.sleep(PERIOD_S)


if __name__ == "__main__":
    _watch(int(sys.argv[1]), sys.argv[2])
