"""The child processes that SGLang started, which it does not always end itself."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import psutil

KILL_S = 5.0


def existing(pids: Sequence[int]) -> list[psutil.Process]:
    """The processes of these ids that are still there."""
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(pid))
    return found


def lives(process: psutil.Process) -> bool:
    """Whether the process runs; one that waits for its parent to notice its end does not."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def descendants(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    """These processes and all that they started."""
    found = {process.pid: process for process in processes}
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            found.update((child.pid, child) for child in process.children(recursive=True))
    return list(found.values())


def title(process: psutil.Process) -> str:
    """The process's command line, which SGLang sets to what the process is."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return " ".join(process.cmdline())
    return ""


def end(processes: Sequence[psutil.Process]) -> None:
    """Kill the processes and wait until they are gone, `KILL_S` at most."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=KILL_S)
