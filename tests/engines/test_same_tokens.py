"""The same greedy request through both adapters: the same prompt, the same tokens, the same numbers.

Each server runs from its own virtual environment; this process has neither engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass

import grpc
import pytest

from openengine.v1 import generate_pb2, service_pb2_grpc
from tests.support import cpu_env
from tests.support.server import Server
from tests.support.wire import PATIENCE_S, Answer

COUNT = 24
PROMPTS = (
    "The capital of France is",
    "Water boils at",
    "def fibonacci(n):\n    ",
    "Grüße aus Köln! 漢字 🦀",
    "One, two, three, four,",
    "<|im_start|>user\nName three colours.<|im_end|>\n<|im_start|>assistant\n",
)

CASES = [
    # bfloat16 keeps 8 bits of a number, and each engine adds them up in an order of its own. Two layers do not carry
    # that far; thirty do, where a log-probability of -16 is a third apart. So SmolLM2 is asked in float32.
    (cpu_env.TINY_LLAMA, "bfloat16", 0.15),
    (cpu_env.SMOLLM2, "float32", 0.01),
]
"""A model, its numbers, and how far log-probabilities (natural logarithm) may lie apart."""


@dataclass
class Asked:
    """What each engine answered to each prompt."""

    vllm: list[Answer]
    sglang: list[Answer]
    tolerance: float

    def __iter__(self) -> Iterator[tuple[str, Answer, Answer]]:
        return zip(PROMPTS, self.vllm, self.sglang, strict=True)


@pytest.fixture(scope="module", params=CASES, ids=lambda case: str(case[0]))
def asked(request: pytest.FixtureRequest) -> Iterator[Asked]:
    """Both servers start at once, and are asked at once."""
    model, dtype, tolerance = request.param
    servers = {
        name: Server(name, [*cpu_env.flags(name, model), "--dtype", dtype], cpu_env.env(name))
        for name in cpu_env.ENGINES
    }
    with ExitStack() as stack:
        for server in servers.values():
            server.start()
            stack.callback(server.stop)
        for server in servers.values():
            server.wait_ready()
        with ThreadPoolExecutor() as threads:
            futures = {
                name: threads.submit(ask_all, server.target, model) for name, server in servers.items()
            }
        yield Asked(futures["vllm"].result(), futures["sglang"].result(), tolerance)


def ask_all(target: str, model: str) -> list[Answer]:
    """One after the other, so that no batch changes a number."""
    return [ask(target, model, prompt) for prompt in PROMPTS]


def ask(target: str, model: str, prompt: str) -> Answer:
    request = generate_pb2.GenerateRequest(
        request_id="same",
        model=str(cpu_env.model(model)),
        prompt=prompt,
        sampling=generate_pb2.SamplingParams(temperature=0.0),
        stopping=generate_pb2.StoppingOptions(max_tokens=COUNT),
        response=generate_pb2.ResponseOptions(
            return_prompt_logprobs=True,
            return_output_logprobs=True,
            output_candidates=generate_pb2.CandidateTokenSelection(top_n=5),
        ),
    )
    with grpc.insecure_channel(target) as channel:
        return Answer(list(service_pb2_grpc.OpenEngineStub(channel).Generate(request, timeout=PATIENCE_S)))


def test_the_prompt_is_the_same_and_as_likely(asked: Asked) -> None:
    """GEN-06, RESP-01: both tokenise alike, special tokens included."""
    for _, vllm, sglang in asked:
        assert [token.token_id for token in vllm.prompt] == [token.token_id for token in sglang.prompt]
        for one, other in zip(vllm.prompt[1:], sglang.prompt[1:], strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=asked.tolerance)
        assert vllm.usage.prompt_tokens == sglang.usage.prompt_tokens


def test_greedy_tokens_are_the_same_as_far_as_no_tie_parts_them(asked: Asked) -> None:
    """SAMP-01, RESP-09: where they part, both engines hold both tokens for as good as equally likely."""
    same = 0
    for prompt, vllm, sglang in asked:
        for one, other in zip(vllm.first.tokens, sglang.first.tokens, strict=False):
            if one.token_id != other.token_id:
                assert max(gap(one, other.token_id), gap(other, one.token_id)) < 2 * asked.tolerance, prompt
                break
            assert one.token == other.token
            assert one.logprob == pytest.approx(other.logprob, abs=asked.tolerance)
            same += 1
        else:
            # An output that ends within a character: vLLM leaves the piece out, SGLang shows it.
            assert vllm.first.text.rstrip("\ufffd") == sglang.first.text.rstrip("\ufffd")
            assert vllm.first.finished == sglang.first.finished
            assert vllm.usage.completion_tokens == sglang.usage.completion_tokens
    assert same > COUNT * len(PROMPTS) / 2


def gap(token: generate_pb2.TokenInfo, rival: int) -> float:
    """How much likelier than `rival` a token was where it was chosen."""
    (logprob,) = [candidate.logprob for candidate in token.candidates if candidate.token_id == rival]
    return token.logprob - logprob
