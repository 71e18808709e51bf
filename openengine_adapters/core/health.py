"""Health: the server's phase, its checks by name, and a shared inference probe (HEALTH-01 … HEALTH-04)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid

from openengine.v1 import discovery_pb2, generate_pb2, inputs_pb2, lifecycle_pb2
from openengine_adapters.core.calls import patience
from openengine_adapters.core.errors import EngineFailure, Rejected
from openengine_adapters.core.lifecycle import Lifecycle, Phase
from openengine_adapters.core.tasks import probe
from openengine_adapters.core.validation import check_model
from openengine_adapters.engine import Engine, EngineDescription, GenerateCall, HandsOffKv

log = logging.getLogger(__name__)

PROBE = "inference_probe"
PROBE_TIMEOUT_S = 30.0

ANSWER_S = 1.0
"""Seconds before the caller's deadline at which it is answered without the probe."""

_STATES = {
    Phase.STARTING: lifecycle_pb2.HEALTH_STATE_STARTING,
    Phase.READY: lifecycle_pb2.HEALTH_STATE_READY,
    Phase.DRAINING: lifecycle_pb2.HEALTH_STATE_DRAINING,
    Phase.DEAD: lifecycle_pb2.HEALTH_STATE_NOT_READY,
}


class Health:
    """Answers Health. One probe runs at a time; callers that come while it runs share its result."""

    def __init__(self, engine: Engine, lifecycle: Lifecycle, timeout_s: float = PROBE_TIMEOUT_S) -> None:
        self._engine = engine
        self._lifecycle = lifecycle
        self._timeout_s = timeout_s
        self._probe: asyncio.Task[lifecycle_pb2.HealthCheck] | None = None

    async def answer(
        self,
        request: lifecycle_pb2.HealthRequest,
        description: EngineDescription | None,
        remaining: float | None = None,
    ) -> lifecycle_pb2.HealthResponse:
        """Answer at once without the probe, within its time limit with it, or the `remaining` seconds of the caller.

        Raises `Rejected` NOT_FOUND.
        """
        state = _STATES[self._lifecycle.phase]
        checks = [
            lifecycle_pb2.HealthCheck(name="grpc", state=lifecycle_pb2.HEALTH_STATE_READY),
            lifecycle_pb2.HealthCheck(name="scheduler", state=state, message=self._message()),
        ]
        if description is not None:
            if request.model:
                check_model(request.model, description)
            checks.append(lifecycle_pb2.HealthCheck(name="model", state=state, message=description.model_id))
            if description.kv_connector.enabled:
                checks.append(lifecycle_pb2.HealthCheck(name="kv_connector", state=state))
            if request.role != discovery_pb2.ENGINE_ROLE_UNSPECIFIED:
                checks.append(_role_check(request.role, description))
            if request.include_inference_probe and self._lifecycle.phase is not Phase.DEAD:
                checks.append(await self._shared_probe(description, remaining))
        worst = [c.state for c in checks if c.state == lifecycle_pb2.HEALTH_STATE_NOT_READY]
        return lifecycle_pb2.HealthResponse(state=worst[0] if worst else state, checks=checks)

    def _message(self) -> str:
        if self._lifecycle.phase is Phase.DEAD:
            return str(self._lifecycle.died)
        return str(self._lifecycle.phase.value)

    async def _shared_probe(
        self, description: EngineDescription, remaining: float | None
    ) -> lifecycle_pb2.HealthCheck:
        probe = self._probe
        if probe is None or probe.done():
            probe = self._probe = asyncio.get_running_loop().create_task(
                self._run_probe(description), name="health-probe"
            )
        seconds = patience(remaining, ANSWER_S)
        # Left running: a caller that gives up must not end the probe for the others.
        done, _ = await asyncio.wait({probe}, timeout=seconds)
        return probe.result() if done else _no_answer(seconds or 0)

    async def _run_probe(self, description: EngineDescription) -> lifecycle_pb2.HealthCheck:
        check = lifecycle_pb2.HealthCheck(name=PROBE, state=lifecycle_pb2.HEALTH_STATE_NOT_READY)
        try:
            async with asyncio.timeout(self._timeout_s):
                if not await self._infer(description):
                    check.message = (
                        "this role or model has no minimal inference; the engine answers its own check"
                    )
        except TimeoutError:
            return _no_answer(self._timeout_s)
        except (EngineFailure, Rejected) as failure:
            check.message = str(failure)
        else:
            check.state = _STATES[self._lifecycle.phase]
        return check

    async def _infer(self, description: EngineDescription) -> bool:
        """The smallest request that passes through the whole engine; False when there is none."""
        if description.generation is None:
            return await probe(self._engine, description)
        if description.role == discovery_pb2.ENGINE_ROLE_DECODE:
            # Without a session there is nothing that it could be asked.
            return False
        await self._generate(description)
        return True

    async def _generate(self, description: EngineDescription) -> None:
        """One token from one id."""
        request = generate_pb2.GenerateRequest(
            request_id="health-probe",
            model=description.model_id,
            token_ids=inputs_pb2.TokenIds(ids=[min(1, description.vocab_size - 1)]),
            sampling=generate_pb2.SamplingParams(temperature=0.0),
            stopping=generate_pb2.StoppingOptions(max_tokens=1),
        )
        stream = await self._engine.generate(GenerateCall(id=uuid.uuid4().hex, request=request))
        async with contextlib.aclosing(stream):
            async for step in stream:
                if step.session is not None and isinstance(self._engine, HandsOffKv):
                    # Nobody will come for the probe's blocks (PD-04).
                    await self._engine.release_session(step.session.session_id)
                if step.deltas or step.session is not None:
                    return
        raise EngineFailure("the engine ended the probe without a token")


def _role_check(role: int, description: EngineDescription) -> lifecycle_pb2.HealthCheck:
    """HEALTH-03; a role that this build does not know counts as unspecified (DISC-12)."""
    if role == description.role or role not in discovery_pb2.EngineRole.values():
        return lifecycle_pb2.HealthCheck(name="role", state=lifecycle_pb2.HEALTH_STATE_READY)
    return lifecycle_pb2.HealthCheck(
        name="role",
        state=lifecycle_pb2.HEALTH_STATE_NOT_READY,
        message=f"asked for {discovery_pb2.EngineRole.Name(discovery_pb2.EngineRole.ValueType(role))}, "
        f"this server is {discovery_pb2.EngineRole.Name(description.role)}",
    )


def _no_answer(seconds: float) -> lifecycle_pb2.HealthCheck:
    return lifecycle_pb2.HealthCheck(
        name=PROBE, state=lifecycle_pb2.HEALTH_STATE_NOT_READY, message=f"no answer within {seconds:.3g} s"
    )
