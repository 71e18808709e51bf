"""A real prefill server hands requests to a real decode server, NIXL over TCP (PD-01 … PD-07)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio

from openengine.v1 import (
    discovery_pb2,
    errors_pb2,
    generate_pb2,
    kv_pb2,
    lifecycle_pb2,
    observability_pb2,
)
from openengine_adapters.core.handoff.desk import attach
from openengine_adapters.core.handoff.parameters import checksum, content_digest, from_struct, to_struct
from openengine_adapters.vllm.kv_transfer import ATTRIBUTES
from tests.support.pair import (
    FLOAT32,
    OTHER,
    PROMPT,
    SCORED,
    TOKENS,
    Pair,
    a_killed_decode_server_costs_nothing,
    check,
    expected,
    prompt,
    started,
)
from tests.support.pairs import vllm_pair
from tests.support.server import free_port
from tests.support.wire import PATIENCE_S

pytestmark = pytest.mark.asyncio(loop_scope="session")

LEASE_S = 12
TWO_RANKS = ("--data-parallel-size", "2")
Code = grpc.StatusCode
NOT_FOUND = errors_pb2.ERROR_CODE_KV_SESSION_NOT_FOUND
FAILED = errors_pb2.ERROR_CODE_KV_TRANSFER_FAILED


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def pair() -> AsyncIterator[Pair]:
    """A pair on the tiny Llama, with two ranks on the prefill side; NIXL pulls."""
    (prefill, its_env), (decode, decode_env) = vllm_pair(kv_lease_duration=LEASE_S)
    async with started(
        "vllm", ([*prefill, *FLOAT32, *TWO_RANKS], its_env), ([*decode, *FLOAT32], decode_env)
    ) as two:
        yield two


class TestDiscovery:
    async def test_each_server_has_the_role_of_its_configuration(self, pair: Pair) -> None:
        for wire, role in (
            (pair.prefill, discovery_pb2.ENGINE_ROLE_PREFILL),
            (pair.decode, discovery_pb2.ENGINE_ROLE_DECODE),
        ):
            info = await wire.stub.GetEngineInfo(discovery_pb2.GetEngineInfoRequest())
            assert info.role == role

    async def test_the_connector_is_described(self, pair: Pair) -> None:
        for wire in (pair.prefill, pair.decode):
            info = await wire.stub.GetKvConnectorInfo(kv_pb2.GetKvConnectorInfoRequest())
            assert info.enabled
            assert info.transfer_backend == "NixlConnector"
            assert {endpoint.protocol for endpoint in info.local_endpoints} <= set(info.supported_protocols)
            assert all(endpoint.host == "127.0.0.1" and endpoint.port for endpoint in info.local_endpoints)
            assert info.supports_abort_cleanup
            assert info.supports_drain
            assert info.supports_decode_pull


class TestHandOver:
    async def test_the_answer_is_the_model_s_own(self, pair: Pair) -> None:
        answer = await pair.handed_over()
        check("vllm", answer)
        assert answer.usage.completion_tokens == TOKENS
        check("vllm", await pair.handed_over(prompt(OTHER)), OTHER)

    async def test_the_session_names_the_rank_that_holds_the_blocks(self, pair: Pair) -> None:
        info = await pair.prefill.stub.GetKvConnectorInfo(kv_pb2.GetKvConnectorInfoRequest())
        for rank in (1, 0):
            kv = generate_pb2.KvOptions(data_parallel_rank=rank)
            session = await pair.session(kv=kv)
            assert session.dp_rank == rank
            assert session.endpoints[0] == info.local_endpoints[rank]
            check("vllm", await pair.decoded(session, response=SCORED))

    async def test_the_prompt_is_not_computed_again(self, pair: Pair) -> None:
        prompt = [*range(300, 501)]
        answer = await pair.handed_over(prompt)
        assert answer.usage.prompt_tokens == len(prompt)
        assert answer.usage.cached_prompt_tokens >= len(prompt) - 1

    async def test_the_transfer_shows_in_the_runtime_events(self, pair: Pair) -> None:
        request = observability_pb2.SubscribeRuntimeEventsRequest()
        events = pair.decode.stub.SubscribeRuntimeEvents(request)
        await events.initial_metadata()
        await pair.handed_over([*range(510, 711)])
        async with asyncio.timeout(PATIENCE_S):
            async for response in events:
                event = response.runtime_event
                if event.type == observability_pb2.RUNTIME_EVENT_TYPE_TRANSFER:
                    break
        assert event.attributes["event"] == "transferred"
        assert int(event.attributes["bytes"]) > 0
        events.cancel()

    async def test_the_session_ends_by_itself(self, pair: Pair) -> None:
        session = await pair.session()
        assert (await pair.load()).active_kv_sessions >= 1
        await pair.decoded(session)
        await pair.until_free()
        assert await pair.abort(session) == lifecycle_pb2.ABORT_STATUS_ALREADY_FINISHED

    async def test_the_parameters_keep_their_types(self, pair: Pair) -> None:
        session = await pair.session()
        params = session.attributes_struct.fields[ATTRIBUTES].struct_value.fields
        assert params["do_remote_prefill"].bool_value
        blocks = params["remote_block_ids"].list_value.values
        assert [len(group.list_value.values) for group in blocks] == [-(-len(PROMPT) // 32)]
        assert params["remote_num_tokens"].number_value == len(PROMPT)
        assert params["remote_blocks_expiry_time"].WhichOneof("kind") == "null_value"
        assert session.endpoints[0].port == params["remote_port"].number_value
        await pair.abort(session)


class TestEnds:
    @pytest.mark.parametrize("rank", [0, 1])
    async def test_an_abort_frees_the_blocks_at_once(self, pair: Pair, rank: int) -> None:
        await pair.until_free()
        session = await pair.session(kv=generate_pb2.KvOptions(data_parallel_rank=rank))
        assert (await pair.load()).active_kv_sessions == 1
        assert await pair.abort(session) == lifecycle_pb2.ABORT_STATUS_ABORTED
        await pair.until_free()
        answer = await pair.decoded(session)
        assert answer.responses[-1].error.code == NOT_FOUND
        assert await pair.abort(session) == lifecycle_pb2.ABORT_STATUS_ALREADY_FINISHED

    async def test_a_session_that_nobody_fetches_expires(self, pair: Pair) -> None:
        session = await pair.session()
        await pair.until_free()
        answer = await pair.decoded(session)
        assert answer.responses[-1].error.code == NOT_FOUND
        assert not answer.responses[-1].error.retryable

    async def test_a_session_serves_once(self, pair: Pair) -> None:
        session = await pair.session()
        await pair.decoded(session)
        answer = await pair.decoded(session)
        assert answer.responses[-1].error.code == NOT_FOUND

    async def test_a_session_is_for_its_prompt_alone(self, pair: Pair) -> None:
        session = await pair.session()
        kv = generate_pb2.KvOptions(session=session)
        code, message = await pair.decode.refused([*PROMPT[:-1], 5], kv=kv)
        assert code is Code.INVALID_ARGUMENT
        assert message.startswith("kv.session: ")
        assert (await pair.decoded(session)).first.ids

    async def test_a_decode_server_that_dies_lets_the_blocks_go(self, pair: Pair) -> None:
        """One that attaches and is gone stands in for it: to the prefill server they are the same."""
        await pair.until_free()
        session = await pair.session()
        content = content_digest(PROMPT, None)
        async with await attach(session, session.endpoints[1], checksum(session, content)):
            assert (await pair.load()).active_kv_sessions == 1
            other = await pair.decoded(session)
            assert other.responses[-1].error.code == NOT_FOUND
        await pair.until_free()
        assert (await pair.handed_over()).first.ids

    async def test_a_prefill_that_its_caller_leaves_frees_its_blocks(self, pair: Pair) -> None:
        await pair.until_free()
        call = pair.prefill.stub.Generate(pair.prefill.request([*range(600, 801)]))
        call.cancel()
        await pair.until_free()

    async def test_a_prefill_server_that_is_gone_is_a_failed_transfer(self, pair: Pair) -> None:
        session = await pair.session()
        desk = session.endpoints[1].port
        session.endpoints[1].port = free_port()
        error = (await pair.decoded(session)).responses[-1].error
        assert (error.code, error.retryable) == (FAILED, True)
        session.endpoints[1].port = desk
        assert (await pair.decoded(session)).first.ids


class TestGarbage:
    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("remote_block_ids", [[1]]),
            ("remote_block_ids", [[2**31 - 1] * 7]),
            ("remote_block_ids", [1]),
            ("remote_block_ids", []),
            ("remote_block_ids", None),
            ("remote_engine_id", "nobody"),
            ("remote_request_id", "nothing"),
            ("remote_host", "192.0.2.1"),
            ("remote_port", 1),
            ("tp_size", 2),
            ("remote_num_tokens", 5),
            ("do_remote_prefill", False),
            ("surprise", {"a": [1, None]}),
        ],
    )
    async def test_a_changed_parameter_never_reaches_the_engine(
        self, pair: Pair, name: str, value: Any
    ) -> None:
        session = await pair.session()
        params = from_struct(session.attributes_struct)[ATTRIBUTES]
        changed = kv_pb2.KvSessionRef()
        changed.CopyFrom(session)
        changed.attributes_struct.CopyFrom(to_struct({ATTRIBUTES: {**params, name: value}}))
        code, message = await pair.decode.refused(PROMPT, kv=generate_pb2.KvOptions(session=changed))
        assert code is Code.INVALID_ARGUMENT
        assert message.startswith("kv.session")
        assert (await pair.decoded(session)).first.ids


class TestOptions:
    async def test_prompt_logprobs_come_with_the_prefill(self, pair: Pair) -> None:
        (token, logprob), *_ = expected("vllm")
        answer = await pair.prefill.generate(
            [*PROMPT, token], response=generate_pb2.ResponseOptions(return_prompt_logprobs=True)
        )
        assert [scored.token_id for scored in answer.prompt] == [*PROMPT, token]
        assert not answer.prompt[0].HasField("logprob")
        assert answer.prompt[-1].logprob == pytest.approx(logprob, abs=2e-3)
        session = answer.responses[-1].prefill_ready.kv_session
        assert (await pair.decoded(session, [*PROMPT, token])).first.ids

    @pytest.mark.parametrize(
        "kv", [{"cache_salt": "mine"}, {"bypass_prefix_cache": True}, {"data_parallel_rank": 0}]
    )
    async def test_cache_options_go_to_both(self, pair: Pair, kv: dict[str, Any]) -> None:
        for _ in range(2):
            session = await pair.session(kv=generate_pb2.KvOptions(**kv))
            answer = await pair.decoded(
                session, kv=generate_pb2.KvOptions(session=session, **kv), response=SCORED
            )
            check("vllm", answer)
            assert answer.usage.cached_prompt_tokens >= len(PROMPT) - 1

    async def test_a_guide_and_logprobs_are_the_decode_server_s(self, pair: Pair) -> None:
        session = await pair.session()
        answer = await pair.decoded(
            session,
            guided=generate_pb2.GuidedDecoding(choice=generate_pb2.ChoiceConstraint(choices=["yes", "no"])),
            response=generate_pb2.ResponseOptions(return_output_logprobs=True),
        )
        assert answer.first.text in ("yes", "no")
        assert all(token.logprob <= 0 for token in answer.first.tokens)

    @pytest.mark.parametrize(
        ("fields", "named"),
        [
            ({"sampling": generate_pb2.SamplingParams(num_sequences=2)}, "sampling.num_sequences"),
            ({"guided": generate_pb2.GuidedDecoding(regex="a+")}, "guided.regex"),
            (
                {"response": generate_pb2.ResponseOptions(return_output_logprobs=True)},
                "response.return_output_logprobs",
            ),
        ],
    )
    async def test_what_has_no_meaning_on_a_prefill_server_is_refused(
        self, pair: Pair, fields: dict[str, Any], named: str
    ) -> None:
        code, message = await pair.prefill.refused(PROMPT, **fields)
        assert (code, message.split(":")[0]) == (Code.INVALID_ARGUMENT, named)

    @pytest.mark.parametrize(
        ("fields", "named"),
        [
            ({"sampling": generate_pb2.SamplingParams(num_sequences=2)}, "sampling.num_sequences"),
            (
                {"response": generate_pb2.ResponseOptions(return_prompt_logprobs=True)},
                "response.return_prompt_logprobs",
            ),
        ],
    )
    async def test_what_has_no_meaning_on_a_decode_server_is_refused(
        self, pair: Pair, fields: dict[str, Any], named: str
    ) -> None:
        session = await pair.session()
        code, message = await pair.decode.refused(
            PROMPT, kv=generate_pb2.KvOptions(session=session), **fields
        )
        assert (code, message.split(":")[0]) == (Code.INVALID_ARGUMENT, named)
        await pair.abort(session)

    async def test_roles_are_kept(self, pair: Pair) -> None:
        session = await pair.session()
        code, _ = await pair.decode.refused(PROMPT)
        assert code is Code.FAILED_PRECONDITION
        code, _ = await pair.prefill.refused(PROMPT, kv=generate_pb2.KvOptions(session=session))
        assert code is Code.FAILED_PRECONDITION
        await pair.abort(session)


class TestDeath:
    """The last of its module."""

    async def test_a_decode_server_that_is_killed_lets_the_blocks_go(self, pair: Pair) -> None:
        await a_killed_decode_server_costs_nothing(pair, kv=generate_pb2.KvOptions(data_parallel_rank=1))
