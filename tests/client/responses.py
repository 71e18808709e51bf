"""Shorthands for the responses that scripts are made of."""

from __future__ import annotations

from typing import Any

from openengine.v1 import generate_pb2, kv_pb2
from openengine.v1.generate_pb2 import GenerateResponse

USAGE = generate_pb2.Usage(prompt_tokens=4, completion_tokens=3, total_tokens=7, cached_prompt_tokens=1)


def record(text: str, token_id: int = 7, **fields: Any) -> generate_pb2.TokenInfo:
    return generate_pb2.TokenInfo(token_id=token_id, token=text, **fields)


def tokens(text: str, index: int = 0, **fields: Any) -> GenerateResponse:
    output = generate_pb2.TokenOutput(output_index=index, text=text, tokens=[record(text, **fields)])
    return GenerateResponse(request_id="r", token=output)


def finished(
    index: int = 0,
    reason: int = generate_pb2.FINISH_REASON_LENGTH,
    usage: generate_pb2.Usage | None = USAGE,
    **fields: Any,
) -> GenerateResponse:
    end = generate_pb2.GenerationFinished(output_index=index, reason=reason, **fields)  # type: ignore[arg-type]
    return GenerateResponse(request_id="r", finished=end, usage=usage)


def failed(message: str = "out of blocks", **fields: Any) -> GenerateResponse:
    return GenerateResponse(request_id="r", error={"message": message} | fields, usage=USAGE)  # type: ignore[arg-type]


def block(value: int) -> kv_pb2.KvBlockHash:
    return kv_pb2.KvBlockHash(value=value.to_bytes(8, "big"), encoding="int64")


def stored(*blocks: int, parent: int | None = None, **fields: Any) -> kv_pb2.KvEvent:
    event = kv_pb2.BlockStored(block_hashes=map(block, blocks), block_size=16, **fields)
    if parent is not None:
        event.parent_block_hash.CopyFrom(block(parent))
    return kv_pb2.KvEvent(block_stored=event)


def removed(*blocks: int, **fields: Any) -> kv_pb2.KvEvent:
    return kv_pb2.KvEvent(block_removed=kv_pb2.BlockRemoved(block_hashes=map(block, blocks), **fields))


def cleared() -> kv_pb2.KvEvent:
    return kv_pb2.KvEvent(all_blocks_cleared=kv_pb2.AllBlocksCleared())


def batch(sequence: int, *events: kv_pb2.KvEvent, rank: int = 0, **fields: Any) -> kv_pb2.KvEventBatch:
    return kv_pb2.KvEventBatch(sequence_number=sequence, data_parallel_rank=rank, events=events, **fields)
