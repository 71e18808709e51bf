"""Images and data-parallel ranks across a hand-over with SGLang, and the death of its prefill server (PD-01 … 04)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from openengine.v1 import generate_pb2, kv_pb2
from tests.support.pair import FLOAT32, SCORED, Pair, a_killed_prefill_server_fails_the_transfer, started
from tests.support.pairs import sglang_pair
from tests.support.tasks.asking import close
from tests.support.tasks.cases import PICTURES, QWEN_PROMPT, QWEN_VL, Reference
from tests.support.tasks.looking import INVALID, Item
from tests.support.wire import Answer

pytestmark = pytest.mark.asyncio(loop_scope="session")

TWO_RANKS = ("--dp-size", "2")
TOKENS = 6
TEXT = "The capital of France is"


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reference]:
    """What Hugging Face sees in the pictures, in float32."""
    found = Reference(tmp_path_factory.mktemp("reference"), ("see-qwen",))
    yield found
    found.close()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def pair(reference: Reference) -> AsyncIterator[Pair]:
    """A pair on the tiny Qwen2.5-VL, with two ranks on the prefill side."""
    (prefill, its_env), (decode, decode_env) = sglang_pair(*FLOAT32, "--mm-attention-backend", "sdpa")
    sides = ([*prefill, *TWO_RANKS], its_env), (decode, decode_env)
    async with started("sglang", *sides, model=QWEN_VL) as two:
        yield two


async def look(pair: Pair, picture: bytes, rank: int) -> Answer:
    """One picture through both servers."""
    media, stopping = [Item(raw_bytes=picture)], generate_pb2.StoppingOptions(max_tokens=TOKENS)
    kv = generate_pb2.KvOptions(data_parallel_rank=rank)
    session = await pair.session(QWEN_PROMPT, media=media, response=SCORED, stopping=stopping, kv=kv)
    assert session.dp_rank == rank
    return await pair.decoded(session, QWEN_PROMPT, media=media, response=SCORED, stopping=stopping)


@pytest.mark.parametrize("rank", [0, 1])
async def test_each_rank_hands_pictures_over(pair: Pair, reference: Reference, rank: int) -> None:
    seen = []
    for picture, expected in zip(PICTURES, reference["see-qwen"], strict=True):
        answer = await look(pair, picture, rank)
        assert answer.first.ids == expected["ids"]
        assert close([token.logprob for token in answer.first.tokens], expected["logprobs"], 2e-3)
        assert answer.usage.prompt_tokens == expected["length"]
        seen.append(answer.first.ids)
    assert seen[0] != seen[1]
    await pair.until_free()


async def test_a_session_is_for_its_picture_alone(pair: Pair) -> None:
    session = await pair.session(QWEN_PROMPT, media=[Item(raw_bytes=PICTURES[0])])
    code, message = await pair.decode.refused(
        QWEN_PROMPT,
        media=[Item(raw_bytes=PICTURES[1])],
        kv=generate_pb2.KvOptions(session=session),
    )
    assert code is INVALID
    assert message.startswith("kv.session: ")
    await pair.abort(session)


async def test_a_rank_that_is_not_the_session_s_is_refused(pair: Pair) -> None:
    session = await pair.session(TEXT, kv=generate_pb2.KvOptions(data_parallel_rank=1))
    code, message = await pair.decode.refused(
        TEXT, kv=generate_pb2.KvOptions(session=session, data_parallel_rank=0)
    )
    assert code is INVALID
    assert message.startswith("kv.data_parallel_rank: 0 disagrees")
    other = kv_pb2.KvSessionRef()
    other.CopyFrom(session)
    other.dp_rank = 0
    code, message = await pair.decode.refused(TEXT, kv=generate_pb2.KvOptions(session=other))
    assert code is INVALID
    assert message.startswith("kv.session: ")
    await pair.abort(session)


async def test_a_prefill_server_that_is_killed_fails_the_transfer_and_not_the_decode_server(
    pair: Pair,
) -> None:
    """The last of its module."""
    await a_killed_prefill_server_fails_the_transfer(pair, TEXT)
