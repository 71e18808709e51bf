"""SGLang's own KV events: switched on where nobody else listens, and found again."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from sglang.srt.disaggregation.kv_events import KVEventsConfig, ZmqEventPublisher

from openengine_adapters.engine import KvEventPublisher, StartupError
from openengine_adapters.publishers import Endpoints, KvEventsWanted, is_wildcard, local

log = logging.getLogger(__name__)


class KvEvents:
    """The publishers of one engine, SGLang's flags going before our options."""

    def __init__(self, wanted: KvEventsWanted) -> None:
        self._wanted = wanted
        self._endpoints: Endpoints | None = None
        self._config: KVEventsConfig | None = None

    def configure(self, given: str | None, ranks: int, *, cached: bool) -> str | None:
        """The value of --kv-events-config to start SGLang with; `cached` says whether it has a prefix cache.

        Raises `StartupError` for one that cannot work.
        """
        if self._wanted.events and not cached:
            raise StartupError("--kv-events needs the prefix cache; leave --disable-radix-cache out")
        if not given:
            self._config = self._own(ranks) if self._wanted.events else None
            return None if self._config is None else str(self._config.model_dump_json())
        try:
            self._config = KVEventsConfig.from_cli(given)
        except ValueError as error:
            raise StartupError(f"--kv-events-config cannot be read: {str(error).splitlines()[0]}") from error
        if self._config.publisher != "zmq":
            if self._wanted.events:
                raise StartupError(
                    "--kv-events contradicts --kv-events-config, whose publisher is not zmq; drop one of them"
                )
            return given
        _check_bound(self._config)
        if not self._config.replay_endpoint:
            log.warning("--kv-events-config has no replay_endpoint: a lost KV event cannot be repaired")
        return given

    def publishers(self, ranks: Iterable[int]) -> list[KvEventPublisher]:
        """What SGLang has bound, by rank; its schedulers would not be up without."""
        config = self._config
        if config is None or config.publisher != "zmq":
            return []
        at = ZmqEventPublisher.offset_endpoint_port
        return [
            KvEventPublisher(
                rank=rank,
                endpoint=local(at(config.endpoint, rank)),
                replay_endpoint=local(at(config.replay_endpoint, rank) or ""),
                topic=config.topic,
                buffer_steps=config.buffer_steps,
                hwm=config.hwm,
                max_queue_size=config.max_queue_size,
                every_interface=is_wildcard(config.endpoint),
            )
            for rank in ranks
        ]

    def close(self) -> None:
        """Remove the sockets. Safe to call twice."""
        if self._endpoints is not None:
            self._endpoints.close()

    def _own(self, ranks: int) -> KVEventsConfig:
        self._endpoints = Endpoints(ranks, reachable=self._wanted.reachable)
        return KVEventsConfig(
            publisher="zmq",
            endpoint=self._endpoints.live,
            replay_endpoint=self._endpoints.replay,
        )


def _check_bound(config: KVEventsConfig) -> None:
    """Without `bind` SGLang listens only where it sees a wildcard, and connects to any other TCP address."""
    listens = is_wildcard(config.endpoint) or not config.endpoint.startswith("tcp://")
    if not (listens if config.bind is None else config.bind):
        raise StartupError(
            f"SGLang would connect to the KV events endpoint {config.endpoint!r} instead of listening there; "
            'add "bind": true to --kv-events-config'
        )
