"""Images in Generate and Embed on a tiny LLaVA, against Hugging Face in float32."""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import pytest
import pytest_asyncio

from openengine.v1 import generate_pb2, inputs_pb2, tasks_pb2
from tests.support.wire import Answer, Wire
from tests.vllm.tasks import asking
from tests.vllm.tasks.asking import close, patiently, refused
from tests.vllm.tasks.cases import SEEING_PROMPT, Reference, png, png_file
from tests.vllm.tasks.conftest import seeing

pytestmark = pytest.mark.asyncio(loop_scope="session")

INVALID = grpc.StatusCode.INVALID_ARGUMENT
IMAGE = inputs_pb2.MODALITY_IMAGE
PICTURES = (png(1), png(2))
IMAGE_TOKENS = 16

Item = inputs_pb2.MediaItem


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def llava(reference: Reference) -> AsyncIterator[Wire]:
    """A tiny LLaVA that takes two images."""
    async with seeing("tiny-llava", "--limit-mm-per-prompt", '{"image": 2}') as wire:
        yield wire


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def embedder(reference: Reference) -> AsyncIterator[Wire]:
    """The same as an embedder of images and text."""
    async with seeing("tiny-llava", "--runner", "pooling", "--convert", "embed") as wire:
        yield wire


async def look(wire: Wire, media: Sequence[Item], prompt: str | list[int] = SEEING_PROMPT) -> Answer:
    response = generate_pb2.ResponseOptions(return_output_logprobs=True)
    return await wire.generate(prompt, max_tokens=6, media=media, response=response)


async def test_the_output_depends_on_the_image_as_in_the_reference(llava: Wire, reference: Reference) -> None:
    """MEDIA-01, MODEL-07: raw bytes and data URI; each image its own output."""
    info = await asking.model_info(llava)
    assert info.supports_multimodal
    seen = []
    for picture, expected in zip(PICTURES, reference["see"], strict=True):
        uri = "data:image/png;base64," + base64.b64encode(picture).decode()
        for item in (Item(raw_bytes=picture), Item(data_uri=uri, modality=IMAGE)):
            answer = await look(llava, [item])
            assert answer.first.ids == expected["ids"]
            assert close([token.logprob for token in answer.first.tokens], expected["logprobs"], 2e-3)
        seen.append(answer.first.ids)
    assert seen[0] != seen[1]


async def test_placeholders_are_counted_and_kept_in_order(llava: Wire) -> None:
    """MEDIA-01: two images are two places; turned round they are another prompt; usage counts what they became."""
    one = await look(llava, [Item(raw_bytes=PICTURES[0])])
    prompt = "A <image> B <image> ?"
    forward = await look(llava, [Item(raw_bytes=picture) for picture in PICTURES], prompt)
    back = await look(llava, [Item(raw_bytes=picture) for picture in PICTURES[::-1]], prompt)
    none = await look(llava, [], prompt)
    logprobs = [[token.logprob for token in answer.first.tokens] for answer in (forward, back)]
    assert not close(logprobs[0], logprobs[1], 1e-3)
    assert forward.usage.prompt_tokens == none.usage.prompt_tokens + 2 * (IMAGE_TOKENS - 1)
    assert one.usage.prompt_tokens > IMAGE_TOKENS


async def test_token_ids_with_a_placeholder(llava: Wire, reference: Reference) -> None:
    """GEN-06, with an image."""
    expected, _ = reference["see"]
    answer = await look(llava, [Item(raw_bytes=PICTURES[0])], expected["prompt"])
    assert answer.first.ids == expected["ids"]


async def test_a_uuid_names_the_content(llava: Wire, reference: Reference) -> None:
    """The second time vLLM takes what it has under this name."""
    for _ in range(2):
        answer = await look(llava, [Item(raw_bytes=PICTURES[1], uuid="picture-two")])
        assert answer.first.ids == reference["see"][1]["ids"]


async def test_media_that_are_refused(llava: Wire) -> None:
    """MEDIA-02, MEDIA-03: by name, and the engine serves on."""
    picture = Item(raw_bytes=PICTURES[0])
    bomb = png_file(30_000, 30_000, zlib.compress(b"\0" * 10_000_000))
    cases: list[tuple[list[Item], str, str]] = [
        ([Item(raw_bytes=b"no image")], SEEING_PROMPT, "media[0].raw_bytes"),
        ([Item(raw_bytes=PICTURES[0][:3000])], SEEING_PROMPT, "media[0].raw_bytes"),
        ([Item(raw_bytes=png_file(56, 56, b"spoilt"))], SEEING_PROMPT, "media[0].raw_bytes"),
        ([Item(raw_bytes=bomb)], SEEING_PROMPT, "media[0].raw_bytes"),
        ([Item(raw_bytes=png_file(0, 56, b""))], SEEING_PROMPT, "media[0].raw_bytes"),
        ([Item(data_uri="data:image/png;base64,AAAA")], SEEING_PROMPT, "media[0].data_uri"),
        ([Item(url="http://127.0.0.1/x.png")], SEEING_PROMPT, "media[0].url"),
        (
            [picture, Item(raw_bytes=b"x", modality=inputs_pb2.MODALITY_VIDEO)],
            SEEING_PROMPT,
            "media[1].modality",
        ),
        ([Item(raw_bytes=b"x", modality=inputs_pb2.MODALITY_AUDIO)], SEEING_PROMPT, "media[0].modality"),
        ([picture] * 3, "<image><image><image>", "media"),
        ([picture], "no place for it", "media"),
        ([picture] * 2, SEEING_PROMPT, "media"),
    ]
    for media, prompt, field in cases:
        code, details = await llava.refused(prompt, media=media)
        assert (code, details.partition(":")[0]) == (INVALID, field)
    code, _ = await llava.refused("cat " * 1015 + "<image>", media=[picture])
    assert code is INVALID
    assert (await look(llava, [picture])).first.ids
    assert (await llava.generate("text alone")).first.ids


def see_and_read(picture: bytes, **prompt: Any) -> tasks_pb2.TaskInput:
    media = [Item(raw_bytes=picture)]
    return tasks_pb2.TaskInput(
        item_id=f"p{len(picture)}", multimodal=tasks_pb2.MultimodalTaskInput(media=media, **prompt)
    )


async def embed(wire: Wire, *items: tasks_pb2.TaskInput) -> list[list[float]]:
    request = tasks_pb2.EmbedRequest(
        context=asking.context(wire), inputs=items, options=tasks_pb2.EmbedOptions(normalize=False)
    )
    response = await patiently(wire.stub.Embed(request))
    return [list(output.dense.values) for output in response.outputs]


async def test_images_are_embedded_as_in_the_reference(embedder: Wire, reference: Reference) -> None:
    """TASK-06, CAP-02: with a text around the image, and by itself."""
    found = (await asking.model_info(embedder)).tasks
    assert tasks_pb2.TASK_INPUT_TYPE_MULTIMODAL in found.embed.input_types
    assert list(found.embed.modalities) == [IMAGE]
    for picture, expected in zip(PICTURES, reference["see"], strict=True):
        (vector,) = await embed(embedder, see_and_read(picture, text=SEEING_PROMPT))
        assert close(vector, expected["embedding"], 2e-3)
    alone = [await embed(embedder, see_and_read(picture)) for picture in PICTURES]
    assert math.dist(alone[0][0], alone[1][0]) > 0.01
    code, details = await refused(embed(embedder, see_and_read(b"no image")))
    assert (code, details.partition(":")[0]) == (INVALID, "inputs[0].multimodal.media[0].raw_bytes")
    code, details = await refused(embed(embedder, see_and_read(PICTURES[0], text="no place for it")))
    assert (code, details.partition(":")[0]) == (INVALID, "inputs[0].multimodal.text")
