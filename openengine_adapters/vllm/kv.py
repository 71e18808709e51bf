"""vLLM's own KV events: switched on where nobody else listens, and found again."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Iterable, Mapping

from vllm import SamplingParams
from vllm.config import KVEventsConfig, VllmConfig
from vllm.inputs.engine import tokens_input
from vllm.v1.engine.async_llm import AsyncLLM

from openengine_adapters.engine import KvEventPublisher, StartupError
from openengine_adapters.publishers import Endpoints, KvEventsWanted, is_wildcard, local

log = logging.getLogger(__name__)

FLUSH_S = 60.0
"""How long one token may take that makes vLLM send what it holds back."""


class KvEvents:
    """The publishers of one engine, vLLM's flags going before our options."""

    def __init__(self, wanted: KvEventsWanted) -> None:
        self._wanted = wanted
        self._endpoints: Endpoints | None = None

    def configure(self, given: KVEventsConfig | None, ranks: int) -> KVEventsConfig | None:
        """The configuration to start vLLM with. Raises `StartupError` for one that cannot work."""
        if given is None:
            return self._own(ranks) if self._wanted.events else None
        if _is_on(given):
            _check_bound(given.endpoint)
            if not given.replay_endpoint:
                log.warning("--kv-events-config has no replay_endpoint: a lost KV event cannot be repaired")
        elif self._wanted.events:
            raise StartupError(
                "--kv-events contradicts --kv-events-config, which leaves enable_kv_cache_events off; drop one of them"
            )
        return given

    def check(self, config: VllmConfig) -> None:
        """Raise `StartupError` when no event would ever come."""
        if self._wanted.events and not config.cache_config.enable_prefix_caching:
            raise StartupError("--kv-events needs --enable-prefix-caching; this model runs without it")

    def close(self) -> None:
        """Remove the sockets. Safe to call twice."""
        if self._endpoints is not None:
            self._endpoints.close()

    def _own(self, ranks: int) -> KVEventsConfig:
        self._endpoints = Endpoints(ranks, reachable=self._wanted.reachable)
        return KVEventsConfig(
            enable_kv_cache_events=True,
            publisher="zmq",
            endpoint=self._endpoints.live,
            replay_endpoint=self._endpoints.replay,
        )


def publishers(sources: Mapping[int, KVEventsConfig]) -> list[KvEventPublisher]:
    """What vLLM has bound, by rank, as it says itself."""
    return [
        KvEventPublisher(
            rank=rank,
            endpoint=local(source.endpoint),
            replay_endpoint=local(source.replay_endpoint or ""),
            topic=source.topic,
            buffer_steps=source.buffer_steps,
            hwm=source.hwm,
            max_queue_size=source.max_queue_size,
            every_interface=is_wildcard(source.endpoint),
        )
        for rank, source in sorted(sources.items())
        if _is_on(source)
    ]


async def clear_cache(llm: AsyncLLM, ranks: Iterable[int]) -> bool:
    """Empty the prefix cache and let subscribers know at once; False while requests hold blocks.

    vLLM sends events at the end of a step only, so an idle engine would keep this one until its next request.
    """
    cleared = bool(await llm.reset_prefix_cache())
    if cleared and llm.get_kv_event_sources():
        await flush(llm, ranks)
    return cleared


async def flush(llm: AsyncLLM, ranks: Iterable[int]) -> None:
    """Take one small step on each rank; a single token fills no block."""
    async with asyncio.timeout(FLUSH_S):
        await asyncio.gather(*(_one_token(llm, rank) for rank in ranks))


async def _one_token(llm: AsyncLLM, rank: int) -> None:
    params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
    several = llm.vllm_config.parallel_config.data_parallel_size > 1
    async for _ in llm.generate(
        tokens_input([0]), params, f"flush-{uuid.uuid4().hex}", data_parallel_rank=rank if several else None
    ):
        pass


def _is_on(config: KVEventsConfig) -> bool:
    return bool(config.enable_kv_cache_events) and config.publisher == "zmq"


def _check_bound(endpoint: str) -> None:
    """vLLM listens only where it sees a wildcard; to any other TCP address it connects."""
    if endpoint.startswith("tcp://") and "*" not in endpoint and "::" not in endpoint:
        raise StartupError(
            f"vLLM would connect to the KV events endpoint {endpoint!r} instead of listening there; "
            "write tcp://*:PORT, or an ipc:// path"
        )
