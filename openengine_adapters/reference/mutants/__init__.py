"""Servers that are wrong on purpose: each mutant breaks one requirement, and the suite must notice.

They take hold at seams (the messages of an RPC, the port, the servicer's helpers), so nothing in the engine or in the
core knows of them.
"""

from __future__ import annotations

from openengine_adapters.reference.mutants import control, discovery, handover, kv, requests, streams, tasks
from openengine_adapters.reference.mutants.seams import MUTANTS, Mutant

__all__ = ["MUTANTS", "Mutant", "control", "discovery", "handover", "kv", "requests", "streams", "tasks"]
