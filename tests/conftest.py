"""What holds for every test."""

from __future__ import annotations

import signal

from hypothesis import HealthCheck, settings

# No test asserts a timing, an example of a property neither.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

# A script's background job ignores SIGINT, and so would all that the tests start and send one.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
