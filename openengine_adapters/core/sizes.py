"""Sizes that nothing but a message's own would bound, and that an engine pays for many times over (GEN-10)."""

from __future__ import annotations

from openengine.v1 import generate_pb2
from openengine_adapters.core.errors import invalid

MAX_GUIDE = 64 * 1024
"""Bytes of a guide: compiled, it takes up to ten thousand times as much memory of the engine."""

MAX_REGEX = 4 * 1024
"""Bytes of a regular expression: the time to compile it can grow with its square, in a thread that nobody can stop."""

MAX_STOPS = 128
"""Stop conditions: each is looked for in each token's text, on the event loop."""

MAX_STOP_TEXTS = 32 * 1024
"""Bytes of all stop strings together."""

MAX_SALT = 1024
"""Bytes of a cache salt, which engines repeat in the KV events of every block."""


def check_sizes(request: generate_pb2.GenerateRequest) -> None:
    """Refuse what could exhaust the engine's memory or its compiler. Raises `Rejected`."""
    guided = request.guided
    kind = guided.WhichOneof("guide")
    if kind == "choice":
        _check("guided.choice", *guided.choice.choices, most=MAX_GUIDE)
    elif kind == "regex":
        _check("guided.regex", guided.regex, most=MAX_REGEX)
    elif kind is not None and kind != "json_object":
        _check(f"guided.{kind}", str(getattr(guided, kind)), most=MAX_GUIDE)
    conditions = request.stopping.conditions
    if len(conditions) > MAX_STOPS:
        raise invalid(
            "stopping.conditions",
            f"{len(conditions)} conditions are more than the {MAX_STOPS} that this server takes",
            limit=MAX_STOPS,
            value=len(conditions),
        )
    _check("stopping.conditions", *(one.stop_text for one in conditions), most=MAX_STOP_TEXTS)
    _check("kv.cache_salt", request.kv.cache_salt, most=MAX_SALT)


def _check(field: str, *texts: str, most: int) -> None:
    size = sum(len(text.encode()) for text in texts)
    if size > most:
        raise invalid(
            field, f"{size} bytes are more than the {most} that this server takes", limit=most, value=size
        )
