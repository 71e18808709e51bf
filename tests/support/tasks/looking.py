"""What a model that takes images must do on every engine, against Hugging Face in float32."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import http.server
import json
import math
import subprocess
import threading
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from openengine.v1 import generate_pb2, inputs_pb2, tasks_pb2
from tests.support.server import executable
from tests.support.tasks import asking
from tests.support.tasks.asking import close, patiently, refused
from tests.support.tasks.cases import PICTURES, png_file
from tests.support.wire import PATIENCE_S, Answer, Wire

INVALID = grpc.StatusCode.INVALID_ARGUMENT
IMAGE = inputs_pb2.MODALITY_IMAGE

Item = inputs_pb2.MediaItem


@dataclass(frozen=True)
class Sight:
    """A served model that takes two images, and what the reference saw.

    `place` is an image's place in a prompt, which `one` token of it is repeated `tokens` times for; `prompt` has one.
    """

    wire: Wire
    prompt: str
    place: str
    tokens: int
    expected: Sequence[dict[str, Any]]

    async def look(self, media: Sequence[Item], prompt: str | list[int] | None = None) -> Answer:
        """Six greedy tokens with their log-probabilities."""
        response = generate_pb2.ResponseOptions(return_output_logprobs=True)
        asked = self.prompt if prompt is None else prompt
        return await self.wire.generate(asked, max_tokens=6, media=media, response=response)


async def the_output_depends_on_the_image(sight: Sight) -> None:
    """MEDIA-01, MODEL-07, GEN-06: raw bytes, data URI, text and token ids; each image its own output."""
    assert (await asking.model_info(sight.wire)).supports_multimodal
    seen = []
    for picture, expected in zip(PICTURES, sight.expected, strict=True):
        uri = "data:image/png;base64," + base64.b64encode(picture).decode()
        for item in (Item(raw_bytes=picture), Item(data_uri=uri, modality=IMAGE)):
            answer = await sight.look([item])
            assert answer.first.ids == expected["ids"]
            logprobs = [token.logprob for token in answer.first.tokens]
            assert close(logprobs, expected["logprobs"], 2e-3)
            assert answer.usage.prompt_tokens == expected["length"]
        by_ids = await sight.look([Item(raw_bytes=picture)], expected["prompt"])
        assert by_ids.first.ids == expected["ids"]
        seen.append(answer.first.ids)
    assert seen[0] != seen[1]


async def places_are_counted_and_kept_in_order(sight: Sight) -> None:
    """MEDIA-01: two images are two places; turned round they are another prompt; usage counts what they became."""
    prompt = f"A {sight.place} B {sight.place} ?"
    forward = await sight.look([Item(raw_bytes=picture) for picture in PICTURES], prompt)
    back = await sight.look([Item(raw_bytes=picture) for picture in PICTURES[::-1]], prompt)
    none = await sight.look([], prompt)
    logprobs = [[token.logprob for token in answer.first.tokens] for answer in (forward, back)]
    assert not close(logprobs[0], logprobs[1], 1e-3)
    assert forward.usage.prompt_tokens == none.usage.prompt_tokens + 2 * (sight.tokens - 1)


async def a_uuid_names_the_content(sight: Sight, *, reused: bool) -> None:
    """What came first under a name is `reused` for other content under that name; or the name means nothing."""
    for picture, seen in ((1, 1), (0, 1 if reused else 0)):
        answer = await sight.look([Item(raw_bytes=PICTURES[picture], uuid="picture-two")])
        assert answer.first.ids == sight.expected[seen]["ids"]


async def media_that_are_refused(sight: Sight) -> None:
    """MEDIA-02, MEDIA-03: by name, and the engine serves on."""
    picture = Item(raw_bytes=PICTURES[0])
    bomb = png_file(30_000, 30_000, zlib.compress(b"\0" * 10_000_000))
    video = Item(raw_bytes=b"x", modality=inputs_pb2.MODALITY_VIDEO)
    cases: list[tuple[list[Item], str, str]] = [
        ([Item(raw_bytes=b"no image")], sight.prompt, "media[0].raw_bytes"),
        ([Item(raw_bytes=PICTURES[0][:3000])], sight.prompt, "media[0].raw_bytes"),
        ([Item(raw_bytes=png_file(56, 56, b"spoilt"))], sight.prompt, "media[0].raw_bytes"),
        ([Item(raw_bytes=bomb)], sight.prompt, "media[0].raw_bytes"),
        ([Item(raw_bytes=png_file(0, 56, b""))], sight.prompt, "media[0].raw_bytes"),
        ([Item(data_uri="data:image/png;base64,AAAA")], sight.prompt, "media[0].data_uri"),
        ([Item(url="http://127.0.0.2/x.png")], sight.prompt, "media[0].url"),
        ([picture, video], sight.prompt, "media[1].modality"),
        ([Item(raw_bytes=b"x", modality=inputs_pb2.MODALITY_AUDIO)], sight.prompt, "media[0].modality"),
        ([picture] * 3, sight.place * 3, "media"),
        ([picture], "no place for it", "media"),
        ([picture] * 2, sight.prompt, "media"),
        ([picture], sight.place * 2, "media"),
    ]
    for media, prompt, field in cases:
        code, details = await sight.wire.refused(prompt, media=media)
        assert (code, details.partition(":")[0]) == (INVALID, field), details
    # It fits as text, and no longer once the place has become an image's tokens.
    longest = (await asking.model_info(sight.wire)).max_context_length
    long = "cat " * (longest - 5) + sight.place
    assert (await sight.wire.generate(long, max_tokens=1)).first.ids
    code, _ = await sight.wire.refused(long, media=[picture])
    assert code is INVALID
    assert (await sight.look([picture])).first.ids
    assert (await sight.wire.generate("text alone")).first.ids


async def the_client_sends_images(sight: Sight, engine: str, folder: Path) -> None:
    """`openengine generate --image FILE`, as a person types it."""
    file = folder / "picture.png"
    file.write_bytes(PICTURES[0])
    command = [
        executable(engine, "openengine"),
        *("generate", sight.prompt, "--target", sight.wire.target, "--image", str(file)),
        *("--max-tokens", "6", "--temperature", "0", "--logprobs", "0", "--output", "json"),
    ]
    # Not with asyncio: SGLang sets an event loop policy that has no processes for loops of another kind.
    client = await asyncio.to_thread(subprocess.run, command, capture_output=True, timeout=PATIENCE_S)
    assert client.returncode == 0, client.stderr.decode()
    output = client.stdout
    text = "".join(found["text"] for line in output.splitlines() if "text" in (found := json.loads(line)))
    assert text == (await sight.look([Item(raw_bytes=PICTURES[0])])).first.text


# --------------------------------------------------------------------------------------------------- by a URL


class Site(http.server.ThreadingHTTPServer):
    """A web site with a picture at /0 and /1, and under /away/N on a site that nobody allowed; it counts requests."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Page)
        self.paths: list[str] = []
        self.elsewhere = ""

    def url(self, path: str) -> str:
        """The address of a page."""
        return f"http://127.0.0.1:{self.server_address[1]}{path}"


class _Page(http.server.BaseHTTPRequestHandler):
    server: Site

    def do_GET(self) -> None:
        self.server.paths.append(self.path)
        away = self.path.startswith("/away/")
        self.send_response(302 if away else 200)
        body = b"" if away else PICTURES[int(self.path[-1])]
        if away:
            self.send_header("Location", self.server.elsewhere + self.path.removeprefix("/away"))
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Keep quiet."""


@contextlib.contextmanager
def sites() -> Iterator[tuple[Site, Site]]:
    """One site that a server may fetch from, which sends on to a second one that it may not."""
    with Site() as allowed, Site() as other:
        allowed.elsewhere = other.url("")
        threads = [threading.Thread(target=site.serve_forever, args=(0.05,)) for site in (allowed, other)]
        for thread in threads:
            thread.start()
        try:
            yield allowed, other
        finally:
            for site in (allowed, other):
                site.shutdown()
            for thread in threads:
                thread.join()


async def urls_are_fetched_from_allowed_hosts_alone(sight: Sight, allowed: Site, other: Site) -> None:
    """MEDIA-03: the picture behind it; never from another host, not even when sent there."""
    for position, expected in enumerate(sight.expected):
        answer = await sight.look([Item(url=allowed.url(f"/{position}"))])
        assert answer.first.ids == expected["ids"]
    assert allowed.paths == ["/0", "/1"]
    for url in (allowed.url("/away/0"), other.url("/0"), "file:///etc/hostname"):
        code, details = await sight.wire.refused(sight.prompt, media=[Item(url=url)])
        assert (code, details.partition(":")[0]) == (INVALID, "media[0].url")
    assert not other.paths


# ---------------------------------------------------------------------------------------------------- embedded


def see_and_read(picture: bytes, **prompt: Any) -> tasks_pb2.TaskInput:
    """An input of an image, with or without a prompt around it."""
    media = [Item(raw_bytes=picture)]
    holder = tasks_pb2.MultimodalTaskInput(media=media, **prompt)
    return tasks_pb2.TaskInput(item_id=f"p{len(picture)}", multimodal=holder)


async def embed(wire: Wire, *items: tasks_pb2.TaskInput) -> list[list[float]]:
    """The vectors, at the length that the model gives them."""
    request = tasks_pb2.EmbedRequest(context=asking.context(wire), inputs=items)
    response = await patiently(wire.stub.Embed(request))
    return [list(output.dense.values) for output in response.outputs]


async def images_are_embedded_as_in_the_reference(sight: Sight) -> None:
    """TASK-06, CAP-02: with a text around the image, and by itself."""
    found = (await asking.model_info(sight.wire)).tasks
    assert tasks_pb2.TASK_INPUT_TYPE_MULTIMODAL in found.embed.input_types
    assert list(found.embed.modalities) == [IMAGE]
    for picture, expected in zip(PICTURES, sight.expected, strict=True):
        (vector,) = await embed(sight.wire, see_and_read(picture, text=sight.prompt))
        assert close(asking.unit(vector), asking.unit(expected["embedding"]), 2e-3)
    alone = [await embed(sight.wire, see_and_read(picture)) for picture in PICTURES]
    assert math.dist(alone[0][0], alone[1][0]) > 0.01
    code, details = await refused(embed(sight.wire, see_and_read(b"no image")))
    assert (code, details.partition(":")[0]) == (INVALID, "inputs[0].multimodal.media[0].raw_bytes")
    code, details = await refused(embed(sight.wire, see_and_read(PICTURES[0], text="no place for it")))
    assert (code, details.partition(":")[0]) == (INVALID, "inputs[0].multimodal.text")
