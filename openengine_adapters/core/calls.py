"""The calls that are being served, up to the moment at which their last word has left the process."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc


class OpenCalls:
    """Counts calls from the beginning of their handler until gRPC has sent their status."""

    def __init__(self) -> None:
        self._open = 0
        self._none = asyncio.Event()
        self._none.set()

    def add(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Count a call that begins."""
        self._open += 1
        self._none.clear()
        context.add_done_callback(self._done)  # type: ignore[arg-type]  # its stub is no callable

    async def none(self) -> None:
        """Wait for a moment without any; the caller has it to itself until it awaits something."""
        while self._open:
            await self._none.wait()

    def _done(self, _context: object) -> None:
        self._open -= 1
        if not self._open:
            self._none.set()


def patience(remaining: float | None, answer_s: float) -> float | None:
    """How many of a caller's `remaining` seconds its work may take, so that the answer arrives in `answer_s` more.

    A short deadline is shared in halves; None is a caller that waits without end.
    """
    return None if remaining is None else max(remaining - answer_s, remaining / 2)
