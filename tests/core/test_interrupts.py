"""Which processes see a Ctrl-C."""

from __future__ import annotations

import multiprocessing
import signal

from openengine_adapters.interrupts import deaf_children


def blocked() -> set[signal.Signals]:
    """The signals that this thread does not see."""
    return {signal.Signals(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())}


def blocked_in_a_child() -> set[signal.Signals]:
    """The same in a process that is started as the engines start theirs."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return set(pool.apply(blocked))


def test_children_of_an_engine_are_deaf_to_interrupts_alone() -> None:
    """DRAIN-05: SIGTERM still ends them, and this process still hears both."""
    with deaf_children():
        in_a_child = blocked_in_a_child()
    assert signal.SIGINT in in_a_child and signal.SIGTERM not in in_a_child
    assert not {signal.SIGINT, signal.SIGTERM} & blocked()
