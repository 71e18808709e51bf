"""Real vLLM engines on small models, one for each folder of tests that needs it, and one reference for all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest

from openengine.v1 import service_pb2_grpc
from openengine_adapters.engine import EngineDescription
from tests.support import cpu_env
from tests.support.server import REPOSITORY
from tests.support.server import serving as serving_apart
from tests.support.wire import Wire, serving
from tests.vllm.conftest import vllm_engine
from tests.vllm.tasks.cases import Reference, model


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reference]:
    """The independent answers."""
    found = Reference(tmp_path_factory.mktemp("reference"))
    yield found
    found.close()


@contextlib.asynccontextmanager
async def served(name: str, *flags: str, **more: Any) -> AsyncIterator[Wire]:
    """A model in float32, so that it agrees with the reference to many digits."""
    model(name)
    async with serving(vllm_engine(name, "--dtype", "float32", *flags, **more)) as wire:
        yield wire


@contextlib.asynccontextmanager
async def seeing(name: str, *flags: str) -> AsyncIterator[Wire]:
    """A model that takes images, in a process of its own, where torchvision can be imported (scripts/setup/venv.sh)."""
    folder = str(model(name))
    path = os.pathsep.join([str(cpu_env.SGLANG_STAND_INS), str(REPOSITORY / ".venv" / "vllm" / "vision")])
    with serving_apart("vllm", name, ["--dtype", "float32", *flags], {"PYTHONPATH": path}) as server:
        about = EngineDescription(engine_name="vllm", engine_version="", model_id=folder, vocab_size=0)
        async with grpc.aio.insecure_channel(server.target) as channel:
            stub = service_pb2_grpc.OpenEngineStub(channel)
            yield Wire(engine=None, servicer=None, description=about, stub=stub, target=server.target)  # type: ignore[arg-type]
