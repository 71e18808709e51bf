"""Log lines, as text or JSON. Request ids are data, prompt text is never logged."""

from __future__ import annotations

import json
import logging
import sys
import time

FIELDS = ("rpc", "request_id", "code", "field", "metadata", "error_id")
"""The names that `extra` may use; others, which engines add to every record, are left out."""


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message and the known fields of `extra`."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line for one record."""
        entry: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{record.msecs:03.0f}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry.update(_extra(record))
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


class TextFormatter(logging.Formatter):
    """A line for people; control characters in data cannot forge another line."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # logging's own name
        """Return the line with its data made printable."""
        line = super().formatMessage(record)
        line += "".join(f" {key}={value}" for key, value in _extra(record).items())
        return "".join(char if char.isprintable() else f"\\x{ord(char):02x}" for char in line)


def _extra(record: logging.LogRecord) -> dict[str, object]:
    return {name: vars(record)[name] for name in FIELDS if name in vars(record)}


def configure(level: str, form: str) -> None:
    """Send this package's log to standard error; the engine's own logging stays as it is."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    root = logging.getLogger("openengine_adapters")
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    root.propagate = False
