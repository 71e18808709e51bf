"""Images out of their files, within bounds that are checked before anything is decoded (MEDIA-02).

Pillow is imported only when there is an image to look at; the engines that take images bring it.
"""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Any

from openengine_adapters.core.errors import invalid
from openengine_adapters.engine import Media

MAX_PIXELS = 64 * 2**20
"""Pixels of all images of one request: 192 MiB once they are decoded to 8-bit RGB."""

FORMATS = ("BMP", "GIF", "JPEG", "PNG", "WEBP")
"""What is taken for an image: common formats that are decoded in this process."""


def check_images(images: Iterable[Media]) -> None:
    """Read the headers of one request's images. Raises `Rejected` INVALID_ARGUMENT.

    A small file can decode to any size, so the header's own size is what counts.
    """
    from PIL import Image, UnidentifiedImageError

    left = MAX_PIXELS
    for image in images:
        try:
            with Image.open(io.BytesIO(image.data), formats=FORMATS) as opened:
                width, height = opened.size
        except UnidentifiedImageError:
            raise invalid(image.field, f"is no image in one of the formats {', '.join(FORMATS)}") from None
        except Image.DecompressionBombError:
            raise invalid(image.field, f"is larger than {MAX_PIXELS} pixels", limit=MAX_PIXELS) from None
        except Exception as error:
            # Pillow's readers raise nearly anything for a broken header.
            raise invalid(image.field, f"cannot be read as an image ({type(error).__name__})") from error
        left -= width * height
        if left < 0:
            raise invalid(
                image.field,
                f"with {width} x {height} pixels the request's images are larger than {MAX_PIXELS} pixels",
                limit=MAX_PIXELS,
                value=width * height,
            )


def decode_image(image: Media) -> Any:
    """Return a Pillow image with all its pixels, of one whose header was checked. Raises `Rejected`.

    Of an animation it is the first frame.
    """
    from PIL import Image

    try:
        opened = Image.open(io.BytesIO(image.data), formats=FORMATS)
        opened.load()
    except Exception as error:
        # As above, and a reader asked again for what it could not decode gives black pixels instead.
        raise invalid(image.field, f"cannot be decoded ({type(error).__name__})") from error
    return opened
