# SPDX-License-Identifier: Apache-2.0
"""The contract's requirements, in a line each, with the section of the contract that they come from.

A requirement with `unseen` can't be judged by a client that talks gRPC to a running server; it says why.
"""

from __future__ import annotations

from dataclasses import dataclass

CONTRACT = "OpenEngine API v1"


@dataclass(frozen=True)
class Requirement:
    """One rule: its id, the rule in a line, and the contract's section."""

    id: str
    summary: str
    section: str
    unseen: str = ""


_CATALOGUE: dict[str, list[tuple[str, str]]] = {
    "Core identity and roles": [
        ("DISC-01", "engine_name and engine_version say which engine this is; neither is empty"),
        ("DISC-02", "schema_revision and minimum_client_revision are 1"),
        ("DISC-03", "schema_release names something immutable: not empty, not a branch or a moving tag"),
        (
            "DISC-04",
            "the default schema_release is the commit of the schema; a moving name is refused at start-up",
        ),
        ("DISC-05", "role is AGGREGATED, PREFILL or DECODE and never changes"),
        ("DISC-06", "supported_models is not empty and GetModelInfo knows every entry"),
        ("DISC-07", "one supported model by default, and its model_id is that entry"),
        ("DISC-08", "instance_id is set, stable, and the same in GetLoad"),
        ("DISC-09", "unknown scalars are absent; sizes are at least 1 and a rank lies within its size"),
        ("DISC-10", "EngineInfo.kv_connector equals GetKvConnectorInfo"),
        ("DISC-11", "a client refuses a server outside its tested revisions"),
        ("DISC-12", "an unknown enum value is taken as UNSPECIFIED"),
        ("DISC-13", "while the model loads, Health is STARTING and everything else UNAVAILABLE"),
        ("ROLE-01", "AGGREGATED generates; a request with a KV session is a mismatch there and on PREFILL"),
        ("ROLE-02", "PREFILL ends with PrefillReady and sends no token and no GenerationFinished"),
        ("ROLE-03", "DECODE needs a KV session"),
        ("ROLE-04", "a role mismatch is FAILED_PRECONDITION before acceptance"),
        ("ROLE-05", "the role follows the engine's configuration; a contradiction is refused at start-up"),
    ],
    "Model and capacity metadata": [
        ("MODEL-01", "GetModelInfo: empty model INVALID_ARGUMENT, unknown model NOT_FOUND"),
        ("MODEL-02", "model_id, served_model_name and every alias name the model in every RPC"),
        ("MODEL-03", "reported limits are above 0 and come from the live engine"),
        ("MODEL-04", "max_output_tokens is absent unless it is a limit of its own"),
        (
            "MODEL-05",
            "a present capability says supported or not; mode lists are non-empty and never UNSPECIFIED",
        ),
        ("MODEL-06", "prompt and output log-probability capabilities are separate; max_top_n is above 0"),
        ("MODEL-07", "what is advertised works; what is not is rejected INVALID_ARGUMENT by name"),
        ("MODEL-08", "supports_lora is true exactly when lora_name and the LoRA RPCs are accepted"),
        ("MODEL-09", "max_num_sequences is the largest accepted num_sequences"),
        ("MODEL-10", "both input kinds are reported, and max_num_sequences when several are accepted"),
        ("MODEL-11", "reasoning_parser and tool_call_parser name the configured parsers"),
    ],
    "Non-generative task API": [
        ("TASK-01", "tasks need context, request_id and a known model"),
        ("TASK-02", "a task that the model lacks is FAILED_PRECONDITION"),
        ("TASK-03", "malformed input and unsupported options are INVALID_ARGUMENT by name"),
        ("TASK-04", "exhausted capacity is RESOURCE_EXHAUSTED"),
        ("TASK-05", "an empty batch, a missing or repeated item_id, an empty input are INVALID_ARGUMENT"),
        ("TASK-06", "multimodal input needs media, and a model that takes it"),
        ("TASK-07", "tasks and Generate share one namespace of request ids"),
        ("TASK-08", "Abort ends a running task, whose call ends CANCELLED"),
        ("TASK-09", "cancellation and deadline stop a task's work in the engine"),
        ("TASK-10", "priority: larger first; priority and lora_name only where advertised"),
        ("TASK-11", "dense tensors: shape fits the values, all finite, a scalar is [1]"),
        ("TASK-12", "sparse tensors: indices strictly increasing and inside the shape"),
        ("TASK-13", "cached_input_tokens is at most input_tokens, which counts every item"),
        ("TASK-14", "one output for each input in request order, with index and ids echoed"),
        ("TASK-15", "one failing item fails the whole call"),
        ("TASK-16", "a value that is not finite fails the call; it is never sent"),
    ],
    "Embedding": [
        ("EMB-01", "SEQUENCE embeddings are [dimension], TOKEN ones [token_count, dimension]"),
        ("EMB-02", "explicit granularity, normalize and encoding are honoured or rejected"),
        ("EMB-03", "normalize=true gives length 1, false the raw vector"),
        ("EMB-04", "dimensions reduces only: 0 and more than native are rejected"),
        ("EMB-05", "a reported dimension is the one returned"),
    ],
    "Classification": [
        ("CLS-01", "SEQUENCE scores are [class_count], TOKEN ones [token_count, class_count]"),
        (
            "CLS-02",
            "the actual semantics are stated; explicit ones honoured or rejected; probabilities sum to 1",
        ),
        ("CLS-03", "labels, when returned, are one for each class"),
    ],
    "Scoring": [
        ("SCO-01", "groups need unique ids, a query and candidates with unique ids"),
        ("SCO-02", "label_token_ids come back in order, one value each; duplicates are rejected"),
        ("SCO-03", "SOFTMAX sums to 1, NONE is native, and the response says which was used"),
        ("SCO-04", "an instruction is taken only when advertised"),
        ("SCO-05", "groups and candidates keep request order and carry their indexes"),
        ("SCO-06", "granularity, semantics and, for rankable scores, higher_is_better are stated"),
        ("SCO-07", "N groups score as N single calls do"),
    ],
    "Task capability discovery": [
        ("CAP-01", "absent means unreported; supported tells true from false"),
        ("CAP-02", "capability lists hold no UNSPECIFIED; limits are above 0"),
        ("CAP-03", "reported task limits are enforced: one more is rejected"),
    ],
    "LoRA lifecycle": [
        ("LORA-01", "a bad id, name or path, or no adapter, is INVALID_ARGUMENT"),
        ("LORA-02", "loading the same adapter twice is OK and says already_loaded"),
        ("LORA-03", "a conflicting id, name or path is ALREADY_EXISTS and changes nothing"),
        ("LORA-04", "unloading an unknown adapter is NOT_FOUND"),
        ("LORA-05", "with LoRA disabled the three RPCs are FAILED_PRECONDITION and lora_name is rejected"),
        ("LORA-06", "ListLoras shows exactly the loaded adapters"),
        ("LORA-07", "lora_name selects a loaded adapter and changes the output; an unknown one is NOT_FOUND"),
        ("LORA-08", "loading is eager: no valid adapter, INVALID_ARGUMENT, nothing left behind"),
        ("LORA-09", "unload waits for users of the adapter, and nothing of it is answered from afterwards"),
        ("LORA-10", "concurrent loads and unloads of one name are serialised"),
    ],
    "Generation API": [
        ("GEN-01", "empty request_id or model INVALID_ARGUMENT; unknown model NOT_FOUND"),
        ("GEN-02", "exactly one of prompt and token_ids, not empty"),
        ("GEN-03", "a token id outside the vocabulary or a prompt that is too long is INVALID_ARGUMENT"),
        ("GEN-04", "an id in flight is ALREADY_EXISTS; it is free again once its stream ended"),
        ("GEN-05", "draining UNAVAILABLE, queue full RESOURCE_EXHAUSTED, both before acceptance"),
        ("GEN-06", "token ids of a prompt give the same greedy output as its text"),
        ("GEN-07", "trace headers reach the engine's tracing; other metadata changes nothing"),
        ("GEN-08", "initial metadata is sent at acceptance, before the first token"),
        ("GEN-09", "priority: the larger value is scheduled earlier"),
        ("GEN-10", "nothing a client can send kills or hangs the engine"),
        ("SAMP-01", "absent is the engine's default; explicit zero counts; temperature 0 is greedy"),
        ("SAMP-02", "values out of range are INVALID_ARGUMENT by name; top_k 0 and -1 are no limit"),
        ("SAMP-03", "same seed, same output; a seed is never cut short or ignored"),
        ("SAMP-04", "num_sequences n gives indexes 0 to n-1; absent is 1; 0 is INVALID_ARGUMENT"),
        ("SAMP-05", "several greedy sequences are served or rejected, never a hang"),
        (
            "STOP-01",
            "max_tokens bounds each sequence and ends it LENGTH; absent is the context; 0 is rejected",
        ),
        ("STOP-02", "min_tokens holds stops back; above max_tokens is INVALID_ARGUMENT"),
        ("STOP-03", "stop strings match across tokens; an empty condition is INVALID_ARGUMENT"),
        ("STOP-04", "STOP always carries stop_match, which names what matched; other reasons carry none"),
        ("STOP-05", "a matched stop is in neither text nor records unless asked for"),
        ("STOP-06", "ignore_eos runs past EOS to max_tokens"),
        ("STOP-07", "text and token records agree at every moment; characters come whole"),
        ("RESP-01", "prompt output only when asked, once, first; its first record has no score"),
        ("RESP-02", "prompt_logprob_start skips positions; beyond the prompt is INVALID_ARGUMENT"),
        ("RESP-03", "one record for each token, with its logprob when asked for"),
        ("RESP-04", "top_n gives exactly the N best, best first"),
        ("RESP-05", "explicit candidate ids come back exactly, in order; bad ones are rejected"),
        ("RESP-06", "all {} gives the whole vocabulary"),
        ("RESP-07", "prompt and output selections are independent"),
        ("RESP-08", "candidates without their logprobs flag are INVALID_ARGUMENT"),
        ("RESP-09", "log-probabilities are the model's; greedy records have rank 1"),
        ("KVOPT-01", "bypass_prefix_cache reads no cached prefix, yet fills the cache"),
        ("KVOPT-02", "cache_salt separates cached prefixes; the same salt shares them"),
        ("KVOPT-03", "data_parallel_rank picks the rank; out of range is INVALID_ARGUMENT"),
        ("GUIDE-01", "every advertised guided mode constrains the output"),
        ("GUIDE-02", "a malformed or empty guide is INVALID_ARGUMENT and harms nothing"),
        ("GUIDE-03", "a guided backend is honoured or rejected"),
        ("MEDIA-01", "a media item has one source; UNSPECIFIED is an image; order is kept"),
        ("MEDIA-02", "media that the model can't take or decode is INVALID_ARGUMENT"),
        ("MEDIA-03", "a URL is not fetched unless the server was told so"),
        ("STREAM-01", "every response echoes request_id and sets one event"),
        ("STREAM-02", "tokens and finishes carry output_index, 0 included, in 0 to n-1"),
        ("STREAM-03", "only deltas: nothing is sent twice"),
        ("STREAM-04", "one GenerationFinished for each output, and nothing of it afterwards"),
        ("STREAM-05", "EngineError is terminal, and the status is then OK"),
        ("STREAM-06", "usage is on the last response, always, and on no other"),
        ("STREAM-07", "usage adds up over all outputs"),
        ("STREAM-08", "a stream never ends OK without its terminal event"),
        ("STREAM-09", "an aborted output finishes CANCELLED; a failure is never a finish reason"),
        ("STREAM-10", "a client that stops reading loses its request after a set time"),
        ("STREAM-11", "cancellation or deadline frees the engine's slot within a second"),
    ],
    "Disaggregated serving and KV API": [
        ("PD-01", "PrefillReady carries a complete KV session"),
        ("PD-02", "a decode engine continues from the session unchanged"),
        ("PD-03", "a decode engine rejects malformed sessions, and says which failed"),
        ("PD-04", "a session ends by itself and holds no blocks afterwards"),
        ("PD-05", "a prefill that fails after acceptance ends with one EngineError"),
        ("PD-06", "session endpoints have a host, a valid port and a supported protocol"),
        ("PD-07", "hand-off parameters are checked completely before the engine sees them"),
        ("KVC-01", "GetKvConnectorInfo answers on every role; enabled is present"),
        ("KVC-02", "PREFILL and DECODE report backend, protocols, clean-up, drain and direction"),
    ],
    "KV connector and KV events": [
        ("KVS-01", "sources are real, routable and filtered by rank"),
        ("KVS-02", "a native ZMQ source carries its parameters and a plain subscriber can read it"),
        ("KVS-03", "each source names its rank; one source for a rank"),
        ("KVE-01", "typed batches with hashes, parents, tokens, block size, time and rank"),
        ("KVE-02", "sequence numbers strictly increase for each rank; a loss is never silent"),
        ("KVE-03", "start_sequence_number replays; no longer held is OUT_OF_RANGE"),
        ("KVE-04", "a snapshot comes first, then everything after it, without gap or double"),
        ("KVE-05", "ranks are filtered; all subscribers see the same; a slow one is ended OVERLOADED"),
        ("KVE-06", "KV events switched off are UNIMPLEMENTED with a way to switch them on"),
        ("KVE-07", "initial metadata comes at subscription, before the first event"),
        ("KVE-08", "int64 hashes are 8 bytes big-endian, strings UTF-8, bytes raw"),
    ],
    "Health, abort, and drain": [
        ("HEALTH-01", "the light check answers at once and names its checks"),
        ("HEALTH-02", "the probe runs a bounded inference, listed as inference_probe"),
        ("HEALTH-03", "an unknown model is NOT_FOUND; another role makes the role check NOT_READY"),
        ("HEALTH-04", "the state follows the engine's life: STARTING, READY, DRAINING, NOT_READY"),
        ("HEALTH-05", "grpc.health.v1 says the same, and reflection is on"),
        ("ABORT-01", "no target INVALID_ARGUMENT, unknown NOT_FOUND, finished ALREADY_FINISHED"),
        ("ABORT-02", "aborting a running request is ABORTED and ends its stream CANCELLED with usage"),
        ("ABORT-03", "all_requests ends everything"),
        ("ABORT-04", "ids are compared whole"),
        ("ABORT-05", "aborting a request ends all of its sequences"),
        ("DRAIN-01", "STARTED, IN_PROGRESS while work remains, COMPLETE, with true counts"),
        ("DRAIN-02", "with stop_accepting new work is UNAVAILABLE; without, it is served"),
        ("DRAIN-03", "a passed deadline aborts the rest, or ends the drain with an EngineError"),
        ("DRAIN-04", "concurrent drains both see the end; a cancelled call leaves the server draining"),
        ("DRAIN-05", "SIGTERM drains, then exits 0"),
    ],
    "Runtime observability": [
        ("LOAD-01", "while k requests run, running_requests is k; afterwards 0"),
        ("LOAD-02", "per-rank loads are one for each rank and add up"),
        ("LOAD-03", "used blocks are within the total, which is ModelInfo's"),
        ("LOAD-04", "the load is fresh and answered without waiting for the engine"),
        ("RTE-01", "runtime events come as the engine works; types filter; unknown types are ignored"),
        ("RTE-02", "event ids are unique, timestamps don't go back"),
        ("RTE-03", "a failure after acceptance is one terminal EngineError"),
    ],
    "Standard errors": [
        ("ERR-01", "one transport for each failure: status before acceptance, EngineError after"),
        ("ERR-02", "retry_after_ms only on retryable errors"),
        ("ERR-03", "details use the stable keys or namespaced ones"),
        ("ERR-04", "a dead engine ends every stream and makes Health NOT_READY"),
        ("ERR-05", "no message and no bytes crash the server or leave a request behind"),
        ("ERR-06", "an unexpected failure is INTERNAL and shows nothing of the server's insides"),
        ("ERR-07", "a hung engine is noticed and reported like a dead one"),
    ],
}

_UNSEEN: dict[str, str] = {
    "DISC-04": "a start-up option may set another release, and start-up is over when a client connects",
    "DISC-11": "a rule for clients; the suite itself follows it",
    "DISC-13": "the model has loaded when the suite connects",
    "ROLE-05": "decided at start-up",
    "MODEL-11": "no RPC shows the configuration that these names repeat",
    "TASK-04": "the capacity is not discoverable",
    "TASK-16": "needs a model that computes values that are not finite",
    "DRAIN-05": "needs a signal to the server's process",
    "ERR-04": "needs the engine's process to die",
    "ERR-07": "needs the engine's process to hang",
}


REQUIREMENTS: dict[str, Requirement] = {
    rule: Requirement(rule, summary, section, _UNSEEN.get(rule, ""))
    for section, rules in _CATALOGUE.items()
    for rule, summary in rules
}
"""Every requirement by its id, in the contract's order."""
