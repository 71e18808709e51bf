"""No engine process outlives its server, however the server ends.

A small process beside the server remembers the server's descendants. When the server is gone, killed with
SIGKILL included, it ends those that are left. Run as `python -m openengine_adapters.orphans PID`.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time

import psutil

PERIOD_S = 0.5


def start_guard() -> subprocess.Popen[bytes]:
    """Start the guard of this process; it ends by itself soon after this process."""
    return subprocess.Popen(
        [sys.executable, "-m", "openengine_adapters.orphans", str(os.getpid())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # a Ctrl-C on the terminal must not end the guard before the server
    )


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


def _watch(pid: int) -> None:
    own = os.getpid()
    known: dict[int, psutil.Process] = {}
    while os.getppid() == pid:
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(pid).children(recursive=True):
                if child.pid != own:
                    known.setdefault(child.pid, child)
        for child in [child for child in known.values() if not child.is_running()]:
            del known[child.pid]
        time.sleep(PERIOD_S)
    doomed = dict(known)
    for child in known.values():
        with contextlib.suppress(psutil.NoSuchProcess):
            doomed.update((descendant.pid, descendant) for descendant in child.children(recursive=True))
    _kill(list(doomed.values()))


if __name__ == "__main__":
    _watch(int(sys.argv[1]))
