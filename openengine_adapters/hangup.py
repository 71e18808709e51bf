"""End a port's connections in an orderly way, which gRPC's own shutdown does not."""

from __future__ import annotations

import contextlib
import os
import socket

import psutil


def hang_up(port: int) -> None:
    """Take no new connection on `port`, and say on those of this process that nothing more will come.

    gRPC cancels what arrives while it shuts down, and a caller that is told CANCELLED has no reason to ask elsewhere.
    When its connection is ended first, it finds the server UNAVAILABLE.
    """
    _shut(port, socket.SHUT_RDWR, listening=True)
    # Reading goes on, so that the kernel has no unread data to answer with a reset.
    _shut(port, socket.SHUT_WR, listening=False)


def _shut(port: int, how: int, *, listening: bool) -> None:
    for connection in psutil.Process().net_connections("tcp"):
        listens = connection.status == psutil.CONN_LISTEN
        if connection.fd >= 0 and connection.laddr.port == port and listens is listening:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fd)) as one:
                one.shutdown(how)
