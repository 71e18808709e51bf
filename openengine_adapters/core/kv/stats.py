"""Counters of the KV plane, one set for each data-parallel rank."""

from __future__ import annotations

from dataclasses import dataclass, field

from openengine_adapters.core.kv.native import Skipped


@dataclass(slots=True)
class RankStats:
    """Counted since the server is up, except for what says "now"."""

    rank: int
    batches: int = 0
    stored_blocks: int = 0
    removed_blocks: int = 0
    cleared: int = 0
    unknown_removals: int = 0  # removals of blocks that the index does not know
    skipped: Skipped = field(default_factory=Skipped)
    gaps: int = 0  # breaks in the engine's sequence
    repaired: int = 0  # of these, closed from the replay socket
    restarts: int = 0  # times that the history began anew: a loss, or another publisher
    overloaded: int = 0  # subscribers ended because they read too slowly
    subscribers: int = 0  # now
    blocks: int = 0  # in the index now, copies not counted
    complete: bool = True  # the index holds the whole cache now
    lag_s: float = 0.0  # seconds from the last batch's timestamp to its arrival here
    next_sequence_number: int = 0
