"""The command as a process: quick to start, plain about what it is, and clean at its end."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import pytest

from openengine.v1 import generate_pb2, lifecycle_pb2, service_pb2_grpc
from openengine_adapters.reference.__main__ import main
from openengine_adapters.reference.mutants import MUTANTS

COMMAND = [sys.executable, "-m", "openengine_adapters.reference"]
START_S = 20.0  # on a busy machine; idle it takes less than one


@contextmanager
def _serving(*flags: str) -> Iterator[tuple[subprocess.Popen[str], service_pb2_grpc.OpenEngineStub]]:
    """A started server and a stub for it."""
    process = subprocess.Popen(
        [*COMMAND, "--host", "127.0.0.1", "--port", "0", *flags], stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    try:
        end = time.monotonic() + START_S
        for line in process.stderr:
            assert time.monotonic() < end
            if ready := re.search(r"ready: reference .* on port (\d+)", line):
                break
        else:
            pytest.fail(f"the server ended with {process.wait()}")
        with grpc.insecure_channel(f"127.0.0.1:{ready[1]}") as channel:
            yield process, service_pb2_grpc.OpenEngineStub(channel)
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def _request(**fields: int) -> generate_pb2.GenerateRequest:
    stopping = generate_pb2.StoppingOptions(ignore_eos=True, **fields)  # type: ignore[arg-type]  # as named
    return generate_pb2.GenerateRequest(
        request_id="r", model="reference-toy", prompt="Hello", stopping=stopping
    )


def test_help_says_that_it_is_a_test_tool(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    assert "TEST TOOL" in capsys.readouterr().out


def test_the_mutants_are_listed_with_the_requirement_that_they_break(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--mutant", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(MUTANTS) >= 60
    assert any(line.split()[:2] == ["cumulative_text", "STREAM-03"] for line in lines)


@pytest.mark.parametrize(
    "flags", [["--mutant", "none"], ["--speed", "-1"], ["--max-context", "8"], ["--lora", "nameless"]]
)
def test_wrong_flags_are_refused(flags: list[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(flags)
    assert end.value.code == 2


def test_an_adapter_that_cannot_be_loaded_is_one_sentence() -> None:
    command = [*COMMAND, "--lora", "a=/nowhere", "--port", "0"]
    failed = subprocess.run(command, capture_output=True, text=True, timeout=START_S, check=False)
    assert failed.returncode == 1
    assert "cannot start: a LoRA adapter cannot be loaded" in failed.stderr


def test_it_serves_and_ends_on_a_signal() -> None:
    with _serving() as (process, stub):
        responses = list(stub.Generate(_request(max_tokens=5), timeout=START_S))
        assert responses[-1].usage.completion_tokens == 5
        process.send_signal(signal.SIGTERM)
        assert process.wait(START_S) == 0


def test_a_mutant_is_served() -> None:
    with _serving("--mutant", "no_usage") as (_, stub):
        responses = list(stub.Generate(_request(max_tokens=5), timeout=START_S))
        assert not responses[-1].HasField("usage")


def test_a_death_on_purpose_ends_the_process() -> None:
    with _serving("--die-after", "5") as (process, stub):
        responses = list(stub.Generate(_request(max_tokens=100), timeout=START_S))
        assert responses[-1].error.retryable
        assert process.wait(START_S) == 3


def test_a_hang_on_purpose_is_noticed() -> None:
    with _serving("--hang-after", "5", "--hang-timeout", "0.5", "--stay-up") as (_, stub):
        responses = list(stub.Generate(_request(max_tokens=100), timeout=START_S))
        assert responses[-1].error.retryable
        health = stub.Health(lifecycle_pb2.HealthRequest(), timeout=START_S)
        assert health.state == lifecycle_pb2.HEALTH_STATE_NOT_READY
