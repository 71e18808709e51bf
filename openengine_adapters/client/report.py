"""What a failed call looks like to the person at the terminal: one line, with a way out."""

from __future__ import annotations

import grpc

from openengine_adapters.client import errors
from openengine_adapters.client.arguments import USAGE, UsageError
from openengine_adapters.client.terminal import Terminal

_FAILED, _NO_SERVER = 1, 3

_HINTS = {
    grpc.StatusCode.UNAVAILABLE: "`openengine health --wait 60` waits until it is ready",
    grpc.StatusCode.UNIMPLEMENTED: "this server does not offer it",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "try again when it has less to do",
    grpc.StatusCode.UNAUTHENTICATED: "give the token with --token-file or $OPENENGINE_TOKEN",
}

# Marks in gRPC's account of a failed connection, and what they mean.
_CAUSES = {
    "refused": "connection refused",
    "andshake failed": "the TLS handshake failed: does the server speak TLS, do --ca and --tls-name fit?",
    "ostname Verification": "the server's certificate is for another name: see --tls-name",
    "Socket closed": "the server closed the connection: does it want --tls, or --cert and --key?",
    "reset by peer": "the server closed the connection: does it want --tls, or --cert and --key?",
    "http1": "something that is not gRPC answers there, or it wants --tls",
    "Domain name not found": "no such host",
    "resol": "the host's name cannot be resolved",
    "No such file": "no such socket",
}


def report(error: UsageError | errors.ClientError, terminal: Terminal) -> int:
    """Print the error and return the command's exit code."""
    match error:
        case UsageError():
            terminal.error(str(error), code="USAGE")
            return USAGE
        case errors.Unreachable():
            cause = next((text for mark, text in _CAUSES.items() if mark in error.reason), error.reason)
            hint = "is the server running, and is --target where it listens?"
            terminal.error(f"cannot reach {error.target}: {cause}", code="UNREACHABLE", hint=hint)
            return _NO_SERVER
        case errors.Incompatible():
            hint = "use a client and a server of the same release"
            terminal.error(str(error), code="INCOMPATIBLE", hint=hint)
            return _NO_SERVER
        case errors.RpcRejected():
            terminal.error(str(error), code=error.code.name, hint=_HINTS.get(error.code, ""))
        case errors.EngineError():
            after = f" after {error.retry_after_ms / 1000:g} s" if error.retry_after_ms else ""
            hint = f"the same request can succeed{after}" if error.retryable else ""
            terminal.error(f"the request failed: {error}", code=error.code, hint=hint)
        case errors.TimedOut():
            terminal.error(str(error), code="DEADLINE_EXCEEDED", hint="--timeout allows more")
        case errors.ConnectionLost():
            hint = "the server stopped or the network broke"
            terminal.error(str(error), code="CONNECTION_LOST", hint=hint)
        case _:
            terminal.error(str(error), code="CONTRACT_VIOLATION", hint="this is a fault of the server")
    return _FAILED
