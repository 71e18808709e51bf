# SPDX-License-Identifier: Apache-2.0
"""The record of what a case sent and what came back: the evidence of its verdict."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from google.protobuf import text_format
from google.protobuf.message import Message

KEPT_FIRST, KEPT_LAST = 30, 10
LONGEST_LINE = 200
MOST_LINES = 60


@dataclass
class Reply:
    """One message that came back, and when, in seconds after the call began."""

    message: Message
    at: float
    number: int


@dataclass
class Exchange:
    """One call: the request, the replies (a long stream keeps its beginning and end) and how it ended."""

    method: str
    request: Message | bytes
    began: float = field(default_factory=time.monotonic)
    replies: list[Reply] = field(default_factory=list)
    count: int = 0
    headers_at: float | None = None
    status: str = "still open"
    ended_at: float | None = None

    def saw_headers(self) -> None:
        """Note the moment of the initial metadata."""
        if self.headers_at is None:
            self.headers_at = self._now()

    def saw(self, message: Message) -> None:
        """Note one reply."""
        if len(self.replies) >= KEPT_FIRST + KEPT_LAST:
            del self.replies[KEPT_FIRST]
        self.replies.append(Reply(message, self._now(), self.count))
        self.count += 1

    def ended(self, status: str) -> None:
        """Note how the call ended; the first word counts."""
        if self.ended_at is None:
            self.status = status
            self.ended_at = self._now()

    def _now(self) -> float:
        return time.monotonic() - self.began

    def summary(self) -> str:
        """Return the call in one line."""
        replies = f"{self.count} message{'' if self.count == 1 else 's'}, " if self.count else ""
        return f"{self.method}: {replies}{self.status}"


def render(message: Message | bytes) -> str:
    """Return the text form of a message, cut to what a person would read."""
    if isinstance(message, bytes):
        return f"{len(message)} raw bytes: {message[:60].hex(' ')}{' …' if len(message) > 60 else ''}"
    lines = text_format.MessageToString(message, as_utf8=True).splitlines()
    short = [line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE]} …" for line in lines[:MOST_LINES]]
    if len(lines) > MOST_LINES:
        short.append(f"… {len(lines) - MOST_LINES} more lines")
    return "\n".join(short) or "(empty)"


def render_short(message: Message | bytes, limit: int = 400) -> str:
    """Return the message in one line."""
    if isinstance(message, bytes):
        return render(message)
    text = text_format.MessageToString(message, as_utf8=True, as_one_line=True)
    return (text if len(text) <= limit else f"{text[:limit]} …") or "(empty)"
