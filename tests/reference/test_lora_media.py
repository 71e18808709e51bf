"""Adapters from real directories, and media that must be what they say they are."""

from __future__ import annotations

import io
import json
import pathlib
import struct
import wave
import zlib

import pytest

from openengine.v1 import inputs_pb2
from openengine_adapters.core.errors import Rejected
from openengine_adapters.engine import Lora, Media, StartupError
from openengine_adapters.reference import tokenizer
from openengine_adapters.reference.engine import ReferenceEngine
from openengine_adapters.reference.settings import Settings
from tests.reference.harness import PROMPT, ask, running, write_adapter


async def test_an_adapter_changes_the_output_and_another_one_changes_it_otherwise(
    tmp_path: pathlib.Path,
) -> None:
    loras = [Lora(n, f"a{n}", str(write_adapter(tmp_path / f"a{n}", bytes([n]) * 32))) for n in (1, 2)]
    async with running() as engine:
        for lora in loras:
            await engine.load_lora(lora)
        outputs = [tuple((await ask(engine, lora=lora)).one.ids) for lora in (None, *loras, loras[0], None)]
    assert len(set(outputs)) == 3
    assert (outputs[1], outputs[0]) == (outputs[3], outputs[4])


async def test_static_adapters_are_loaded_at_the_start_or_the_start_fails(tmp_path: pathlib.Path) -> None:
    good = Lora(1, "good", str(write_adapter(tmp_path / "good")))
    async with running(loras=(good,)) as engine:
        assert list(engine.static_loras()) == [good]
        await ask(engine, lora=good)
    engine = ReferenceEngine(Settings(kv_events=False, loras=(Lora(1, "bad", str(tmp_path)),)))
    with pytest.raises(StartupError):
        await engine.start()
    await engine.stop()


def _spoil(folder: pathlib.Path, how: str) -> None:
    config, weights = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    match how:
        case "no config":
            config.unlink()
        case "config is no JSON":
            config.write_text("{")
        case "config is a list":
            config.write_text("[]")
        case "another kind of adapter":
            config.write_text(json.dumps({"peft_type": "IA3", "r": 4}))
        case "no rank":
            config.write_text(json.dumps({"peft_type": "LORA"}))
        case "rank too large":
            config.write_text(json.dumps({"peft_type": "LORA", "r": 4096}))
        case "no weights":
            weights.unlink()
        case "weights are text":
            weights.write_text("hello, I am not a tensor")
        case "weights are cut":
            weights.write_bytes(weights.read_bytes()[:-8])
        case "weights are empty":
            weights.write_bytes(b"")


@pytest.mark.parametrize(
    "how",
    [
        *("no config", "config is no JSON", "config is a list", "another kind of adapter", "no rank"),
        *("rank too large", "no weights", "weights are text", "weights are cut", "weights are empty"),
    ],
)
async def test_a_directory_without_a_valid_adapter_is_refused_and_leaves_nothing(
    tmp_path: pathlib.Path, how: str
) -> None:
    _spoil(write_adapter(tmp_path / "a"), how)
    async with running() as engine:
        with pytest.raises(Rejected) as refused:
            await engine.load_lora(Lora(1, "a", str(tmp_path / "a")))
        assert refused.value.field == "adapter.source_path"
        assert not engine._loras


# ---------------------------------------------------------------------------------------------------- media


def png(color: int) -> bytes:
    """A picture of one pixel."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", 1, 1, 8, 0, 0, 0, 0)
    image = chunk(b"IDAT", zlib.compress(bytes([0, color])))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + image + chunk(b"IEND", b"")


def wav() -> bytes:
    """A moment of silence."""
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(8000)
        sound.writeframes(b"\0\0" * 8)
    return buffer.getvalue()


MP4 = struct.pack(">I", 16) + b"ftypisom\0\0\2\0" + struct.pack(">I", 12) + b"mdat" + b"data"
IMAGE, VIDEO, AUDIO = inputs_pb2.MODALITY_IMAGE, inputs_pb2.MODALITY_VIDEO, inputs_pb2.MODALITY_AUDIO


def _media(data: bytes, modality: inputs_pb2.Modality.ValueType = IMAGE) -> Media:
    return Media(modality, data, "media[0].raw_bytes")


async def test_an_image_conditions_the_output_and_its_order_counts() -> None:
    black, white = _media(png(0)), _media(png(255))
    async with running() as engine:
        outputs = [
            (await ask(engine, media=media)).one.ids
            for media in ((), (black,), (white,), (black, white), (white, black), (black,))
        ]
    assert outputs[1] == outputs[5]
    assert len({tuple(ids) for ids in outputs}) == 5


async def test_placeholders_count_as_prompt_tokens_and_may_stand_in_the_prompt() -> None:
    async with running() as engine:
        plain = await ask(engine)
        before = await ask(engine, media=(_media(png(0)),))
        placed = await ask(engine, [tokenizer.IMAGE, *tokenizer.encode(PROMPT)], media=(_media(png(0)),))
        with pytest.raises(Rejected):
            await ask(engine, [tokenizer.AUDIO, 97], media=(_media(png(0)),))
    assert before.prompt_tokens == plain.prompt_tokens + 1
    assert placed.one.ids == before.one.ids


async def test_media_are_part_of_the_cache_key() -> None:
    ids = [tokenizer.IMAGE, *range(40, 80)]
    async with running() as engine:
        cached = [
            (await ask(engine, ids, max_tokens=1, media=(_media(data),))).cached
            for data in (png(0), png(1), png(0))
        ]
    assert cached == [0, 0, 32]


@pytest.mark.parametrize(("data", "modality"), [(png(7), IMAGE), (wav(), AUDIO), (MP4, VIDEO)])
async def test_each_modality_is_taken(data: bytes, modality: inputs_pb2.Modality.ValueType) -> None:
    async with running() as engine:
        assert (await ask(engine, media=(_media(data, modality),))).one.ids


@pytest.mark.parametrize(
    ("data", "modality"),
    [
        *((b"not an image", IMAGE), (png(0)[:-4], IMAGE), (png(0)[:8], IMAGE), (png(0) + b"x", IMAGE)),
        *((png(0).replace(b"IDAT", b"IDAX"), IMAGE), (wav(), IMAGE), (wav()[:20], AUDIO), (b"RIFF", AUDIO)),
        *((MP4[:-1], VIDEO), (b"\0\0\0\x08ftyp", VIDEO), (png(0), VIDEO)),
    ],
)
async def test_undecodable_media_are_refused_by_place(
    data: bytes, modality: inputs_pb2.Modality.ValueType
) -> None:
    async with running() as engine:
        with pytest.raises(Rejected) as refused:
            await ask(engine, media=(_media(data, modality),))
        assert refused.value.field == "media[0].raw_bytes"
        assert engine.unfinished() == 0
