"""The same numbers as a direct call of SGLang on the same model."""

from __future__ import annotations

import pytest

from openengine.v1 import generate_pb2
from tests.support.wire import Wire

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_greedy_output_logprobs_ranks_and_usage_equal_a_direct_call(tiny: Wire) -> None:
    """RESP-09, GEN-06, STREAM-07."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    prompt, count = "Water boils at", 16
    direct_request = GenerateReqInput(
        text=prompt,
        sampling_params={"temperature": 0.0, "max_new_tokens": count, "frequency_penalty": 1.0},
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=3,
    )
    async for found in tiny.engine.manager.generate_request(direct_request, None):
        direct = found
    meta = direct["meta_info"]
    select = generate_pb2.CandidateTokenSelection
    answer = await tiny.generate(
        prompt,
        max_tokens=count,
        sampling=generate_pb2.SamplingParams(temperature=0.0, frequency_penalty=1.0),
        response=generate_pb2.ResponseOptions(
            return_output_logprobs=True,
            output_candidates=select(top_n=3),
            return_prompt_logprobs=True,
            prompt_candidates=select(top_n=2),
        ),
    )
    assert answer.first.text == direct["text"]
    assert answer.first.ids == direct["output_ids"]
    assert [t.logprob for t in answer.first.tokens] == [entry[0] for entry in meta["output_token_logprobs"]]
    for token, best in zip(answer.first.tokens, meta["output_top_logprobs"], strict=True):
        assert token.rank == 1
        assert [c.logprob for c in token.candidates] == [entry[0] for entry in best]
    assert [t.token_id for t in answer.prompt] == [entry[1] for entry in meta["input_token_logprobs"]]
    assert [t.logprob for t in answer.prompt[1:]] == [entry[0] for entry in meta["input_token_logprobs"][1:]]
    for token, best in zip(answer.prompt[1:], meta["input_top_logprobs"][1:], strict=True):
        assert [c.logprob for c in token.candidates] == [entry[0] for entry in best[:2]]
    assert answer.usage.prompt_tokens == meta["prompt_tokens"]
    assert answer.usage.completion_tokens == meta["completion_tokens"]
