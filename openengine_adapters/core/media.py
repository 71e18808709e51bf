"""From a request's media items to the bytes of their files (MEDIA-01 … MEDIA-03).

Raw bytes and data URIs are taken as they are, URLs are fetched where the operator allows the host. What the bytes
mean is for the engine's own decoder to say; here they are only bounded.
"""

from __future__ import annotations

import base64
import binascii
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from openengine.v1 import inputs_pb2
from openengine_adapters.core.batches import run_batch
from openengine_adapters.core.errors import invalid
from openengine_adapters.core.fetch import Fetcher, HostRule
from openengine_adapters.core.validation import modality_of
from openengine_adapters.engine import Media

ITEMS_AT_ONCE = 4
"""Items of one request that are fetched side by side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaPolicy:
    """Where media may come from: `hosts` for URLs, at most `max_bytes` in one request, `timeout_s` for a fetch."""

    hosts: tuple[HostRule, ...] = ()
    max_bytes: int = 64 * 2**20
    timeout_s: float = 10.0


class MediaLoader:
    """Loads media for every request of a server."""

    def __init__(self, policy: MediaPolicy) -> None:
        self._policy = policy
        self._fetcher = Fetcher(policy.hosts, policy.timeout_s)

    def for_request(self) -> RequestMedia:
        """The loader of one request, with a size limit of its own."""
        return RequestMedia(self._fetcher, self._policy.max_bytes)


class RequestMedia:
    """Loads the media of one request, which share one size limit."""

    def __init__(self, fetcher: Fetcher, max_bytes: int) -> None:
        self._fetcher = fetcher
        self._max_bytes = max_bytes
        self._left = max_bytes
        self._lock = threading.Lock()  # a fetch counts in its own thread

    async def load(self, field: str, items: Sequence[inputs_pb2.MediaItem]) -> list[Media]:
        """Load checked items, in order. Raises `Rejected` INVALID_ARGUMENT for the first that cannot be had."""

        async def one(index: int, item: inputs_pb2.MediaItem) -> Media:
            return await self._load(f"{field}[{index}]", item)

        return await run_batch(items, one, ITEMS_AT_ONCE)

    async def _load(self, place: str, item: inputs_pb2.MediaItem) -> Media:
        source = item.WhichOneof("source")
        field = f"{place}.{source}"
        mime_type = item.mime_type
        if source == "raw_bytes":
            data = item.raw_bytes
            self._take(field, len(data))
        elif source == "data_uri":
            data, mime_type = self._from_data_uri(field, item.data_uri)
        else:
            data, mime_type = await self._fetcher.fetch(field, item.url, self._take)
        if not data:
            raise invalid(field, "holds no bytes")
        return Media(
            modality=modality_of(item),
            data=data,
            field=field,
            mime_type=item.mime_type or mime_type,
            uuid=item.uuid,
        )

    def _from_data_uri(self, field: str, uri: str) -> tuple[bytes, str]:
        head, comma, body = uri.partition(",")
        scheme, _, kind = head.partition(":")
        mime_type, _, coding = kind.rpartition(";")
        if scheme.lower() != "data" or not comma or coding.strip().lower() != "base64":
            raise invalid(field, "must look like data:<mime type>;base64,<data>")
        self._take(field, len(body) * 3 // 4 - body[-2:].count("="))
        try:
            return base64.b64decode(body, validate=True), mime_type.partition(";")[0]
        except (binascii.Error, ValueError) as error:
            raise invalid(field, f"its base64 is broken: {error}") from None

    def _take(self, field: str, size: int) -> None:
        """Count `size` more bytes. Raises `Rejected` when the request has too many."""
        with self._lock:
            self._left -= size
            over = self._left < 0
        if over:
            raise invalid(
                field,
                f"the request's media are more than the {self._max_bytes} bytes that this server takes",
                limit=self._max_bytes,
            )
