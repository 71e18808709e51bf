"""What depends on SGLang's flags: seeds, data-parallel ranks, a bounded queue, the priority's direction, llguidance."""

from __future__ import annotations

import asyncio
import re

import grpc
import pytest

from openengine.v1 import errors_pb2, generate_pb2, model_pb2
from tests.sglang.test_control import LONG, collected, fill, load, order_of
from tests.support.wire import PATIENCE_S, Wire

pytestmark = pytest.mark.asyncio(loop_scope="session")

Sampling, Guided, Kv = generate_pb2.SamplingParams, generate_pb2.GuidedDecoding, generate_pb2.KvOptions
INVALID = grpc.StatusCode.INVALID_ARGUMENT
AT_ONCE = 4
"""Requests that one rank runs."""


@pytest.mark.parametrize("seed", [0, 1, 42, 2**63 - 3])
async def test_a_seed_repeats_and_makes_sequences_differ(other: Wire, seed: int) -> None:
    """SAMP-03, SAMP-04."""
    sampling = Sampling(temperature=1.0, seed=seed, num_sequences=3)
    first, second = [await other.generate(sampling=sampling) for _ in range(2)]
    assert [o.ids for _, o in sorted(first.outputs.items())] == [
        o.ids for _, o in sorted(second.outputs.items())
    ]
    assert len({tuple(output.ids) for output in first.outputs.values()}) == 3


async def test_another_seed_and_no_seed_give_other_outputs(other: Wire) -> None:
    """SAMP-03: SGLang would give each request without a seed the seed 42."""
    choices = [
        Sampling(temperature=1.0, seed=1),
        Sampling(temperature=1.0, seed=42),
        *[Sampling(temperature=1.0)] * 3,
    ]
    outputs = {tuple((await other.generate(sampling=s)).first.ids) for s in choices}
    assert len(outputs) == 5
    several = await other.generate(sampling=Sampling(temperature=1.0, num_sequences=3))
    assert len({tuple(output.ids) for output in several.outputs.values()}) == 3


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        (Sampling(seed=2**63), "sampling.seed"),
        (Sampling(seed=2**64 - 1), "sampling.seed"),
        (Sampling(temperature=1.0, seed=2**63 - 2, num_sequences=3), "sampling.seed"),
        (Sampling(temperature=1.0, min_p=0.1), "sampling.min_p"),
    ],
)
async def test_seeds_beyond_63_bits_and_min_p_are_refused(
    other: Wire, sampling: generate_pb2.SamplingParams, field: str
) -> None:
    """SAMP-03, GEN-10: min_p in this mode kills SGLang."""
    code, message = await other.refused(sampling=sampling)
    assert code is INVALID and message.startswith(field)


async def test_requests_run_on_the_rank_asked_for(other: Wire) -> None:
    """KVOPT-03, LOAD-02."""
    assert [rank.rank for rank in (await other.engine.load()).ranks] == [0, 1]
    for rank in (0, 1):
        calls = [await other.accepted(stopping=LONG, kv=Kv(data_parallel_rank=rank)) for _ in range(2)]
        async with asyncio.timeout(PATIENCE_S):
            while (await load(other)).ranks[rank].running_requests != 2:
                await asyncio.sleep(0.01)
        assert (await load(other)).ranks[1 - rank].running_requests == 0
        for call in calls:
            call.cancel()
        async with asyncio.timeout(PATIENCE_S):
            while (await load(other)).running_requests:
                await asyncio.sleep(0.01)
    code, message = await other.refused(kv=Kv(data_parallel_rank=2))
    assert code is INVALID and message.startswith("kv.data_parallel_rank")


async def test_priorities_are_turned_round_for_an_engine_that_runs_low_values_first(other: Wire) -> None:
    """GEN-09."""
    assert await order_of(other, (-5, 7), AT_ONCE) == [7, -5]


async def test_a_full_queue_is_refused_before_acceptance_where_it_is_certain(other: Wire) -> None:
    """GEN-05: and is one EngineError where only the scheduler of one rank knows."""
    blockers = await fill(other, 0, AT_ONCE, 2)
    late = await collected(await other.accepted(stopping=LONG, kv=Kv(data_parallel_rank=0)))
    error = late.responses[-1].error
    assert (error.code, error.retryable) == (errors_pb2.ERROR_CODE_OVERLOADED, True)
    blockers += await fill(other, 1, AT_ONCE, 2)
    code, message = await other.refused()
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED and "later" in message
    for call in blockers:
        call.cancel()
    await other.until_idle()
    assert (await other.generate()).first.ids


async def test_structural_tags_are_not_offered_with_llguidance(other: Wire) -> None:
    """MODEL-07: it knows only an older form of them."""
    model = await other.stub.GetModelInfo(model_pb2.GetModelInfoRequest(model=other.description.model_id))
    modes = model.generation.guided_decoding.modes
    assert model_pb2.GUIDED_DECODING_MODE_STRUCTURAL_TAG not in modes and len(modes) == 5
    code, message = await other.refused(guided=Guided(structural_tag="{}"))
    assert code is INVALID and message.startswith("guided.structural_tag")


@pytest.mark.parametrize(
    ("guide", "expected"),
    [
        (Guided(regex=r"[ab]{3}-\d{2}"), r"[ab]{3}-\d{2}"),
        (Guided(ebnf_grammar='root ::= "yes" | "no" [0-9]\n'), r"yes|no[0-9]"),
        (Guided(json_schema='{"enum": ["a", "b"]}'), r'"[ab]"'),
        (
            Guided(choice=generate_pb2.ChoiceConstraint(choices=["a.b", "-[x]|y", "漢字"])),
            r"a\.b|-\[x\]\|y|漢字",
        ),
    ],
    ids=lambda value: value.WhichOneof("guide") if isinstance(value, Guided) else "",
)
async def test_llguidance_obeys_the_other_guides_and_ends_by_eos(
    other: Wire, guide: generate_pb2.GuidedDecoding, expected: str
) -> None:
    """GUIDE-01, STOP-04."""
    answer = await other.generate(guided=guide, sampling=Sampling(temperature=1.0), max_tokens=60)
    assert re.fullmatch(expected, answer.first.text), answer.first.text
    assert answer.first.stop.eos_token_id == 2 and answer.first.ids[-1] == 2


@pytest.mark.parametrize(
    "guide", [Guided(regex="(["), Guided(json_schema='{"type": 7}'), Guided(ebnf_grammar="root ::= (")]
)
async def test_llguidance_refuses_a_bad_guide_too(other: Wire, guide: generate_pb2.GuidedDecoding) -> None:
    """GUIDE-02."""
    code, message = await other.refused(guided=guide)
    assert code is INVALID and message.startswith("guided"), message
    assert (await other.generate(guided=Guided(regex="[ab]"))).first.text in ("a", "b")
