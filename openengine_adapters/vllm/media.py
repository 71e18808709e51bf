"""Media for vLLM: decoded by vLLM's own reader, within bounds, and put into its prompts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from vllm.config import VllmConfig
from vllm.inputs.engine import tokens_input
from vllm.model_executor.model_loader import get_model_cls
from vllm.multimodal.image import convert_image_mode, normalize_image
from vllm.multimodal.media import ImageMediaIO, MediaWithBytes
from vllm.renderers.inputs.preprocess import parse_model_prompt
from vllm.v1.engine.async_llm import AsyncLLM

from openengine.v1 import inputs_pb2
from openengine_adapters.core.errors import invalid
from openengine_adapters.core.images import check_images, decode_image
from openengine_adapters.engine import Media

log = logging.getLogger(__name__)

DECODES_AT_ONCE = 4
"""Requests whose images are decoded at once, so that what they hold in memory is bounded."""


def modalities(llm: AsyncLLM) -> frozenset[inputs_pb2.Modality.ValueType]:
    """What the model takes beside text and this adapter can hand over: images, if `--limit-mm-per-prompt` allows."""
    return frozenset({inputs_pb2.MODALITY_IMAGE}) if image_limit(llm) else frozenset()


def image_limit(llm: AsyncLLM) -> int:
    """The most images in one prompt."""
    config: VllmConfig = llm.vllm_config
    if not config.model_config.is_multimodal_model:
        return 0
    return int(llm.renderer.get_mm_processor().info.allowed_mm_limits.get("image", 0))


class Prompts:
    """Makes vLLM's prompts out of text or token ids, with or without images."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._image_limit = image_limit(llm)
        config = llm.model_config.multimodal_config
        kwargs = (config.media_io_kwargs if config is not None else None) or {}
        self._reader = ImageMediaIO(**kwargs.get("image", {}))
        self._decodes = asyncio.Semaphore(DECODES_AT_ONCE)

    async def render(
        self,
        prompt: str | Sequence[int] | None,
        media: Sequence[Media] = (),
        *,
        field: str,
        cache_salt: str | None = None,
        special: bool = True,
    ) -> Any:
        """Return vLLM's engine input. None for a prompt is that of the media alone. Raises `Rejected`.

        The prompt has one placeholder of the model's for each image, in order. `special` lets the tokenizer add
        its special tokens to a text.
        """
        if not media:
            if not isinstance(prompt, str):
                return tokens_input(list(prompt or ()), cache_salt=cache_salt)
            return await self._rendered({"prompt": prompt}, cache_salt, special=special)
        if len(media) > self._image_limit:
            raise invalid(
                field,
                f"{len(media)} images are more than the {self._image_limit} that this server takes",
                limit=self._image_limit,
                value=len(media),
            )
        async with self._decodes:
            images = await asyncio.to_thread(self._decode, media)
            text = self._placeholders(len(media)) if prompt is None else prompt
            parts: dict[str, Any] = {
                "multi_modal_data": {"image": images},
                "multi_modal_uuids": {"image": [one.uuid or None for one in media]},
            }
            parts.update({"prompt": text} if isinstance(text, str) else {"prompt_token_ids": list(text)})
            try:
                rendered = await self._rendered(parts, cache_salt)
            except Exception as error:
                # Whatever the model's processor stumbles over came with the request.
                log.info("media refused", exc_info=error)
                raise invalid(
                    field,
                    "the model's processor does not take these media with this prompt; "
                    "the prompt needs one placeholder of the model for each",
                ) from error
        if self._empty_places(rendered):
            raise invalid(field, f"the prompt has more places for images than the {len(media)} that came")
        return rendered

    async def _rendered(self, parts: dict[str, Any], cache_salt: str | None, *, special: bool = True) -> Any:
        renderer = self._llm.renderer
        parsed = parse_model_prompt(self._llm.model_config, parts)
        extras = None if cache_salt is None else {"cache_salt": cache_salt}
        # None keeps what the model's processor says about special tokens.
        how = None if special else renderer.default_cmpl_tok_params.with_kwargs(add_special_tokens=False)
        (rendered,) = await renderer.render_cmpl_async([parsed], how, prompt_extras=extras)
        return rendered

    def _empty_places(self, rendered: Any) -> bool:
        """Whether an image's placeholder was left as it was, which vLLM takes for an ordinary token."""
        config = self._llm.model_config.hf_config
        token = getattr(config, "image_token_id", getattr(config, "image_token_index", None))
        filled = rendered.get("mm_placeholders", {}).get("image", ())
        places = {position for one in filled for position in range(one.offset, one.offset + one.length)}
        ids = rendered["prompt_token_ids"]
        return any(found == token and position not in places for position, found in enumerate(ids))

    def _decode(self, media: Sequence[Media]) -> list[Any]:
        """What vLLM's own reader makes of the files, less its patience with broken ones."""
        check_images(media)
        mode, background = self._reader.image_mode, self._reader.rgba_background_color
        images = []
        for one in media:
            decoded = normalize_image(decode_image(one))
            image = decoded if mode is None else convert_image_mode(decoded, mode, background)
            changed = {"image_mode": mode, "rgba_background_color": background}
            images.append(MediaWithBytes(image, one.data, None if image is decoded else changed))
        return images

    def _placeholders(self, count: int) -> str:
        model = get_model_cls(self._llm.model_config)
        return "".join(model.get_placeholder_str("image", index + 1) or "" for index in range(count))
