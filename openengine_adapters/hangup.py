"""End a port's connections in an orderly way, which gRPC's own shutdown does not."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

import psutil


def hang_up(port: int) -> None:
    """Take no new connection on `port`, and say on those of this process that nothing more will come.

    gRPC cancels what arrives while it shuts down, and a caller that is told CANCELLED has no reason to ask elsewhere.
    When its connection is ended first, it finds the server UNAVAILABLE.
    """
    for listener in _sockets(port, listening=True):
        # gRPC keeps its descriptor, which now leads nowhere; it would report a listener that was closed as an error.
        with contextlib.suppress(OSError), socket.socket() as nowhere:
            os.dup2(nowhere.fileno(), listener, inheritable=False)
    for connection in _sockets(port, listening=False):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection)) as one:
            # Reading goes on, so that the kernel has no unread data to answer with a reset.
            one.shutdown(socket.SHUT_WR)


def _sockets(port: int, *, listening: bool) -> Iterator[int]:
    for connection in psutil.Process().net_connections("tcp"):
        listens = connection.status == psutil.CONN_LISTEN
        if connection.fd >= 0 and connection.laddr.port == port and listens is listening:
            yield connection.fd
