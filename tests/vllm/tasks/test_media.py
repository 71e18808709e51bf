"""Images in Generate and Embed on a tiny LLaVA, against Hugging Face in float32."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import cpu_env
from tests.support.tasks import looking
from tests.support.tasks.apart import served_apart
from tests.support.tasks.cases import SEEING_PROMPT, Reference
from tests.support.tasks.looking import Sight

pytestmark = pytest.mark.asyncio(loop_scope="session")

VISION = cpu_env.vision_env()


async def test_generate(reference: Reference, tmp_path: Path) -> None:
    """A tiny LLaVA that takes two images."""
    two = ("--limit-mm-per-prompt", '{"image": 2}')
    with looking.sites() as (allowed, other):
        host = allowed.url("").removeprefix("http://")
        flags = (*two, "--allow-media-host", host)
        async with served_apart("vllm", "tiny-llava", *flags, env=VISION) as wire:
            sight = Sight(wire, SEEING_PROMPT, "<image>", 16, reference["see"])
            await looking.the_output_depends_on_the_image(sight)
            await looking.places_are_counted_and_kept_in_order(sight)
            await looking.a_uuid_names_the_content(sight, reused=True)
            await looking.media_that_are_refused(sight)
            await looking.urls_are_fetched_from_allowed_hosts_alone(sight, allowed, other)
            await looking.the_client_sends_images(sight, "vllm", tmp_path)


async def test_embed(reference: Reference) -> None:
    """The same as an embedder of images and text."""
    flags = ("--runner", "pooling", "--convert", "embed")
    async with served_apart("vllm", "tiny-llava", *flags, env=VISION) as wire:
        sight = Sight(wire, SEEING_PROMPT, "<image>", 16, reference["see"])
        await looking.images_are_embedded_as_in_the_reference(sight)
