"""The same numbers as a direct call of vLLM on the same model."""

from __future__ import annotations

import pytest

from openengine.v1 import generate_pb2
from tests.support.wire import Wire

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_greedy_output_logprobs_ranks_and_usage_equal_a_direct_call(smol: Wire) -> None:
    """RESP-09, GEN-06, STREAM-07."""
    from vllm.sampling_params import SamplingParams

    prompt, count = "Water boils at", 16
    params = SamplingParams(temperature=0.0, max_tokens=count, logprobs=3, prompt_logprobs=2)
    async for output in smol.engine.llm.generate({"prompt": prompt}, params, "direct"):
        direct = output
    (completion,) = direct.outputs
    select = generate_pb2.CandidateTokenSelection
    answer = await smol.generate(
        prompt,
        max_tokens=count,
        response=generate_pb2.ResponseOptions(
            return_output_logprobs=True,
            output_candidates=select(top_n=3),
            return_prompt_logprobs=True,
            prompt_candidates=select(top_n=2),
        ),
    )
    assert answer.first.text == completion.text
    assert answer.first.ids == list(completion.token_ids)
    for token, position in zip(answer.first.tokens, completion.logprobs, strict=True):
        own = position[token.token_id]
        assert (token.logprob, token.rank, token.token) == (own.logprob, own.rank, own.decoded_token)
        expected = sorted((entry.rank, token_id, entry.logprob) for token_id, entry in position.items())
        assert [(c.rank, c.token_id, c.logprob) for c in token.candidates] == expected[:3]
    for token, position in zip(answer.prompt[1:], direct.prompt_logprobs[1:], strict=True):
        own = position[token.token_id]
        assert (token.logprob, token.rank) == (own.logprob, own.rank)
    assert answer.usage.prompt_tokens == len(direct.prompt_token_ids)
    assert answer.usage.completion_tokens == len(completion.token_ids)
