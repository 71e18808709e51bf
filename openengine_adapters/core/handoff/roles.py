"""What the operator wants of a disaggregated server, and what its role leaves of an engine's abilities."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from openengine.v1 import discovery_pb2
from openengine_adapters.engine import EngineDescription, KvConnector

ATTACHED_GRACE_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOffWanted:
    """The command line's part: `--role`, and where decode servers ask for sessions (port 0 for a free one).

    `timeout` is how many seconds a session waits for its decode server, `transfer_timeout` how many a decode engine
    may wait for its blocks.
    """

    role: str | None = None
    host: str = "127.0.0.1"
    port: int = 0
    timeout: float = 30.0
    transfer_timeout: float = 120.0

    @property
    def attached_timeout(self) -> float:
        """How long a prefill server waits for an attached decode server, which gives up before if it still can."""
        return self.transfer_timeout + ATTACHED_GRACE_S


def in_role(
    description: EngineDescription,
    role: discovery_pb2.EngineRole.ValueType,
    connector: KvConnector,
    *,
    prefill_samples: bool = False,
) -> EngineDescription:
    """The description of an engine that only prefills or only decodes.

    A prefill engine emits no tokens, and a decode engine does not compute the prompt: what the other one does is
    not offered here, so that a caller learns from discovery which leg to ask (MODEL-07). With `prefill_samples` the
    first token is drawn on the prefill side, unseen, so that what shapes it belongs to both. One hand-over is one
    sequence.
    """
    generation = description.generation
    if generation is not None:
        generation = dataclasses.replace(generation, max_num_sequences=1, prefill_samples=prefill_samples)
    if generation is not None and (role == discovery_pb2.ENGINE_ROLE_DECODE or prefill_samples):
        generation = dataclasses.replace(generation, prompt_logprobs=None)
    elif generation is not None:
        generation = dataclasses.replace(generation, output_logprobs=None, guided_modes=frozenset())
    return dataclasses.replace(description, role=role, kv_connector=connector, generation=generation)
