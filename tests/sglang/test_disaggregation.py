"""A real prefill server and a real decode server work on a request together, Mooncake over TCP (PD-01 … PD-07)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from openengine.v1 import (
    discovery_pb2,
    errors_pb2,
    generate_pb2,
    kv_pb2,
    lifecycle_pb2,
    lora_pb2,
)
from openengine_adapters.core.errors import Rejected
from openengine_adapters.core.handoff.parameters import to_struct
from openengine_adapters.core.handoff.roles import HandOffWanted
from openengine_adapters.engine import GenerateCall, StartupError
from openengine_adapters.sglang.disaggregation import ATTRIBUTES, Decodes, Prefills, hand_off
from tests.support import cpu_env, lora
from tests.support.pair import (
    FLOAT32,
    OTHER,
    PROMPT,
    TOKENS,
    Pair,
    a_killed_decode_server_costs_nothing,
    check,
    prompt,
    started,
)
from tests.support.pairs import sglang_pair
from tests.support.server import free_port

WAIT_S = 8
Code = grpc.StatusCode
NOT_FOUND = errors_pb2.ERROR_CODE_KV_SESSION_NOT_FOUND
FAILED = errors_pb2.ERROR_CODE_KV_TRANSFER_FAILED


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def pair() -> AsyncIterator[Pair]:
    """A pair on the tiny Llama, with LoRA."""
    sides = sglang_pair("--kv-session-timeout", str(WAIT_S), *FLOAT32, *cpu_env.lora_flags("sglang"))
    async with started("sglang", *sides) as two:
        for wire in (two.prefill, two.decode):
            await lora.load(wire, lora.adapter(1, "mine", cpu_env.model(cpu_env.LORA_ATTENTION)))
        yield two


@pytest.mark.asyncio(loop_scope="session")
class TestHandOver:
    async def test_each_server_has_the_role_of_its_configuration(self, pair: Pair) -> None:
        for wire, role in (
            (pair.prefill, discovery_pb2.ENGINE_ROLE_PREFILL),
            (pair.decode, discovery_pb2.ENGINE_ROLE_DECODE),
        ):
            info = await wire.stub.GetEngineInfo(discovery_pb2.GetEngineInfoRequest())
            assert info.role == role
            assert info.kv_connector.transfer_backend == "mooncake"
            assert {e.protocol for e in info.kv_connector.local_endpoints} <= set(
                info.kv_connector.supported_protocols
            )

    async def test_the_answer_is_the_model_s_own(self, pair: Pair) -> None:
        answer = await pair.handed_over(both=True)
        check("sglang", answer)
        assert answer.usage.completion_tokens == TOKENS
        check("sglang", await pair.handed_over(prompt(OTHER), both=True), OTHER)

    async def test_a_room_is_text(self, pair: Pair) -> None:
        session = await pair.session()
        params = session.attributes_struct.fields[ATTRIBUTES].struct_value.fields
        assert params["bootstrap_room"].string_value.isdecimal()
        assert params["bootstrap_port"].number_value == session.endpoints[0].port
        await pair.abort(session)

    async def test_the_session_ends_by_itself(self, pair: Pair) -> None:
        session = await pair.session()
        assert await pair.open_sessions() >= 1
        await pair.decoded(session)
        await pair.until_free()
        assert await pair.abort(session) == lifecycle_pb2.ABORT_STATUS_ALREADY_FINISHED

    async def test_a_guide_holds_from_the_first_token_on(self, pair: Pair) -> None:
        """SGLang draws the first token where it prefills, so that the guide goes to both."""
        guided = generate_pb2.GuidedDecoding(choice=generate_pb2.ChoiceConstraint(choices=["yes", "no"]))
        answer = await pair.handed_over(both=True, guided=guided)
        assert answer.first.text in ("yes", "no")


@pytest.mark.asyncio(loop_scope="session")
class TestEnds:
    async def test_an_abort_ends_the_request(self, pair: Pair) -> None:
        await pair.until_free()
        session = await pair.session()
        assert await pair.abort(session) == lifecycle_pb2.ABORT_STATUS_ABORTED
        assert await pair.open_sessions() == 0
        answer = await pair.decoded(session)
        assert answer.responses[-1].error.code == NOT_FOUND
        assert await pair.abort(session) == lifecycle_pb2.ABORT_STATUS_ALREADY_FINISHED

    async def test_a_decode_that_never_comes_costs_nothing_for_ever(self, pair: Pair) -> None:
        sessions = [await pair.session() for _ in range(3)]
        assert await pair.open_sessions() == 3
        await pair.until_free()
        for session in sessions:
            assert await pair.abort(session) == lifecycle_pb2.ABORT_STATUS_ALREADY_FINISHED
        assert (await pair.handed_over()).first.ids

    async def test_a_session_is_for_its_prompt_alone(self, pair: Pair) -> None:
        session = await pair.session()
        kv = generate_pb2.KvOptions(session=session)
        code, message = await pair.decode.refused([*PROMPT[:-1], 5], kv=kv)
        assert code is Code.INVALID_ARGUMENT
        assert message.startswith("kv.session: ")
        assert (await pair.decoded(session)).first.ids

    async def test_a_prefill_server_that_is_gone_is_a_failed_transfer(self, pair: Pair) -> None:
        session = await pair.session()
        session.endpoints[1].port = free_port()
        answer = await pair.decoded(session)
        error = answer.responses[-1].error
        assert (error.code, error.retryable) == (FAILED, True)
        assert (await pair.handed_over()).first.ids

    async def test_several_sequences_are_refused_on_both(self, pair: Pair) -> None:
        sampling = generate_pb2.SamplingParams(temperature=1.0, num_sequences=2)
        session = await pair.session()
        for wire, kv in (
            (pair.prefill, generate_pb2.KvOptions()),
            (pair.decode, generate_pb2.KvOptions(session=session)),
        ):
            code, message = await wire.refused(PROMPT, sampling=sampling, kv=kv)
            assert (code, message.split(":")[0]) == (Code.INVALID_ARGUMENT, "sampling.num_sequences")
        await pair.abort(session)


@pytest.mark.asyncio(loop_scope="session")
class TestLora:
    async def test_an_adapter_goes_with_the_request(self, pair: Pair) -> None:
        expected = lora.reference("sglang")[cpu_env.LORA_ATTENTION][0]
        answer = await pair.handed_over(lora.PROMPTS[0], both=True, lora_name="mine")
        assert answer.first.ids == [token for token, _ in expected]
        assert [token.logprob for token in answer.first.tokens] == pytest.approx(
            [logprob for _, logprob in expected], abs=2e-3
        )

    async def test_blocks_of_an_adapter_are_not_those_of_the_model(self, pair: Pair) -> None:
        session = await pair.session(lora_name="mine")
        code, message = await pair.decode.refused(PROMPT, kv=generate_pb2.KvOptions(session=session))
        assert code is Code.INVALID_ARGUMENT
        assert message.startswith("kv.session: ")
        assert (await pair.decoded(session, lora_name="mine")).first.ids

    async def test_an_adapter_is_unloaded_once_its_session_is_over(self, pair: Pair) -> None:
        """LORA-09: refused while it is open, other changes go on, and then it waits no longer."""
        session = await pair.session(lora_name="mine")
        unload = lora_pb2.UnloadLoraRequest(lora_name="mine")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await pair.prefill.stub.UnloadLora(unload, timeout=1)
        assert refused.value.code() is Code.FAILED_PRECONDITION
        await lora.load(pair.prefill, lora.adapter(2, "other", cpu_env.model(cpu_env.LORA_EVERYWHERE)))
        async with asyncio.TaskGroup() as tasks:
            unloading = tasks.create_task(lora.unload(pair.prefill, "mine"))
            assert (await pair.decoded(session, lora_name="mine")).first.ids
            await unloading
        assert await lora.listed(pair.prefill) == ["other"]
        await pair.until_free()


@pytest.mark.asyncio(loop_scope="session")
class TestDeath:
    """The last on its pair."""

    async def test_a_decode_server_that_is_killed_leaves_nothing_waiting(self, pair: Pair) -> None:
        await a_killed_decode_server_costs_nothing(pair)


GOOD = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 8998, "bootstrap_room": "5"}
JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


def reference(params: Any) -> kv_pb2.KvSessionRef:
    session = kv_pb2.KvSessionRef(
        session_id="x",
        transfer_backend="mooncake",
        endpoints=[
            kv_pb2.KvEndpoint(host="127.0.0.1", port=8998, protocol="http"),
            kv_pb2.KvEndpoint(host="127.0.0.1", port=5000, protocol="openengine"),
        ],
        dp_rank=1,
    )
    session.attributes_struct.CopyFrom(to_struct(params))
    return session


class TestSessions:
    def test_a_sound_one_is_taken(self) -> None:
        handed = Decodes("mooncake", HandOffWanted()).read(reference({ATTRIBUTES: GOOD}))
        assert handed.room == {**GOOD, "bootstrap_room": 5, "disagg_prefill_dp_rank": 1}

    @given(st.sampled_from(sorted(GOOD)), JSON)
    @settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    def test_any_other_value_is_refused_by_name(self, name: str, value: Any) -> None:
        if name == "bootstrap_room" and isinstance(value, str) and value.isascii() and value.isdecimal():
            return  # a room like any other
        with pytest.raises(Rejected, match=rf"kv\.session\.attributes_struct: {ATTRIBUTES}\.bootstrap_"):
            Decodes("mooncake", HandOffWanted()).read(reference({ATTRIBUTES: {**GOOD, name: value}}))

    @given(JSON)
    @settings(max_examples=200, deadline=None)
    def test_any_other_object_is_refused(self, value: Any) -> None:
        with pytest.raises(Rejected):
            Decodes("mooncake", HandOffWanted()).read(reference({ATTRIBUTES: value}))

    @pytest.mark.parametrize("room", ["", "-1", "1.5", "٣", str(2**63), "9" * 400, " 1"])
    def test_a_room_is_a_number_below_two_to_the_63(self, room: str) -> None:
        with pytest.raises(Rejected, match="bootstrap_room"):
            Decodes("mooncake", HandOffWanted()).read(
                reference({ATTRIBUTES: {**GOOD, "bootstrap_room": room}})
            )


class TestRoles:
    @pytest.fixture(autouse=True)
    def own_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SGLANG_HOST_IP", "127.0.0.1")

    def args(self, mode: str, **fields: Any) -> Any:
        from sglang.srt.server_args import ServerArgs

        return ServerArgs(model_path="x", disaggregation_mode=mode, **fields)

    def test_the_mode_decides(self) -> None:
        assert hand_off(self.args("null"), HandOffWanted()) is None
        assert isinstance(hand_off(self.args("prefill"), HandOffWanted()), Prefills)
        assert isinstance(hand_off(self.args("decode"), HandOffWanted(role="decode")), Decodes)

    @pytest.mark.parametrize(
        ("mode", "role"), [("null", "prefill"), ("prefill", "decode"), ("decode", "aggregated")]
    )
    def test_another_role_contradicts_it(self, mode: str, role: str) -> None:
        with pytest.raises(StartupError, match=f"--role {role} contradicts"):
            hand_off(self.args(mode), HandOffWanted(role=role))

    @pytest.mark.parametrize("rank", [0, 1, 2])
    def test_a_room_belongs_to_the_rank_that_was_asked_for(self, rank: int) -> None:
        prefills = hand_off(self.args("prefill", dp_size=3), HandOffWanted())
        assert isinstance(prefills, Prefills)
        kv = generate_pb2.KvOptions(data_parallel_rank=rank)
        call = GenerateCall(id="call", request=generate_pb2.GenerateRequest(kv=kv))
        rooms = [prefills.room(call) for _ in range(50)]
        assert len({room["bootstrap_room"] for room in rooms}) == len(rooms)
        for room in rooms:
            assert 0 <= room["bootstrap_room"] < 2**63
            assert room["bootstrap_room"] % 3 == rank
            assert (room["routed_dp_rank"], room["disagg_prefill_dp_rank"]) == (rank, rank)

    def test_a_backend_that_moves_nothing_is_refused(self) -> None:
        with pytest.raises(StartupError, match="--disaggregation-transfer-backend fake"):
            hand_off(self.args("decode", disaggregation_transfer_backend="fake"), HandOffWanted())
