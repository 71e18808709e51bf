"""Media as input: checked for being what it says it is, then known by its digest.

The toy model sees nothing in an image, but every different one sends it another way.
"""

from __future__ import annotations

import hashlib
import io
import struct
import wave
import zlib

from openengine.v1 import inputs_pb2
from openengine_adapters.core.errors import invalid
from openengine_adapters.engine import Media
from openengine_adapters.reference import tokenizer

PLACEHOLDERS = {
    inputs_pb2.MODALITY_IMAGE: tokenizer.IMAGE,
    inputs_pb2.MODALITY_VIDEO: tokenizer.VIDEO,
    inputs_pb2.MODALITY_AUDIO: tokenizer.AUDIO,
}
"""The token that stands for an item of each modality."""


def digest(item: Media) -> bytes:
    """Return what the model knows the item by. Raises `Rejected` when it cannot be decoded (MEDIA-02)."""
    if not _DECODABLE[item.modality](item.data):
        name = inputs_pb2.Modality.Name(item.modality).removeprefix("MODALITY_").lower()
        raise invalid(item.field, f"cannot be decoded; {name} must be {_FORMATS[item.modality]}")
    return hashlib.blake2b(item.data, digest_size=16, person=struct.pack("<I", item.modality)).digest()


def _is_image(data: bytes) -> bool:
    return _is_png(data) or (data.startswith(b"\xff\xd8\xff") and data.endswith(b"\xff\xd9"))


def _is_png(data: bytes) -> bool:
    if not data.startswith(b"\x89PNG\r\n\x1a\n"):
        return False
    position = 8
    kinds: list[bytes] = []
    while position + 12 <= len(data):
        (length,) = struct.unpack_from(">I", data, position)
        end = position + 8 + length
        body = data[position + 4 : end]
        if len(data) < end + 4 or struct.unpack_from(">I", data, end)[0] != zlib.crc32(body):
            return False
        kinds.append(body[:4])
        position = end + 4
    return kinds[:1] == [b"IHDR"] and b"IDAT" in kinds and kinds[-1] == b"IEND" and position == len(data)


def _is_wave(data: bytes) -> bool:
    try:
        with wave.open(io.BytesIO(data)) as sound:
            return bool(sound.getnframes())
    except (wave.Error, EOFError):
        return False


def _is_mp4(data: bytes) -> bool:
    position = 0
    kinds: list[bytes] = []
    while position + 8 <= len(data):
        (length,) = struct.unpack_from(">I", data, position)
        if length < 8:
            return False
        kinds.append(data[position + 4 : position + 8])
        position += length
    return kinds[:1] == [b"ftyp"] and len(kinds) > 1 and position == len(data)


_DECODABLE = {
    inputs_pb2.MODALITY_IMAGE: _is_image,
    inputs_pb2.MODALITY_VIDEO: _is_mp4,
    inputs_pb2.MODALITY_AUDIO: _is_wave,
}
_FORMATS = {
    inputs_pb2.MODALITY_IMAGE: "PNG or JPEG",
    inputs_pb2.MODALITY_VIDEO: "MP4",
    inputs_pb2.MODALITY_AUDIO: "WAV",
}
