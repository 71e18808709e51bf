"""Images across a hand-over with vLLM: both servers see them, and a session is for its images alone (PD-03)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import grpc
import pytest
import pytest_asyncio

from openengine.v1 import generate_pb2
from tests.support.cpu_env import NIXL_PLUGIN, vision_env
from tests.support.pair import FLOAT32, SCORED, Pair, started
from tests.support.pairs import vllm_pair
from tests.support.tasks.asking import close
from tests.support.tasks.cases import PICTURES, SEEING_PROMPT, Reference, model
from tests.support.tasks.looking import Item

pytestmark = pytest.mark.asyncio(loop_scope="session")

LLAVA = "tiny-llava"


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reference]:
    """What Hugging Face sees in the pictures, in float32."""
    found = Reference(tmp_path_factory.mktemp("reference"), ("see",))
    yield found
    found.close()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def pair(reference: Reference) -> AsyncIterator[Pair]:
    """A pair on the tiny LLaVA; NIXL pulls."""
    model(LLAVA)
    sides = [([*flags, *FLOAT32], {**env, **vision_env(NIXL_PLUGIN)}) for flags, env in vllm_pair()]
    async with started("vllm", *sides, model=LLAVA) as two:
        yield two


async def test_pictures_are_handed_over(pair: Pair, reference: Reference) -> None:
    seen = []
    for picture, expected in zip(PICTURES, reference["see"], strict=True):
        media = [Item(raw_bytes=picture)]
        session = await pair.session(SEEING_PROMPT, media=media)
        answer = await pair.decoded(session, SEEING_PROMPT, media=media, response=SCORED)
        count = len(expected["ids"])
        assert answer.first.ids[:count] == expected["ids"]
        logprobs = [token.logprob for token in answer.first.tokens[:count]]
        assert close(logprobs, expected["logprobs"], 2e-3)
        assert answer.usage.prompt_tokens == expected["length"]
        assert answer.usage.cached_prompt_tokens >= expected["length"] - 1  # they came from the peer
        seen.append(logprobs)
    assert not close(seen[0], seen[1], 1e-4)
    await pair.until_free()


async def test_a_session_is_for_its_picture_alone(pair: Pair) -> None:
    session = await pair.session(SEEING_PROMPT, media=[Item(raw_bytes=PICTURES[0])])
    code, message = await pair.decode.refused(
        SEEING_PROMPT,
        media=[Item(raw_bytes=PICTURES[1])],
        kv=generate_pb2.KvOptions(session=session),
    )
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert message.startswith("kv.session: ")
    await pair.abort(session)
    await pair.until_free()
