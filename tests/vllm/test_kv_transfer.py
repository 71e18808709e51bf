"""Roles, connectors and session references of vLLM, without an engine (ROLE-05, PD-01, PD-07)."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openengine.v1 import discovery_pb2, kv_pb2
from openengine_adapters.core.errors import Rejected
from openengine_adapters.core.handoff.parameters import to_struct
from openengine_adapters.core.handoff.roles import HandOffWanted
from openengine_adapters.engine import StartupError
from openengine_adapters.vllm import kv_transfer
from openengine_adapters.vllm.kv_transfer import ATTRIBUTES, CONNECTORS, from_session, role_of, to_session
from tests.support import cpu_env

PULL, PUSH, STORAGE = (CONNECTORS[f"{name}Connector"] for name in ("Nixl", "NixlPush", "Example"))
DESK = ("10.0.0.1", 5000)
GOOD: dict[str, Any] = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2, 3]],
    "remote_engine_id": "engine",
    "remote_request_id": "request-0123abcd",
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
    "dcp_size": 1,
    "pp_size": 1,
    "remote_num_tokens": 90,
    "remote_blocks_expiry_time": None,
    "transfer_mode": "pull",
    "remote_prefill_cached_tokens": 0,
}
JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers(-5, 2**40) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


def reference(params: Any = GOOD) -> kv_pb2.KvSessionRef:
    session = to_session(PULL, "session", GOOD, DESK, 0)
    session.attributes_struct.CopyFrom(to_struct({ATTRIBUTES: params}))
    return session


class TestSessions:
    def test_a_session_comes_out_as_it_went_in(self) -> None:
        handed = from_session(PULL, to_session(PULL, "session", GOOD, DESK, 3))
        assert handed.params == GOOD
        assert {name: type(value) for name, value in handed.params.items()} == {
            name: type(value) for name, value in GOOD.items()
        }
        assert (handed.desk.host, handed.desk.port) == DESK

    def test_a_storage_needs_no_parameters(self) -> None:
        session = to_session(STORAGE, "session", {}, DESK, 0)
        assert from_session(STORAGE, session).params == {}
        session.attributes_struct.CopyFrom(to_struct({ATTRIBUTES: GOOD}))
        with pytest.raises(Rejected, match="is empty"):
            from_session(STORAGE, session)

    @given(st.sampled_from(sorted(GOOD)), JSON)
    @settings(max_examples=400, deadline=None)
    def test_what_is_taken_is_sound(self, name: str, value: Any) -> None:
        """Whatever one parameter is, it is refused by name, or of the type and size that vLLM takes."""
        params: dict[str, Any] = {}
        with contextlib.suppress(Rejected):
            params = from_session(PULL, reference({**GOOD, name: value})).params
        if not params:
            return
        assert isinstance(
            params[name], type(GOOD[name]) if GOOD[name] is not None else (int, float, type(None))
        )
        assert params["do_remote_prefill"] is True
        assert all(0 <= block < 2**31 for group in params["remote_block_ids"] for block in group)
        assert all(params["remote_block_ids"])
        assert min(params["tp_size"], params["pp_size"], params["dcp_size"], params["remote_num_tokens"]) > 0

    @pytest.mark.parametrize("name", sorted(GOOD.keys() - kv_transfer._OPTIONAL))
    def test_what_is_missing_is_named(self, name: str) -> None:
        params = {key: value for key, value in GOOD.items() if key != name}
        with pytest.raises(Rejected, match=f"{ATTRIBUTES}.{name} is missing"):
            from_session(PULL, reference(params))

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("remote_block_ids", []),
            ("remote_block_ids", [[]]),
            ("remote_block_ids", [1]),
            ("remote_block_ids", [[1], []]),
            ("remote_block_ids", [[True]]),
            ("remote_block_ids", [[1.5]]),
            ("remote_block_ids", [[-1]]),
            ("remote_port", "5600"),
            ("remote_port", True),
            ("remote_port", 5601),
            ("remote_host", "elsewhere"),
            ("tp_size", 0),
            ("tp_size", None),
            ("remote_engine_id", ""),
            ("do_remote_prefill", False),
            ("do_remote_decode", True),
            ("transfer_mode", "push"),
            ("surprise", 1),
        ],
    )
    def test_what_kills_or_hangs_a_decode_engine_is_refused(self, name: str, value: Any) -> None:
        with pytest.raises(Rejected, match=rf"^kv\.session\.attributes_struct: {ATTRIBUTES}\."):
            from_session(PULL, reference({**GOOD, name: value}))

    def test_a_session_of_another_connector_is_refused(self) -> None:
        session = to_session(PULL, "session", GOOD, DESK, 0)
        with pytest.raises(Rejected, match=r"^kv\.session\.transfer_backend"):
            from_session(PUSH, session)

    @pytest.mark.parametrize("change", ["none", "order", "port", "host"])
    def test_the_endpoints_are_those_of_the_prefill_server(self, change: str) -> None:
        session = to_session(PULL, "session", GOOD, DESK, 0)
        match change:
            case "none":
                del session.endpoints[:]
            case "order":
                session.endpoints.reverse()
            case "port":
                session.endpoints[1].port = 0
            case "host":
                session.endpoints[1].host = ""
        with pytest.raises(Rejected, match=r"^kv\.session\.endpoints"):
            from_session(PULL, session)


def config(connector: str | None, role: str | None, **extra: Any) -> Any:
    from vllm.config import KVTransferConfig

    return KVTransferConfig(kv_connector=connector, kv_role=role, kv_connector_extra_config=extra)


class TestRoles:
    @pytest.mark.parametrize(
        ("kv_role", "wanted", "role"),
        [
            ("kv_producer", None, discovery_pb2.ENGINE_ROLE_PREFILL),
            ("kv_producer", "prefill", discovery_pb2.ENGINE_ROLE_PREFILL),
            ("kv_consumer", None, discovery_pb2.ENGINE_ROLE_DECODE),
            ("kv_both", None, discovery_pb2.ENGINE_ROLE_AGGREGATED),
            ("kv_both", "prefill", discovery_pb2.ENGINE_ROLE_PREFILL),
            ("kv_both", "decode", discovery_pb2.ENGINE_ROLE_DECODE),
        ],
    )
    def test_the_configuration_decides_and_the_flag_where_it_does_not(
        self, kv_role: str, wanted: str | None, role: int
    ) -> None:
        assert role_of(config("NixlConnector", kv_role), wanted) == role

    @pytest.mark.parametrize("none", [None, config(None, None)])
    def test_without_a_connector_the_server_is_aggregated(self, none: Any) -> None:
        assert role_of(none, None) == discovery_pb2.ENGINE_ROLE_AGGREGATED
        with pytest.raises(StartupError, match="--role prefill needs a KV connector"):
            role_of(none, "prefill")

    @pytest.mark.parametrize(
        ("kv_role", "wanted"), [("kv_producer", "decode"), ("kv_consumer", "aggregated")]
    )
    def test_another_role_contradicts_it(self, kv_role: str, wanted: str) -> None:
        with pytest.raises(StartupError, match=f"--role {wanted} contradicts kv_role '{kv_role}'"):
            role_of(config("NixlConnector", kv_role), wanted)

    def test_a_connector_that_is_not_known_serves_no_hand_over(self) -> None:
        with pytest.raises(StartupError, match="'MooncakeConnector' is not one"):
            role_of(config("MooncakeConnector", "kv_producer"), None)
        assert role_of(config("OffloadingConnector", "kv_both"), None) == discovery_pb2.ENGINE_ROLE_AGGREGATED

    def test_blocks_that_no_session_frees_are_refused(self) -> None:
        with pytest.raises(StartupError, match="bidirectional_kv_xfer"):
            role_of(config("NixlConnector", "kv_consumer", bidirectional_kv_xfer=True), None)


class TestSideChannel:
    @pytest.fixture(autouse=True)
    def own_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in (kv_transfer.HOST, kv_transfer.PORT):
            monkeypatch.setenv(name, "")  # so that whatever is set in between is taken back
            monkeypatch.delenv(name)

    @pytest.fixture
    def taken(self) -> Iterator[int]:
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            one.listen()
            yield int(one.getsockname()[1])

    def test_its_host_is_the_one_that_others_reach(self) -> None:
        assert kv_transfer.prepare_side_channel(PULL, "127.0.0.1", 2) == "127.0.0.1"
        assert kv_transfer.side_channel(1)[0] == "127.0.0.1"

    def test_a_port_that_is_taken_is_said_where_the_engine_would_hang(
        self, taken: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(kv_transfer.PORT, str(taken))
        with pytest.raises(StartupError, match=f"port {taken} of 127.0.0.1 is taken"):
            kv_transfer.prepare_side_channel(PULL, "127.0.0.1", 1)

    def test_without_one_a_free_port_is_taken_for_each_rank(self) -> None:
        kv_transfer.prepare_side_channel(PULL, "127.0.0.1", 3)
        ports = [kv_transfer.side_channel(rank)[1] for rank in range(3)]
        assert ports == [*range(ports[0], ports[0] + 3)]

    def test_a_host_that_is_not_this_machine_s_is_refused(self) -> None:
        with pytest.raises(StartupError, match="--advertise-host"):
            kv_transfer.prepare_side_channel(PULL, "192.0.2.1", 1)

    def test_a_wildcard_is_no_host(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(kv_transfer.HOST, "0.0.0.0")
        with pytest.raises(StartupError, match=f"{kv_transfer.HOST}=0.0.0.0"):
            kv_transfer.prepare_side_channel(PULL, "127.0.0.1", 1)

    @pytest.mark.parametrize("port", ["many", "70000", "65535"])
    def test_a_port_is_a_number(self, port: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(kv_transfer.PORT, port)
        with pytest.raises(StartupError, match=kv_transfer.PORT):
            kv_transfer.prepare_side_channel(PULL, "127.0.0.1", 2)

    def test_a_prefill_engine_takes_the_place_of_a_worker_extension(self) -> None:
        from vllm import AsyncEngineArgs

        from openengine_adapters.vllm.disaggregation import Decodes, Prefills, hand_off

        args = AsyncEngineArgs(
            model=str(cpu_env.model(cpu_env.TINY_LLAMA)),
            kv_transfer_config=config("NixlConnector", "kv_producer"),
        )
        assert isinstance(hand_off(args, HandOffWanted()), Prefills)
        with pytest.raises(StartupError, match="--worker-extension-cls"):
            hand_off(args, HandOffWanted())  # now it has one
        args.kv_transfer_config = config("NixlConnector", "kv_consumer")
        assert isinstance(hand_off(args, HandOffWanted()), Decodes)
