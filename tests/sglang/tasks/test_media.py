"""Images in Generate and Embed on a tiny Qwen2.5-VL, against Hugging Face in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from openengine.v1 import generate_pb2
from tests.support.tasks import looking
from tests.support.tasks.apart import served_apart
from tests.support.tasks.cases import PICTURES, QWEN_PLACE, QWEN_PROMPT, QWEN_VL, Reference
from tests.support.tasks.looking import Item, Sight
from tests.support.wire import Wire

pytestmark = pytest.mark.asyncio(loop_scope="session")

FLAGS = ("--mm-attention-backend", "sdpa")


async def test_generate(reference: Reference, tmp_path: Path) -> None:
    """A tiny Qwen2.5-VL that takes two images."""
    with looking.sites() as (allowed, other):
        host = allowed.url("").removeprefix("http://")
        two = ("--limit-mm-data-per-request", '{"image": 2}')
        async with served_apart("sglang", QWEN_VL, *FLAGS, *two, "--allow-media-host", host) as wire:
            sight = Sight(wire, QWEN_PROMPT, QWEN_PLACE, 4, reference["see-qwen"])
            await looking.the_output_depends_on_the_image(sight)
            await looking.places_are_counted_and_kept_in_order(sight)
            await looking.a_uuid_names_the_content(sight, reused=False)
            await looking.media_that_are_refused(sight)
            await looking.urls_are_fetched_from_allowed_hosts_alone(sight, allowed, other)
            await looking.the_client_sends_images(sight, "sglang", tmp_path)
            await _what_sglang_cannot_do_is_refused(wire)


async def test_embed(reference: Reference) -> None:
    """The same as an embedder of images and text."""
    async with served_apart("sglang", QWEN_VL, *FLAGS, "--is-embedding") as wire:
        sight = Sight(wire, QWEN_PROMPT, QWEN_PLACE, 4, reference["see-qwen"])
        await looking.images_are_embedded_as_in_the_reference(sight)


async def _what_sglang_cannot_do_is_refused(wire: Wire) -> None:
    """GEN-06, MODEL-07: prompt scores beside an image; token ids that their own text is not tokenised to."""
    media = [Item(raw_bytes=PICTURES[0])]
    scores = generate_pb2.ResponseOptions(return_prompt_logprobs=True)
    code, details = await wire.refused(QWEN_PROMPT, media=media, response=scores)
    assert (code, details.partition(":")[0]) == (looking.INVALID, "response.return_prompt_logprobs")
    tokenizer = AutoTokenizer.from_pretrained(wire.description.model_id)
    halves = [token for part in ("c", "at", QWEN_PLACE) for token in tokenizer.encode(part)]
    code, details = await wire.refused(halves, media=media)
    assert (code, details.partition(":")[0]) == (looking.INVALID, "media")
    assert "would become others" in details
