"""Hand-over by vLLM's other connectors, with LoRA, and past the death of the prefill server (PD-02, PD-03)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import pytest_asyncio

from openengine.v1 import generate_pb2, lifecycle_pb2
from tests.support import lora
from tests.support.cpu_env import LORA_ATTENTION, model
from tests.support.pair import (
    FLOAT32,
    OTHER,
    PROMPT,
    Pair,
    a_killed_prefill_server_fails_the_transfer,
    check,
    prompt,
    started,
)
from tests.support.pairs import vllm_pair

pytestmark = pytest.mark.asyncio(loop_scope="session")

WITH_LORA = ["--enable-lora", "--max-lora-rank", "8", *FLOAT32]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def pushing() -> AsyncIterator[Pair]:
    """A pair where the prefill engine writes the blocks, with LoRA, in float32 so that its numbers are PEFT's."""
    sides = [([*flags, *WITH_LORA], env) for flags, env in vllm_pair("NixlPushConnector")]
    async with started("vllm", *sides) as pair:
        for wire in (pair.prefill, pair.decode):
            await lora.load(wire, lora.adapter(1, "mine", model(LORA_ATTENTION)))
        yield pair


class TestPush:
    async def test_the_answer_is_the_one_of_the_model(self, pushing: Pair) -> None:
        answer = await pushing.handed_over()
        check("vllm", answer)
        assert answer.usage.cached_prompt_tokens >= len(PROMPT) - 1
        await pushing.until_free()

    async def test_an_adapter_goes_with_the_request(self, pushing: Pair) -> None:
        expected = lora.reference("vllm")[LORA_ATTENTION][0]
        answer = await pushing.handed_over(lora.PROMPTS[0], lora_name="mine")
        assert answer.first.ids == [token for token, _ in expected]
        assert [token.logprob for token in answer.first.tokens] == pytest.approx(
            [logprob for _, logprob in expected], abs=2e-3
        )

    async def test_blocks_of_an_adapter_are_not_those_of_the_model(self, pushing: Pair) -> None:
        session = await pushing.session(lora_name="mine")
        code, message = await pushing.decode.refused(PROMPT, kv=generate_pb2.KvOptions(session=session))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert message.startswith("kv.session: ")
        assert (await pushing.decoded(session, lora_name="mine")).first.ids

    async def test_a_prompt_is_handed_over_again_and_again(self, pushing: Pair) -> None:
        """Pushed to, vLLM waits for ever for what it has a part of already; so it must not find any."""
        for _ in range(3):
            check("vllm", await pushing.handed_over())
        await pushing.until_free()

    async def test_an_abort_frees_the_blocks_at_once(self, pushing: Pair) -> None:
        await pushing.until_free()
        session = await pushing.session([*range(300, 501)])
        assert await pushing.abort(session) == lifecycle_pb2.ABORT_STATUS_ABORTED
        await pushing.until_free()

    async def test_a_prefill_server_that_is_killed_fails_the_transfer_and_not_the_decode_server(
        self, pushing: Pair
    ) -> None:
        """The last of its class."""
        await a_killed_prefill_server_fails_the_transfer(pushing, prompt(OTHER))


class TestSharedStorage:
    async def test_blocks_pass_through_a_folder(self, tmp_path: Path) -> None:
        sides = vllm_pair("ExampleConnector", shared_storage_path=str(tmp_path))
        async with started("vllm", *[([*flags, *FLOAT32], env) for flags, env in sides]) as pair:
            answer = await pair.handed_over()
            check("vllm", answer)
            assert answer.usage.cached_prompt_tokens >= len(PROMPT) - 32  # whole blocks
            await pair.until_free()
            session = await pair.session()
            assert await pair.abort(session) == lifecycle_pb2.ABORT_STATUS_ABORTED
