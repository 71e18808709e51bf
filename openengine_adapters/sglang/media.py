"""Prompts for SGLang, with or without images.

SGLang decodes images itself, from the bytes that it keeps for as long as the request runs. Here they are decoded once
before, within bounds, so that what is broken or too large never gets there.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from openengine.v1 import inputs_pb2
from openengine_adapters.core.errors import invalid
from openengine_adapters.core.images import check_images, decode_image
from openengine_adapters.engine import Media

log = logging.getLogger(__name__)

ADMISSIONS_AT_ONCE = 4
"""Requests with images that are decoded and taken by SGLang at once, so that what they hold in memory is bounded."""

LONG_TEXT = 4096
"""Characters from which on a text is tokenised off the event loop."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as the model reads it, each placeholder as long as its image, and what SGLang's requests take for it."""

    ids: list[int]
    fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Size:
    """An image's size in pixels, under the names that SGLang looks for."""

    width: int
    height: int


def modalities(manager: Any) -> frozenset[inputs_pb2.Modality.ValueType]:
    """What the model takes beside text and this adapter can hand over: images, if their length in tokens is known.

    `manager` is SGLang's tokenizer manager.
    """
    return frozenset({inputs_pb2.MODALITY_IMAGE}) if _takes_images(manager) else frozenset()


def _takes_images(manager: Any) -> bool:
    processor = manager.mm_processor
    tokens = getattr(processor, "mm_tokens", None)
    if tokens is None or tokens.image_token_id is None or not isinstance(tokens.image_token, str):
        return False
    if manager.config_value("language_model_only") or _limit(manager) == 0:
        return False
    try:
        processor.resolve_image_token_counts([_Size(64, 64)])
    except Exception as error:
        log.info("no images: SGLang does not tell how many tokens one takes (%s)", type(error).__name__)
        return False
    return True


def _limit(manager: Any) -> int | None:
    limits: Mapping[str, int] = manager.config_value("limit_mm_data_per_request") or {}
    return limits.get("image")


class Prompts:
    """Makes SGLang's prompts out of text or token ids."""

    def __init__(self, manager: Any) -> None:
        self._tokenizer = manager.tokenizer
        self._processor = manager.mm_processor
        self._limit = _limit(manager)
        self._longest_text = manager.context_len * max(map(len, manager.tokenizer.get_vocab()))
        self._admissions = asyncio.Semaphore(ADMISSIONS_AT_ONCE)

    @contextlib.asynccontextmanager
    async def rendered(
        self, prompt: str | Sequence[int] | None, media: Sequence[Media] = (), *, field: str
    ) -> AsyncIterator[Prompt]:
        """Hold a prompt until SGLang has taken it. None is the prompt of the media alone. Raises `Rejected`.

        The prompt has one placeholder of the model's for each image, in order; `field` names it in refusals.
        """
        if not media:
            ids = await self.tokens(prompt) if isinstance(prompt, str) else list(prompt or ())
            yield Prompt(ids, {"input_ids": ids})
            return
        if self._limit is not None and len(media) > self._limit:
            raise invalid(
                field,
                f"{len(media)} images are more than the {self._limit} that this server takes",
                limit=self._limit,
                value=len(media),
            )
        async with self._admissions:
            sizes = await asyncio.to_thread(_decode, media)
            text = await self._text(prompt, len(media), field)
            ids = self._expanded(text, await self.tokens(text), sizes, field)
            yield Prompt(ids, {"text": text, "image_data": [one.data for one in media]})

    def check_text(self, field: str, *texts: str) -> None:
        """Refuse, untokenised, what a whole context of the longest tokens could not spell. Raises `Rejected`."""
        length = sum(map(len, texts))
        if length > self._longest_text:
            raise invalid(
                field,
                f"{length} characters are more than the {self._longest_text} that the context could hold; shorten it",
                limit=self._longest_text,
                value=length,
            )

    async def tokens(self, text: str, *, special: bool = True) -> list[int]:
        """The ids of a text as SGLang makes them; `special` lets the tokenizer add its special tokens."""
        if len(text) < LONG_TEXT:
            return self._tokenise(text, special=special)
        return await asyncio.to_thread(self._tokenise, text, special=special)

    def _tokenise(self, text: str, *, special: bool) -> list[int]:
        if not getattr(self._tokenizer, "is_fast", False):
            return list(self._tokenizer.encode(text, add_special_tokens=special))
        return list(self._tokenizer([text], add_special_tokens=special)["input_ids"][0])

    async def _text(self, prompt: str | Sequence[int] | None, images: int, field: str) -> str:
        """The prompt as text, which is all that SGLang takes beside media."""
        if prompt is None:
            return str(self._processor.mm_tokens.image_token) * images
        if isinstance(prompt, str):
            return prompt
        text = str(self._tokenizer.decode(list(prompt)))
        if await self.tokens(text) != list(prompt):
            raise invalid(
                field,
                "with media these ids would become others, because this engine reads them as text; send text",
            )
        return text

    def _expanded(self, text: str, ids: Sequence[int], sizes: Sequence[_Size], field: str) -> list[int]:
        """The ids with each placeholder repeated as often as its image has tokens."""
        tokens = self._processor.mm_tokens
        places = ids.count(tokens.image_token_id)
        # Of more images than places SGLang would drop some, with no more than a log line.
        if not places == len(tokens.image_token_regex.findall(text)) == len(sizes):
            raise invalid(
                field,
                f"needs one placeholder {tokens.image_token!r} for each of {len(sizes)} images, and has {places}",
                limit=len(sizes),
                value=places,
            )
        try:
            counts = iter(self._processor.resolve_image_token_counts(sizes))
        except Exception as error:
            # Whatever the model's processor stumbles over came with the request.
            log.info("media refused", exc_info=error)
            raise invalid(field, "the model's processor does not take images of these sizes") from error
        expanded: list[int] = []
        for token in ids:
            expanded += [token] * (next(counts) if token == tokens.image_token_id else 1)
        return expanded


def _decode(media: Sequence[Media]) -> list[_Size]:
    check_images(media)
    return [_Size(*decode_image(one).size) for one in media]
