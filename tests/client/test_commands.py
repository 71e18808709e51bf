"""The other commands: text, JSON and exit codes."""

from __future__ import annotations

import re
from typing import Any

import grpc
import pytest

from openengine.v1 import (
    discovery_pb2,
    lifecycle_pb2,
    lora_pb2,
    model_pb2,
    observability_pb2,
)
from openengine_adapters.client import Unreachable
from openengine_adapters.client.report import report
from openengine_adapters.client.terminal import Terminal
from tests.client.conftest import OpenEngine
from tests.client.fake import RELEASE, FakeServer, Status, engine_info

READY, STARTING = lifecycle_pb2.HEALTH_STATE_READY, lifecycle_pb2.HEALTH_STATE_STARTING
NOT_READY = lifecycle_pb2.HEALTH_STATE_NOT_READY
HealthResponse = lifecycle_pb2.HealthResponse

# ------------------------------------------------------------------------------------------- discovery


async def test_info(openengine: OpenEngine) -> None:
    outcome = await openengine("info")
    assert outcome.code == 0
    facts = dict(re.split(r"  +", line, maxsplit=1) for line in outcome.out.splitlines())
    assert facts == {
        "engine": "fake 1.2.3",
        "role": "AGGREGATED",
        "models": "tiny",
        "instance": "i-1",
        "schema revision": "1",
        "oldest client revision": "1",
        "schema release": RELEASE,
        "tensor parallel size": "2",
        "data parallel rank": "0",
        "kv connector": "none",
    }


async def test_info_of_a_server_with_a_connector_and_a_role_unknown_here(
    fake: FakeServer, openengine: OpenEngine
) -> None:
    connector = {"enabled": True, "transfer_backend": "nixl", "supported_protocols": ["tcp", "ucx"]}
    fake.answers["GetEngineInfo"] = engine_info(role=42, kv_connector=connector)
    out = (await openengine("info")).out
    assert re.search(r"^role +UNSPECIFIED$", out, re.M)
    assert re.search(r"^kv connector +nixl over tcp, ucx$", out, re.M)


async def test_info_as_json_keeps_absent_and_zero_apart(openengine: OpenEngine) -> None:
    (info,) = (await openengine("--output", "json", "info")).records
    assert info["role"] == "AGGREGATED"
    assert info["parallelism"] == {"tensor_parallel_size": 2, "data_parallel_rank": 0}


async def test_models(fake: FakeServer, openengine: OpenEngine) -> None:
    def model(request: model_pb2.GetModelInfoRequest) -> Any:
        if request.model == "none":
            return Status(grpc.StatusCode.NOT_FOUND, "no model none")
        modes = [model_pb2.GUIDED_DECODING_MODE_REGEX, model_pb2.GUIDED_DECODING_MODE_CHOICE]
        guided = model_pb2.GuidedDecodingCapabilities(supported=True, modes=modes)
        generation = model_pb2.GenerationCapabilities(guided_decoding=guided, max_num_sequences=4)
        return model_pb2.ModelInfo(
            model_id=request.model, max_context_length=2048, generation=generation, supports_lora=False
        )

    fake.answers |= {"GetModelInfo": model, "GetEngineInfo": engine_info(supported_models=["a", "b"])}
    outcome = await openengine("models")
    assert outcome.code == 0
    first, second = outcome.out.split("\n\n")
    assert second.startswith("b\n")
    assert [re.split(r"  +", line.strip()) for line in first.splitlines()] == [
        ["a"],
        ["max context length", "2048"],
        ["generation: guided decoding: supported", "yes"],
        ["generation: guided decoding: modes", "REGEX, CHOICE"],
        ["generation: max num sequences", "4"],
        ["supports lora", "no"],
    ]
    records = (await openengine("models", "b", "--output", "json")).records
    assert [record["model_id"] for record in records] == ["b"]
    assert records[0]["generation"]["guided_decoding"]["modes"] == ["REGEX", "CHOICE"]

    outcome = await openengine("models", "none")
    assert (outcome.code, outcome.err) == (
        1,
        "openengine: GetModelInfo rejected: NOT_FOUND: no model none\n",
    )


# ---------------------------------------------------------------------------------------------- health


async def test_health_exits_0_when_ready(fake: FakeServer, openengine: OpenEngine) -> None:
    checks = [lifecycle_pb2.HealthCheck(name="inference_probe", state=READY, message="12 ms")]
    fake.answers["Health"] = HealthResponse(state=READY, checks=checks)
    outcome = await openengine("health", "--probe", "--model", "tiny", "--role", "aggregated")
    assert (outcome.code, outcome.out) == (0, "READY\n  inference_probe  READY  12 ms\n")
    request = fake.last("Health")
    assert request.include_inference_probe
    assert (request.model, request.role) == ("tiny", discovery_pb2.ENGINE_ROLE_AGGREGATED)
    (record,) = (await openengine("health", "--output", "json")).records
    assert record["state"] == "READY"


@pytest.mark.parametrize("state", [STARTING, NOT_READY, lifecycle_pb2.HEALTH_STATE_DEGRADED, 77])
async def test_health_exits_1_in_every_other_state(
    fake: FakeServer, openengine: OpenEngine, state: int
) -> None:
    fake.answers["Health"] = HealthResponse(state=state)  # type: ignore[arg-type]
    assert (await openengine("health")).code == 1
    assert (await openengine("health", "--output", "json")).code == 1


async def test_health_of_a_starting_server_needs_no_discovery(
    fake: FakeServer, openengine: OpenEngine
) -> None:
    fake.answers["GetEngineInfo"] = Status(grpc.StatusCode.UNAVAILABLE, "loading")
    fake.answers["Health"] = HealthResponse(state=STARTING)
    outcome = await openengine("health")
    assert (outcome.code, outcome.out) == (1, "STARTING\n")


async def test_health_of_an_incompatible_server_is_never_0(fake: FakeServer, openengine: OpenEngine) -> None:
    fake.answers |= {"Health": HealthResponse(state=READY), "GetEngineInfo": engine_info(schema_revision=2)}
    assert (await openengine("health", "--wait", "5")).code == 3


async def test_health_of_a_server_of_something_else_is_exit_code_3(
    fake: FakeServer, openengine: OpenEngine
) -> None:
    fake.answers.clear()
    outcome = await openengine("health", "--wait", "5")
    assert outcome.code == 3
    assert "does not serve openengine.v1.OpenEngine" in outcome.err


async def test_health_wait_asks_until_ready(
    fake: FakeServer, openengine: OpenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("openengine_adapters.client.commands.health._PAUSE", 0.01)
    answers = [
        Status(grpc.StatusCode.UNAVAILABLE, "not yet"),
        HealthResponse(state=STARTING),
        HealthResponse(state=STARTING),
        HealthResponse(state=READY),
    ]
    fake.answers["Health"] = lambda request: answers.pop(0)
    outcome = await openengine("health", "--wait", "10")
    assert (outcome.code, outcome.out) == (0, "READY\n")
    said = [line.removeprefix(f"waiting for {fake.target}: ") for line in outcome.err.splitlines()]
    assert said == ["Health rejected: UNAVAILABLE: not yet", "STARTING"]


async def test_health_wait_gives_up_with_the_last_answer(fake: FakeServer, openengine: OpenEngine) -> None:
    fake.answers["Health"] = HealthResponse(state=STARTING)
    outcome = await openengine("health", "--wait", "0.4")
    assert (outcome.code, outcome.out) == (1, "STARTING\n")


async def test_health_wait_for_a_server_that_never_comes(fake: FakeServer, openengine: OpenEngine) -> None:
    await fake.stop()
    outcome = await openengine("health", "--wait", "0.6")
    assert (outcome.code, outcome.out) == (3, "")
    assert f"cannot reach {fake.target}: connection refused" in outcome.err


async def test_health_does_not_wait_out_a_rejection(fake: FakeServer, openengine: OpenEngine) -> None:
    fake.answers["Health"] = Status(grpc.StatusCode.NOT_FOUND, "no model x")
    outcome = await openengine("health", "--probe", "--model", "x", "--wait", "30")
    assert (outcome.code, outcome.err) == (1, "openengine: Health rejected: NOT_FOUND: no model x\n")


# ------------------------------------------------------------------------------------------------ load


def load_info(**fields: Any) -> observability_pb2.LoadInfo:
    return observability_pb2.LoadInfo(instance_id="i", running_requests=0, used_kv_blocks=1 << 40, **fields)


async def test_load_shows_what_is_not_reported(fake: FakeServer, openengine: OpenEngine) -> None:
    rank = observability_pb2.RankLoadInfo(data_parallel_rank=0, queued_requests=2)
    fake.answers["GetLoad"] = load_info(ranks=[rank], attributes={"vllm.x": "1"})
    out = (await openengine("load", "--per-rank")).out
    assert fake.last("GetLoad").include_per_rank
    assert re.search(r"^running requests +0$", out, re.M)
    assert re.search(r"^queued requests +-$", out, re.M)
    assert re.search(r"^vllm.x +1$", out, re.M)
    header, row = (re.split(r"  +", line.strip()) for line in out.splitlines()[-2:])
    assert dict(zip(header, row, strict=True)) == {
        "rank": "0",
        "running requests": "-",
        "queued requests": "2",
        "used kv blocks": "-",
        "total kv blocks": "-",
        "prefill batch size": "-",
        "decode batch size": "-",
    }


async def test_load_as_json(fake: FakeServer, openengine: OpenEngine) -> None:
    fake.answers["GetLoad"] = load_info()
    (record,) = (await openengine("load", "--output", "json")).records
    expected = {"running_requests": 0, "used_kv_blocks": 1 << 40, "ranks": [], "attributes": {}}
    assert record == {"instance_id": "i"} | expected


async def test_load_watch_asks_until_the_server_stops_answering(
    fake: FakeServer, openengine: OpenEngine
) -> None:
    taken = 1_000_000_000_000_000_000
    answers: list[Any] = [load_info(timestamp_unix_nanos=taken), load_info(timestamp_unix_nanos=taken)]
    fake.answers["GetLoad"] = lambda request: (
        answers.pop() if answers else Status(grpc.StatusCode.UNAVAILABLE)
    )
    outcome = await openengine("load", "--watch", "0.01")
    assert outcome.code == 1
    assert outcome.out.splitlines() == ["01:46:40 running_requests=0 used_kv_blocks=1099511627776"] * 2
    answers += [load_info(), load_info(), load_info()]
    assert len((await openengine("load", "--watch", "0.01", "--output", "json")).records) == 3


# ------------------------------------------------------------------------------------ all of them alike

COMMANDS = ["info", "models", "load", "events", "drain", "generate x", "abort x", "lora list", "kv sources"]


@pytest.mark.parametrize(
    "command", [*COMMANDS, "health", "kv watch", "embed x", "classify x", "score --query q x"]
)
async def test_an_unreachable_server_is_exit_code_3_and_says_what_to_check(
    fake: FakeServer, openengine: OpenEngine, command: str
) -> None:
    await fake.stop()
    outcome = await openengine(*command.split())
    assert (outcome.code, outcome.out) == (3, "")
    assert outcome.err == (
        f"openengine: cannot reach {fake.target}: connection refused "
        "(is the server running, and is --target where it listens?)\n"
    )


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("connect: Connection refused (111)", "connection refused"),
        ("DNS resolution failed for x:1: Domain name not found", "no such host"),
        ("Tls handshake failed: WRONG_VERSION_NUMBER", "does the server speak TLS"),
        ("Hostname Verification Check failed.", "see --tls-name"),
        ("UNAVAILABLE: ipv4:127.0.0.1:1: Socket closed", "does it want --tls"),
        ("recvmsg:Connection reset by peer (104)", "does it want --tls"),
        ("Trying to connect an http1.x server", "not gRPC"),
        ("something new", "something new"),
    ],
)
def test_the_cause_of_a_failed_connection_is_said_plainly(
    capsys: pytest.CaptureFixture[str], reason: str, said: str
) -> None:
    assert report(Unreachable("h:1", f"failed to connect to all addresses; {reason}"), Terminal()) == 3
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
async def test_an_incompatible_server_is_exit_code_3(
    fake: FakeServer, openengine: OpenEngine, command: str
) -> None:
    fake.answers["GetEngineInfo"] = engine_info(schema_revision=7)
    outcome = await openengine("--output", "json", *command.split())
    assert (outcome.code, outcome.out) == (3, "")
    assert outcome.failure["code"] == "INCOMPATIBLE"
    said = "server has schema revision 7; this client works with revisions 1 to 1"
    assert outcome.failure["message"] == f"{fake.target} is not compatible: {said}"
    assert list(fake.requests) == ["GetEngineInfo"]


async def test_global_options_stand_before_or_after_the_command(
    fake: FakeServer, openengine: OpenEngine
) -> None:
    target = fake.target
    fake.answers["ListLoras"] = lora_pb2.ListLorasResponse()
    fake.target = "127.0.0.1:1"
    assert (await openengine("--target", target, "info")).code == 0
    assert (await openengine("info", "--target", target)).code == 0
    assert (await openengine("lora", "list", "--target", target)).code == 0
    assert (await openengine("--output", "json", "lora", "list", "--target", target)).out.startswith("{")
    assert (await openengine("info")).code == 3
    fake.target = target


async def test_the_token_comes_from_a_file_or_the_environment(
    fake: FakeServer, openengine: OpenEngine, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENENGINE_TOKEN", "from-env")
    await openengine("info")
    assert ("authorization", "Bearer from-env") in fake.metadata
    (tmp_path / "token").write_text("from-file\n")
    await openengine("info", "--token-file", str(tmp_path / "token"))
    assert ("authorization", "Bearer from-file") in fake.metadata


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["info", "--token-file", "none"], "--token-file: cannot read none: No such file or directory"),
        (["info", "--ca", "none"], "cannot read none: No such file or directory"),
        (["info", "--cert", "x"], "--cert and --key belong together: give both or none"),
        (["info", "--timeout", "0"], "argument --timeout: must be above 0 (see `openengine info --help`)"),
        (["info", "--output", "xml"], "argument --output: invalid choice: 'xml'"),
        (["fly"], "argument COMMAND: invalid choice: 'fly'"),
        ([], "the following arguments are required: COMMAND (see `openengine --help`)"),
        (["lora"], "the following arguments are required: ACTION (see `openengine lora --help`)"),
        (["drain", "--deadline", "-1"], "argument --deadline: '-1' is not a number of seconds"),
        (["kv", "watch", "--start", "-1"], "argument --start: -1 is not in 0 ... "),
    ],
)
async def test_wrong_use_is_one_line_and_exit_code_2(
    openengine: OpenEngine, arguments: list[str], said: str
) -> None:
    outcome = await openengine(*arguments)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith(f"openengine: {said}")
    assert outcome.err.count("\n") == 1


async def test_text_from_the_server_stays_on_its_line(fake: FakeServer, openengine: OpenEngine) -> None:
    fake.answers["GetLoad"] = Status(grpc.StatusCode.INTERNAL, "a\nb\x1b[2J")
    assert (await openengine("load")).err == "openengine: GetLoad rejected: INTERNAL: a\\nb\\e[2J\n"
    fake.answers["GetEngineInfo"] = engine_info(engine_name="\x1b[31m\n")
    assert (await openengine("info")).out.startswith("engine                  \\e[31m\\n 1.2.3\n")
