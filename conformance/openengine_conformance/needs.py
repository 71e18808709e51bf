# SPDX-License-Identifier: Apache-2.0
"""What a case needs of the server or of the command line. Each need answers "" or why it is not met."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from openengine.v1 import discovery_pb2, model_pb2
from openengine_conformance.offer import Offer
from openengine_conformance.options import Options

Need = Callable[[Offer, Options], str]
Mode = model_pb2.CandidateTokenSelectionMode


def _role(*roles: int) -> Need:
    def check(offer: Offer, options: Options) -> str:
        if not offer.generates:
            return "the model does not generate"
        return "" if offer.role in roles else f"the engine's role is {offer.role_name}"

    return check


GENERATES = _role(discovery_pb2.ENGINE_ROLE_AGGREGATED)
"""Serves plain generation."""

TAKES_PROMPTS = _role(discovery_pb2.ENGINE_ROLE_AGGREGATED, discovery_pb2.ENGINE_ROLE_PREFILL)
"""Takes a Generate request without a KV session: to serve it, or to reject it for what it asks."""

PREFILL = _role(discovery_pb2.ENGINE_ROLE_PREFILL)
DECODE = _role(discovery_pb2.ENGINE_ROLE_DECODE)
DISAGGREGATED = _role(discovery_pb2.ENGINE_ROLE_PREFILL, discovery_pb2.ENGINE_ROLE_DECODE)


def POOLING(offer: Offer, options: Options) -> str:
    """Serves tasks only."""
    return "the model generates" if offer.generates else ""


@dataclass(frozen=True)
class Advertised:
    """Met when a capability is advertised; `but` turns it round, for cases about unadvertised ones."""

    what: str
    found: Callable[[Offer], object]
    but: bool = False

    def __call__(self, offer: Offer, options: Options) -> str:
        """Return why the need is not met."""
        if bool(self.found(offer)) is not self.but:
            return ""
        return f"{self.what} is {'advertised' if self.but else 'not advertised'}"

    def __invert__(self) -> Advertised:
        return Advertised(self.what, self.found, not self.but)


TEXT = Advertised("text input", lambda o: o.info.supports_text_input)
TOKEN_IDS = Advertised("token-id input", lambda o: o.info.supports_token_ids_input)
LORA = Advertised("LoRA", lambda o: o.info.supports_lora)
MULTIMODAL = Advertised("multimodal input", lambda o: o.info.supports_multimodal)
PRIORITY = Advertised("priority", lambda o: o.generation.supports_priority)
STOP_IN_OUTPUT = Advertised("include_stop_in_output", lambda o: o.generation.supports_stop_in_output)
CACHE_SALT = Advertised("cache_salt", lambda o: o.generation.supports_cache_salt)
CACHE_BYPASS = Advertised("bypass_prefix_cache", lambda o: o.generation.supports_prefix_cache_bypass)
SEVERAL_SEQUENCES = Advertised("more than one sequence", lambda o: o.max_sequences > 1)
PROMPT_LOGPROBS = Advertised("prompt log-probabilities", lambda o: o.generation.prompt_logprobs.supported)
OUTPUT_LOGPROBS = Advertised("output log-probabilities", lambda o: o.generation.output_logprobs.supported)
CONTEXT_LENGTH = Advertised("max_context_length", lambda o: o.info.max_context_length)


def _selection(name: str, mode: int, prompt: bool) -> Advertised:
    side = "prompt" if prompt else "output"
    return Advertised(f"{name} for {side} candidates", lambda o: o.selects(mode, prompt=prompt))


PROMPT_TOP_N = _selection("TOP_N", Mode.CANDIDATE_TOKEN_SELECTION_MODE_TOP_N, prompt=True)
PROMPT_TOKEN_IDS = _selection("TOKEN_IDS", Mode.CANDIDATE_TOKEN_SELECTION_MODE_TOKEN_IDS, prompt=True)
PROMPT_ALL = _selection("ALL", Mode.CANDIDATE_TOKEN_SELECTION_MODE_ALL, prompt=True)
OUTPUT_TOP_N = _selection("TOP_N", Mode.CANDIDATE_TOKEN_SELECTION_MODE_TOP_N, prompt=False)
OUTPUT_TOKEN_IDS = _selection("TOKEN_IDS", Mode.CANDIDATE_TOKEN_SELECTION_MODE_TOKEN_IDS, prompt=False)
OUTPUT_ALL = _selection("ALL", Mode.CANDIDATE_TOKEN_SELECTION_MODE_ALL, prompt=False)


def guided(mode: model_pb2.GuidedDecodingMode.ValueType) -> Advertised:
    """The guided-decoding mode `mode`."""
    name = model_pb2.GuidedDecodingMode.Name(mode).removeprefix("GUIDED_DECODING_MODE_")
    return Advertised(f"guided mode {name}", lambda o: o.guided(mode))


EMBED = Advertised("Embed", lambda o: o.info.tasks.embed.supported)
CLASSIFY = Advertised("Classify", lambda o: o.info.tasks.classify.supported)
SCORE = Advertised("Score", lambda o: o.info.tasks.score.supported)
ANY_TASK = Advertised(
    "a task (Embed, Classify, Score)",
    lambda o: o.info.tasks.embed.supported or o.info.tasks.classify.supported or o.info.tasks.score.supported,
)


@dataclass(frozen=True)
class Given:
    """Met when the command line gives an option."""

    option: str
    found: Callable[[Options], object]
    why: str

    def __call__(self, offer: Offer, options: Options) -> str:
        """Return why the need is not met."""
        return "" if self.found(options) else f"{self.why}: give {self.option}"


LORA_PATH = Given("--lora PATH", lambda o: o.lora, "no adapter to load")
PEER = Given("--peer HOST:PORT", lambda o: o.peer, "no decode server to hand over to")
AGGREGATED_PEER = Given("--aggregated HOST:PORT", lambda o: o.aggregated, "no server to compare with")
STALL_LIMIT = Given(
    "--stall-limit SECONDS", lambda o: o.stall_limit, "the limit for a stalled reader is unknown"
)
MAY_DRAIN = Given("--include-drain", lambda o: o.include_drain, "the server takes no work afterwards")
