"""From a request's input to what the model reads: token ids, and media at the places that stand for them."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from openengine.v1 import inputs_pb2, tasks_pb2
from openengine_adapters.core.errors import invalid
from openengine_adapters.engine import GenerateCall, Media, TaskCall
from openengine_adapters.reference import media, tokenizer


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids, and the digest of the media item at each placeholder's position."""

    ids: tuple[int, ...]
    media: Mapping[int, bytes] = field(default_factory=dict)

    def digest(self) -> str:
        """A name that only equal prompts share."""
        parts = [struct.pack(f"<{len(self.ids)}H", *self.ids)]
        parts += [struct.pack("<I", position) + item for position, item in sorted(self.media.items())]
        return hashlib.blake2b(b"".join(parts), digest_size=16).hexdigest()


def generation_prompt(call: GenerateCall) -> Prompt:
    """The prompt of a Generate request. Raises `Rejected` for media that cannot be used."""
    request = call.request
    ids = _plain(request.prompt, request.token_ids, request.WhichOneof("input"))
    return _with_media(ids, call.media, "media")


def task_prompt(call: TaskCall, item: tasks_pb2.TaskInput, place: str) -> Prompt:
    """The prompt of one task input at `place`. Raises `Rejected`."""
    kind = item.WhichOneof("input")
    if kind != "multimodal":
        return Prompt(tuple(_plain(item.text, item.token_ids, kind)))
    body = item.multimodal
    ids = _plain(body.text, body.token_ids, body.WhichOneof("prompt"))
    return _with_media(ids, call.media.get(item.item_id, ()), f"{place}.multimodal.media")


def _plain(text: str, token_ids: inputs_pb2.TokenIds, kind: str | None) -> list[int]:
    return list(token_ids.ids) if kind == "token_ids" else tokenizer.encode(text)


def _with_media(ids: list[int], items: Sequence[Media], name: str) -> Prompt:
    """Put a placeholder for each item before the prompt, unless the prompt has them already."""
    if not items:
        return Prompt(tuple(ids))
    wanted = [media.PLACEHOLDERS[item.modality] for item in items]
    digests = [media.digest(item) for item in items]
    places = [position for position, token in enumerate(ids) if token in media.PLACEHOLDERS.values()]
    if not places:
        ids = wanted + ids
        places = list(range(len(wanted)))
    elif [ids[place] for place in places] != wanted:
        raise invalid(name, "the prompt's placeholders are not those of the media, one for one and in order")
    return Prompt(tuple(ids), dict(zip(places, digests, strict=True)))
