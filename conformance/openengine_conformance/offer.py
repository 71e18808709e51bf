# SPDX-License-Identifier: Apache-2.0
"""What a server says about itself, as the cases ask for it."""

from __future__ import annotations

from dataclasses import dataclass, field

from openengine.v1 import discovery_pb2, model_pb2

Role = discovery_pb2.EngineRole


@dataclass(frozen=True)
class Offer:
    """The discovery answers of one server and the model that the cases name in their requests."""

    engine: discovery_pb2.EngineInfo = field(default_factory=discovery_pb2.EngineInfo)
    info: model_pb2.ModelInfo = field(default_factory=model_pb2.ModelInfo)
    model: str = ""

    @property
    def role(self) -> int:
        """The engine's role."""
        return self.engine.role

    @property
    def role_name(self) -> str:
        """The role's short name, for people."""
        name = Role.Name(self.engine.role) if self.engine.role in Role.values() else str(self.engine.role)
        return name.removeprefix("ENGINE_ROLE_")

    @property
    def generation(self) -> model_pb2.GenerationCapabilities:
        """What Generate takes; empty when nothing is reported."""
        return self.info.generation

    @property
    def generates(self) -> bool:
        """Whether the model generates text: it says so, or it says nothing about any task either."""
        tasks = self.info.tasks
        pooling = tasks.embed.supported or tasks.classify.supported or tasks.score.supported
        return self.info.HasField("generation") or not pooling

    @property
    def max_sequences(self) -> int:
        """The largest `num_sequences`; 1 when nothing is reported."""
        return self.generation.max_num_sequences or 1

    @property
    def ranks(self) -> range:
        """The data-parallel ranks that the server answers for."""
        parallelism = self.engine.parallelism
        start = parallelism.data_parallel_start_rank
        return range(start, start + (parallelism.data_parallel_size or 1))

    @property
    def names(self) -> list[str]:
        """Every name of the model."""
        info = self.info
        return [
            n for n in dict.fromkeys([info.model_id, info.served_model_name, *info.served_model_aliases]) if n
        ]

    def guided(self, mode: int) -> bool:
        """Whether this guided-decoding mode is advertised."""
        guided = self.generation.guided_decoding
        return guided.supported and mode in guided.modes

    def logprobs(self, *, prompt: bool) -> model_pb2.LogprobCapabilities:
        """The log-probability capabilities of prompt or output."""
        return self.generation.prompt_logprobs if prompt else self.generation.output_logprobs

    def selects(self, mode: int, *, prompt: bool) -> bool:
        """Whether this candidate selection mode is advertised for prompt or output."""
        capabilities = self.logprobs(prompt=prompt)
        return capabilities.supported and mode in capabilities.candidate_selection_modes

    def top_n(self, *, prompt: bool, wanted: int) -> int:
        """The largest top-N up to `wanted`; 0 when the mode is not advertised."""
        if not self.selects(model_pb2.CANDIDATE_TOKEN_SELECTION_MODE_TOP_N, prompt=prompt):
            return 0
        capabilities = self.logprobs(prompt=prompt)
        return min(wanted, capabilities.max_top_n) if capabilities.HasField("max_top_n") else wanted
