"""What the commands share: connecting, and reading arguments that may be files."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from openengine_adapters.client import OpenEngineClient, Tls
from openengine_adapters.client.arguments import UsageError

LONG_TIMEOUT = 300.0  # for what may take an engine minutes


@contextlib.asynccontextmanager
async def connected(args: argparse.Namespace) -> AsyncIterator[OpenEngineClient]:
    """Yield a client whose server was found compatible."""
    async with unverified(args) as client:
        await client.verify(timeout=args.connect_timeout)
        yield client


@contextlib.asynccontextmanager
async def unverified(args: argparse.Namespace) -> AsyncIterator[OpenEngineClient]:
    """Yield a client that has not talked to the server yet."""
    try:
        async with OpenEngineClient(
            args.target, tls=_tls(args), token=_token(args), timeout=args.timeout or 30.0
        ) as client:
            yield client
    except OSError as error:
        if error.filename is None:
            raise
        raise UsageError(f"cannot read {error.filename}: {error.strerror}") from None


def choose_model(client: OpenEngineClient, model: str) -> str:
    """Return the model asked for, or the server's only one."""
    served = list(client.engine.supported_models)
    if model or len(served) == 1:
        return model or served[0]
    raise UsageError(f"the server serves {', '.join(served) or 'no model'}: choose with --model")


def read_file(path: str, what: str) -> str:
    """Return a file's text; `-` is standard input."""
    try:
        return sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{what}: cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{what}: {path} is not UTF-8 text") from None


def _tls(args: argparse.Namespace) -> Tls | None:
    if not (args.tls or args.ca or args.cert or args.key or args.tls_name):
        return None
    if bool(args.cert) != bool(args.key):
        raise UsageError("--cert and --key belong together: give both or none")
    paths = {name: Path(value) for name in ("ca", "cert", "key") if (value := getattr(args, name))}
    return Tls(**paths, server_name=args.tls_name)


def _token(args: argparse.Namespace) -> str:
    if args.token_file:
        return read_file(args.token_file, "--token-file").strip()
    return os.environ.get("OPENENGINE_TOKEN", "")
