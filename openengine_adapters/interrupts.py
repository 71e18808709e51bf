"""A Ctrl-C on the terminal goes to every process of its group; only the server may act on it."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from multiprocessing import resource_tracker


@contextlib.contextmanager
def deaf_children() -> Iterator[None]:
    """Let the processes that this thread starts, and theirs, never see SIGINT.

    An engine's own processes would end at once, with all that runs, while the server that is to drain still needs
    them (DRAIN-05). A blocked signal stays blocked through fork and exec, whatever handler they install.
    """
    # Starting it lets the signal through again.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
