"""The bounds of images, which need Pillow but no engine."""

from __future__ import annotations

import io
import zlib

import grpc
import pytest

from openengine.v1 import inputs_pb2
from openengine_adapters.core import images
from openengine_adapters.core.errors import Rejected
from openengine_adapters.engine import Media
from tests.support.tasks.cases import png, png_file

# A side of the largest square that one request may hold.
SIDE = 8192


def media(data: bytes, place: int = 0) -> Media:
    return Media(inputs_pb2.MODALITY_IMAGE, data, f"media[{place}].raw_bytes")


def written(kind: str, size: tuple[int, int] = (4, 4)) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", size).save(file, kind)
    return file.getvalue()


def refusal(*data: bytes) -> Rejected:
    with pytest.raises(Rejected) as caught:
        images.check_images([media(one, place) for place, one in enumerate(data)])
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
    return caught.value


@pytest.mark.parametrize("kind", images.FORMATS)
def test_common_formats_pass(kind: str) -> None:
    images.check_images([media(written(kind))])


@pytest.mark.parametrize("kind", ["TIFF", "ICO", "PPM", "TGA", "EPS"])
def test_other_formats_are_refused(kind: str) -> None:
    """Some of Pillow's readers start other programs, and all of them are more to be attacked."""
    assert "is no image" in str(refusal(written(kind)))


@pytest.mark.parametrize(
    "data", [b"", b"x", b"GIF89a", b"BM", b"\x89PNG\r\n\x1a\n", b"RIFF\0\0\0\0WEBPVP8 ", b"\xff\xd8\xff"]
)
def test_what_only_begins_like_an_image_is_refused(data: bytes) -> None:
    assert refusal(data).field == "media[0].raw_bytes"


def test_every_cut_of_an_image_is_refused_or_has_a_size() -> None:
    """No error of Pillow's gets through."""
    for kind in images.FORMATS:
        whole = written(kind)
        for end in range(0, len(whole), 7):
            try:
                images.check_images([media(whole[:end])])
            except Rejected as rejected:
                assert rejected.code is grpc.StatusCode.INVALID_ARGUMENT  # noqa: PT017 - either end is right


def test_size_is_what_the_header_says() -> None:
    """The limit itself passes; a pixel column more does not, although the file is a few bytes."""
    small = zlib.compress(b"\0")
    images.check_images([media(png_file(SIDE, SIDE, small))])
    assert refusal(png_file(SIDE, SIDE + 1, small)).limit == images.MAX_PIXELS
    assert refusal(png_file(65535, 65535, small)).limit == images.MAX_PIXELS


def test_pixels_are_all_there_or_the_image_is_refused() -> None:
    """Also where Pillow itself would go on with what it could read."""
    whole = png(1)
    assert images.decode_image(media(whole)).size == (56, 56)
    for spoilt in (whole[:3000], png_file(56, 56, b"spoilt"), png_file(56, 56, zlib.compress(b"\0" * 100))):
        images.check_images([media(spoilt)])
        with pytest.raises(Rejected) as caught:
            images.decode_image(media(spoilt))
        assert "cannot be decoded" in str(caught.value)


def test_images_of_one_request_share_the_limit() -> None:
    half = png_file(SIDE, SIDE // 2, zlib.compress(b"\0"))
    images.check_images([media(half), media(half)])
    assert refusal(half, half, png(1)).field == "media[2].raw_bytes"
