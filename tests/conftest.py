"""What holds for every test."""

from __future__ import annotations

import signal

# A script's background job ignores SIGINT, and so would all that the tests start and send one.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
