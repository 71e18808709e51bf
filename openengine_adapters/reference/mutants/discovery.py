"""Mutants of discovery, roles, the model's description, and health."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import grpc

from openengine.v1 import discovery_pb2, lifecycle_pb2
from openengine_adapters.core.lifecycle import Phase
from openengine_adapters.core.servicer import OpenEngineServicer
from openengine_adapters.reference.mutants.seams import (
    Refuse,
    Tamper,
    replace,
    request_of,
    response_of,
    servicer_of,
    status_of,
    tampers,
)

_INFO, _MODEL, _CONNECTOR, _HEALTH = "GetEngineInfo", "GetModelInfo", "GetKvConnectorInfo", "Health"
_counter = itertools.count()


@response_of(_INFO, "engine_without_name", "DISC-01", "The engine's name is empty.")
def _(info: Any) -> None:
    info.engine_name = ""


@response_of(_INFO, "client_revision_two", "DISC-02", "Only clients of revision 2 are served.")
def _(info: Any) -> None:
    info.minimum_client_revision = 2


@response_of(_INFO, "moving_schema_release", "DISC-03", "The schema's release is a branch.")
def _(info: Any) -> None:
    info.schema_release = "main"


@response_of(_INFO, "no_role", "DISC-05", "The role is UNSPECIFIED.")
def _(info: Any) -> None:
    info.role = discovery_pb2.ENGINE_ROLE_UNSPECIFIED


@response_of(_INFO, "ghost_model", "DISC-06", "A model is listed that GetModelInfo does not know.")
def _(info: Any) -> None:
    info.supported_models.append("ghost")


@response_of(_MODEL, "another_model_id", "DISC-07", "model_id is not the name under which it was asked for.")
def _(model: Any) -> None:
    model.model_id += "-v2"


@response_of("GetLoad", "load_of_another_instance", "DISC-08", "GetLoad names another instance.")
def _(load: Any) -> None:
    load.instance_id += "-b"


@response_of(_INFO, "changing_instance", "DISC-08", "The instance id is a new one at every asking.")
def _(info: Any) -> None:
    info.instance_id += f"-{next(_counter)}"


@response_of(_INFO, "rank_beyond_size", "DISC-09", "The data-parallel rank equals the size.")
def _(info: Any) -> None:
    info.parallelism.data_parallel_rank = info.parallelism.data_parallel_size


@response_of(_CONNECTOR, "two_connectors", "DISC-10", "EngineInfo and GetKvConnectorInfo disagree.")
def _(connector: Any) -> None:
    connector.supported_protocols.append("carrier-pigeon")


@servicer_of("unknown_role_is_an_error", "DISC-12", "A role that the server does not know fails Health.")
def _(servicer: OpenEngineServicer) -> None:
    health = servicer._health
    answer = health.answer

    async def strict(request: Any, *others: Any) -> Any:
        discovery_pb2.EngineRole.Name(request.role)
        return await answer(request, *others)

    health.answer = strict  # type: ignore[assignment, method-assign]


# ---------------------------------------------------------------------------------------------------- roles


@request_of("Generate", "session_ignored", "ROLE-01", "An aggregated engine drops a KV session in silence.")
def _(request: Any) -> None:
    request.kv.ClearField("session")


@status_of("Generate", "mismatch_is_invalid", "ROLE-04", "A role mismatch is INVALID_ARGUMENT.")
def _(code: grpc.StatusCode) -> grpc.StatusCode:
    return grpc.StatusCode.INVALID_ARGUMENT if code is grpc.StatusCode.FAILED_PRECONDITION else code


# ---------------------------------------------------------------------------------------------------- model


@status_of(_MODEL, "unknown_model_is_invalid", "MODEL-01", "An unknown model is INVALID_ARGUMENT.")
def _(code: grpc.StatusCode) -> grpc.StatusCode:
    return grpc.StatusCode.INVALID_ARGUMENT if code is grpc.StatusCode.NOT_FOUND else code


@request_of(_MODEL, "empty_model_is_the_default", "MODEL-01", "GetModelInfo without a model answers.")
def _(request: Any) -> None:
    request.model = request.model or "reference-toy"


@request_of(
    ("Generate", "Embed"), "only_the_model_id_counts", "MODEL-02",
    "Requests that name the model by its served name are refused.", settings={"served_model_name": "toy"},
)  # fmt: skip
def _(request: Any) -> None:
    holder = request.context if hasattr(request, "context") else request
    if holder.model == "toy":
        holder.model = "no such model"


@response_of(_MODEL, "zero_limit", "MODEL-03", "max_batched_tokens is reported as 0.")
def _(model: Any) -> None:
    model.max_batched_tokens = 0


@response_of(_MODEL, "context_as_output_limit", "MODEL-04", "max_output_tokens repeats the context length.")
def _(model: Any) -> None:
    model.max_output_tokens = model.max_context_length


@response_of(_MODEL, "unspecified_mode", "MODEL-05", "The guided modes hold UNSPECIFIED.")
def _(model: Any) -> None:
    model.generation.guided_decoding.modes.append(0)


@response_of(_MODEL, "guides_without_modes", "MODEL-05", "Guided decoding is supported in no mode.")
def _(model: Any) -> None:
    del model.generation.guided_decoding.modes[:]


@response_of(_MODEL, "zero_top_n", "MODEL-06", "max_top_n is present and 0.")
def _(model: Any) -> None:
    model.generation.prompt_logprobs.max_top_n = 0


@response_of(_MODEL, "hidden_priority", "MODEL-07", "Priority is served and said not to be.")
def _(model: Any) -> None:
    model.generation.supports_priority = False


@response_of(_MODEL, "hidden_guide", "MODEL-07", "A guided mode is served and not advertised.")
def _(model: Any) -> None:
    model.generation.guided_decoding.modes.remove(2)


@request_of("Generate", "cache_salt_refused", "MODEL-07", "A cache salt is advertised and refused.")
def _(request: Any) -> None:
    if request.kv.HasField("cache_salt"):
        raise Refuse(grpc.StatusCode.INVALID_ARGUMENT, "kv.cache_salt: is not supported")


@response_of(_MODEL, "hidden_lora", "MODEL-08", "LoRA is served and said not to be.")
def _(model: Any) -> None:
    model.supports_lora = False


@response_of(_MODEL, "one_sequence_less", "MODEL-09", "One sequence more than advertised is accepted.")
def _(model: Any) -> None:
    model.generation.max_num_sequences -= 1


@response_of(_MODEL, "input_kinds_unreported", "MODEL-10", "supports_text_input is absent.")
def _(model: Any) -> None:
    model.ClearField("supports_text_input")


# --------------------------------------------------------------------------------------------------- health


@response_of(_HEALTH, "nameless_checks", "HEALTH-01", "The health checks have no names.")
def _(health: Any) -> None:
    for check in health.checks:
        check.name = ""


@request_of(_HEALTH, "no_probe", "HEALTH-02", "The inference probe is left out.")
def _(request: Any) -> None:
    request.include_inference_probe = False


@request_of(_HEALTH, "healthy_for_any_model", "HEALTH-03", "Health answers for a model that is not served.")
def _(request: Any) -> None:
    request.model = ""


@request_of(
    _HEALTH, "healthy_in_any_role", "HEALTH-03", "The role that Health is asked for is not looked at."
)
def _(request: Any) -> None:
    request.role = discovery_pb2.ENGINE_ROLE_UNSPECIFIED


@response_of(_HEALTH, "degraded", "HEALTH-04", "A ready server is DEGRADED.")
def _(health: Any) -> None:
    if health.state == lifecycle_pb2.HEALTH_STATE_READY:
        health.state = lifecycle_pb2.HEALTH_STATE_DEGRADED


def _deaf_to(servicer: OpenEngineServicer, deaf: Phase) -> None:
    """Whoever follows the server's phases from now on is not told of one of them."""
    listen = servicer.lifecycle.listen

    def listen_but(listener: Callable[[Phase], None]) -> None:
        listen(lambda phase: None if phase is deaf else listener(phase))

    replace(servicer.lifecycle, "listen", listen_but)


@servicer_of(
    "grpc_health_ignores_drains", "HEALTH-05", "grpc.health.v1 says SERVING while the server drains.",
    options={"include_drain": True},
)  # fmt: skip
def _(servicer: OpenEngineServicer) -> None:
    _deaf_to(servicer, Phase.DRAINING)


@servicer_of(
    "grpc_health_never_serves", "HEALTH-05", "grpc.health.v1 does not notice that the server is READY."
)
def _(servicer: OpenEngineServicer) -> None:
    _deaf_to(servicer, Phase.READY)


@tampers(_MODEL, "refusal_shows_a_path", "ERR-06", "A refusal shows a file of the server.")
class _RefusalShowsAPath(Tamper):
    def refusal(self, code: grpc.StatusCode, details: str) -> tuple[grpc.StatusCode, str]:
        return code, f'{details} (File "/srv/engine/servicer.py", line 12)'
