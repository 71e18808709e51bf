"""`openengine generate`: what it sends, what it prints, and how it ends."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import json_format

from openengine.v1 import errors_pb2, generate_pb2, kv_pb2
from openengine.v1.generate_pb2 import GenerateResponse
from tests.client.conftest import OpenEngine
from tests.client.fake import FakeServer, Status, engine_info
from tests.client.responses import USAGE, failed, finished, record, tokens

# ------------------------------------------------------------------------------------------------- text


async def test_text_goes_to_stdout_and_the_usage_line_to_stderr(
    fake: FakeServer, openengine: OpenEngine
) -> None:
    end = finished(reason=generate_pb2.FINISH_REASON_STOP, stop_match=generate_pb2.StopMatch(eos_token_id=2))
    fake.answers["Generate"] = [tokens(" Paris"), tokens("."), end]
    outcome = await openengine("generate", "The capital of France is")
    assert (outcome.code, outcome.out) == (0, " Paris.\n")
    usage, why, *times = outcome.err.rstrip().split(" · ")
    assert (usage, why) == ("4 prompt (1 cached) + 3 new tokens", "stop at the model's end")
    assert re.fullmatch(r"\d+\.\d\d s, first after \d+\.\d\d s, [\d.]+ tokens/s", ", ".join(times))
    assert fake.last("Generate").prompt == "The capital of France is"
    assert fake.last("Generate").model == "tiny"


async def test_quiet_leaves_the_usage_line_out(fake: FakeServer, openengine: OpenEngine) -> None:
    fake.answers["Generate"] = [tokens("a\n"), finished()]
    outcome = await openengine("generate", "--quiet", "hi")
    assert (outcome.out, outcome.err) == ("a\n", "")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"stop_match": generate_pb2.StopMatch(stop_text="\n\n")}, r"stop at '\n\n'"),
        ({"stop_match": generate_pb2.StopMatch(stop_token_id=9)}, "stop at token 9"),
        ({"message": "the context is full"}, "stop (the context is full)"),
    ],
)
async def test_the_usage_line_says_why_it_ended(
    fake: FakeServer, openengine: OpenEngine, fields: dict[str, Any], said: str
) -> None:
    fake.answers["Generate"] = [tokens("a"), finished(reason=generate_pb2.FINISH_REASON_STOP, **fields)]
    assert f" · {said} · " in (await openengine("generate", "hi")).err


async def test_control_characters_do_not_reach_the_terminal(fake: FakeServer, openengine: OpenEngine) -> None:
    fake.answers["Generate"] = [tokens("a\x1b[2J\r\x07\x9b\u202e\tb\n"), finished(message="\x1b]0;x")]
    outcome = await openengine("generate", "hi")
    assert outcome.out == "a\\e[2J\\r\\a\\x9b\\u202e\tb\n"
    assert "\x1b" not in outcome.err


async def test_several_outputs_come_one_after_the_other(fake: FakeServer, openengine: OpenEngine) -> None:
    fake.answers["Generate"] = [
        tokens("x", 1),
        tokens("a", 0),
        tokens("y", 1),
        finished(1, usage=None),
        tokens("b", 0),
        finished(0),
    ]
    outcome = await openengine("generate", "hi", "--n", "2")
    assert outcome.out == "[0]\nab\n[1]\nxy\n"


async def test_logprobs_are_a_line_a_token(fake: FakeServer, openengine: OpenEngine) -> None:
    candidates = [generate_pb2.LogProb(token_id=7, token="a", logprob=-0.25, rank=1)]
    scored = tokens("a", logprob=-0.25, rank=1, candidates=candidates)
    prompt = GenerateResponse(prompt=generate_pb2.PromptOutput(tokens=[record("h\n")]))
    fake.answers["Generate"] = [prompt, scored, finished()]
    outcome = await openengine("generate", "hi", "--logprobs", "1", "--prompt-logprobs", "0")
    first, second = outcome.out.splitlines()
    assert first.split() == ["7", r"'h\n'", "-"]
    assert second.split() == ["7", "'a'", "-0.2500", "#1", "'a'", "-0.2500"]


# ------------------------------------------------------------------------------------------------- JSON


async def test_json_is_one_object_a_line(fake: FakeServer, openengine: OpenEngine) -> None:
    match = generate_pb2.StopMatch(stop_text="!")
    fake.answers["Generate"] = [
        GenerateResponse(prompt=generate_pb2.PromptOutput(tokens=[record("hi")])),
        tokens("é\x1b\n", logprob=float("-inf"), rank=1),
        finished(reason=generate_pb2.FINISH_REASON_STOP, stop_match=match),
    ]
    outcome = await openengine("generate", "hi", "--request-id", "r", "--output", "json")
    hi = {"token_id": 7, "token": "hi", "candidates": []}
    text = {"token_id": 7, "token": "é\x1b\n", "logprob": "-inf", "rank": 1, "candidates": []}
    usage = {"prompt_tokens": 4, "completion_tokens": 3, "total_tokens": 7, "cached_prompt_tokens": 1}
    end = {"reason": "STOP", "message": "", "stop_match": {"stop_text": "!"}, "usage": usage}
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.records == [
        {"request_id": "r", "event": "prompt", "tokens": [hi]},
        {"request_id": "r", "event": "token", "output_index": 0, "text": "é\x1b\n", "tokens": [text]},
        {"request_id": "r", "event": "finished", "output_index": 0} | end,
    ]


async def test_json_of_a_prefill_can_be_given_to_a_decode_server(
    fake: FakeServer, openengine: OpenEngine, tmp_path: Path
) -> None:
    session = kv_pb2.KvSessionRef(session_id="s", endpoints=[kv_pb2.KvEndpoint(host="h", port=1)], dp_rank=1)
    session.attributes_struct.update({"remote_block_ids": [[1, 2]], "tp": 1})
    ready = generate_pb2.PrefillReady(kv_session=session)
    fake.answers["Generate"] = GenerateResponse(prefill_ready=ready, usage=USAGE)
    printed = await openengine("generate", "hi")
    (tmp_path / "session.json").write_text(printed.out)
    (line,) = (await openengine("generate", "hi", "--output", "json")).records
    assert line["kv_session"] == json.loads(printed.out)

    fake.answers["Generate"] = [tokens("a"), finished()]
    await openengine("generate", "hi", "--kv-session", str(tmp_path / "session.json"))
    assert fake.last("Generate").kv.session == session


# ---------------------------------------------------------------------------------------------- failures


async def test_a_rejection_is_one_line_and_exit_code_1(fake: FakeServer, openengine: OpenEngine) -> None:
    fake.answers["Generate"] = Status(grpc.StatusCode.INVALID_ARGUMENT, "sampling.top_p: 3 is not in (0, 1]")
    outcome = await openengine("generate", "hi")
    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.err == (
        "openengine: Generate rejected: INVALID_ARGUMENT: sampling.top_p: 3 is not in (0, 1]\n"
    )


async def test_a_failure_in_mid_stream_keeps_the_text_and_exits_1(
    fake: FakeServer, openengine: OpenEngine
) -> None:
    fake.answers["Generate"] = [tokens("a"), failed("line\nbreak", retryable=True, retry_after_ms=1500)]
    outcome = await openengine("generate", "hi")
    assert (outcome.code, outcome.out) == (1, "a\n")
    assert outcome.err == (
        "openengine: the request failed: UNSPECIFIED: line\\nbreak (the same request can succeed after 1.5 s)\n"
    )


async def test_a_failure_in_json_is_the_last_event_and_an_object_on_stderr(
    fake: FakeServer, openengine: OpenEngine
) -> None:
    error = failed(
        code=errors_pb2.ERROR_CODE_OVERLOADED, retryable=True, retry_after_ms=0, details={"limit": 3}
    )
    fake.answers["Generate"] = [tokens("a"), error]
    outcome = await openengine("generate", "hi", "--output", "json")
    assert outcome.code == 1
    assert outcome.failure["code"] == "OVERLOADED"
    last = outcome.records[-1]
    assert last.pop("usage")["total_tokens"] == 7
    assert last.pop("request_id").startswith("cli-")
    assert last == {
        "event": "error",
        "code": "OVERLOADED",
        "message": "out of blocks",
        "retryable": True,
        "retry_after_ms": 0,
        "details": {"limit": 3},
    }


@pytest.mark.parametrize("output", ["text", "json"])
async def test_an_aborted_request_exits_1(fake: FakeServer, openengine: OpenEngine, output: str) -> None:
    fake.answers["Generate"] = [tokens("a"), finished(reason=generate_pb2.FINISH_REASON_CANCELLED)]
    outcome = await openengine("generate", "hi", "--output", output)
    assert outcome.code == 1
    assert "cancelled" in (outcome.out + outcome.err).lower()


async def test_the_stream_has_the_deadline_of_timeout(fake: FakeServer, openengine: OpenEngine) -> None:
    fake.answers["Generate"] = [tokens("a"), 5.0, finished()]
    outcome = await openengine("generate", "hi", "--timeout", "0.2")
    assert (outcome.code, outcome.out) == (1, "a\n")
    assert outcome.err == "openengine: Generate did not end within 0.2 s (--timeout allows more)\n"


async def test_several_models_ask_for_a_choice(fake: FakeServer, openengine: OpenEngine) -> None:
    fake.answers["GetEngineInfo"] = engine_info(supported_models=["a", "b"])
    outcome = await openengine("generate", "hi")
    assert (outcome.code, outcome.err) == (2, "openengine: the server serves a, b: choose with --model\n")
    fake.answers["Generate"] = [tokens("x"), finished()]
    assert (await openengine("generate", "hi", "--model", "b")).code == 0
    assert fake.last("Generate").model == "b"


# ------------------------------------------------------------------------------------------- the request


async def sent(fake: FakeServer, openengine: OpenEngine, *arguments: str, stdin: str = "") -> dict[str, Any]:
    """Return the request that these arguments make, less what every request has."""
    fake.answers["Generate"] = lambda request: [
        finished(index, usage=None) for index in range(request.sampling.num_sequences or 1)
    ]
    outcome = await openengine("generate", *arguments, stdin=stdin)
    assert outcome.code == 0, outcome.err
    request = json_format.MessageToDict(fake.last("Generate"), preserving_proto_field_name=True)
    assert request.pop("request_id")
    assert request.pop("model") == "tiny"
    return request


async def test_what_is_not_given_is_not_set(fake: FakeServer, openengine: OpenEngine) -> None:
    assert await sent(fake, openengine, "hi") == {"prompt": "hi"}


@pytest.mark.parametrize(
    ("arguments", "field", "value"),
    [
        ("--temperature 0", "sampling", {"temperature": 0.0}),
        ("--top-p 0.5 --top-k -1 --min-p 0", "sampling", {"top_p": 0.5, "top_k": -1, "min_p": 0.0}),
        ("--frequency-penalty 1", "sampling", {"frequency_penalty": 1.0}),
        ("--presence-penalty -1", "sampling", {"presence_penalty": -1.0}),
        ("--repetition-penalty 1.5", "sampling", {"repetition_penalty": 1.5}),
        (
            "--seed 18446744073709551615 --n 2",
            "sampling",
            {"seed": "18446744073709551615", "num_sequences": 2},
        ),
        ("--max-tokens 0 --min-tokens 2", "stopping", {"max_tokens": 0, "min_tokens": 2}),
        (
            "--stop a --stop b --stop-token-id 5",
            "stopping",
            {"conditions": [{"stop_text": "a"}, {"stop_text": "b"}, {"stop_token_id": 5}]},
        ),
        ("--include-stop --ignore-eos", "stopping", {"include_stop_in_output": True, "ignore_eos": True}),
        ("--logprobs 0", "response", {"return_output_logprobs": True}),
        ("--logprobs 3", "response", {"return_output_logprobs": True, "output_candidates": {"top_n": 3}}),
        (
            "--prompt-logprobs all",
            "response",
            {"return_prompt_logprobs": True, "prompt_candidates": {"all": {}}},
        ),
        (
            "--prompt-logprobs ids:4,5 --prompt-logprob-start 0",
            "response",
            {
                "return_prompt_logprobs": True,
                "prompt_candidates": {"token_ids": {"ids": [4, 5]}},
                "prompt_logprob_start": 0,
            },
        ),
        ("--regex [ab]+", "guided", {"regex": "[ab]+"}),
        ("--choice yes --choice no", "guided", {"choice": {"choices": ["yes", "no"]}}),
        ("--json-object --guided-backend x", "guided", {"json_object": {}, "backend": "x"}),
        ('--json-schema {"type":"object"}', "guided", {"json_schema": '{"type":"object"}'}),
        ('--structural-tag {"a":1}', "guided", {"structural_tag": '{"a":1}'}),
        ("--cache-salt s", "kv", {"cache_salt": "s"}),
        (
            "--bypass-prefix-cache --data-parallel-rank 0",
            "kv",
            {"bypass_prefix_cache": True, "data_parallel_rank": 0},
        ),
        ("--lora a", "lora_name", "a"),
        ("--priority -3", "priority", -3),
        ("--metadata a=b=c --metadata d=", "metadata", {"a": "b=c", "d": ""}),
    ],
)
async def test_every_option_sets_its_field(
    fake: FakeServer, openengine: OpenEngine, arguments: str, field: str, value: object
) -> None:
    assert await sent(fake, openengine, "hi", *arguments.split()) == {"prompt": "hi", field: value}


async def test_files_are_read(fake: FakeServer, openengine: OpenEngine, tmp_path: Path) -> None:
    grammar, schema, image = tmp_path / "g.ebnf", tmp_path / "s.json", tmp_path / "i.png"
    grammar.write_text("root ::= 'a'")
    schema.write_text("true")
    image.write_bytes(b"\x89PNG")
    assert (await sent(fake, openengine, "hi", "--grammar", str(grammar)))["guided"] == {
        "ebnf_grammar": "root ::= 'a'"
    }
    assert (await sent(fake, openengine, "hi", "--json-schema", str(schema)))["guided"] == {
        "json_schema": "true"
    }
    images = ("--image", str(image), "--image", "https://h/i.png", "--image", "data:image/png;base64,AA==")
    assert (await sent(fake, openengine, "hi", *images))["media"] == [
        {"modality": "MODALITY_IMAGE", "raw_bytes": "iVBORw==", "mime_type": "image/png"},
        {"modality": "MODALITY_IMAGE", "url": "https://h/i.png"},
        {"modality": "MODALITY_IMAGE", "data_uri": "data:image/png;base64,AA=="},
    ]


async def test_the_prompt_from_standard_input_loses_one_newline(
    fake: FakeServer, openengine: OpenEngine
) -> None:
    assert await sent(fake, openengine, stdin="two\nlines\n\n") == {"prompt": "two\nlines\n"}


async def test_an_empty_prompt_is_the_servers_to_judge(fake: FakeServer, openengine: OpenEngine) -> None:
    assert await sent(fake, openengine, "") == {"prompt": ""}


@pytest.mark.parametrize("ids", ["1,2,3", "[1, 2, 3]", "1 2 3", "-"])
async def test_token_ids_instead_of_text(fake: FakeServer, openengine: OpenEngine, ids: str) -> None:
    request = await sent(fake, openengine, "--token-ids", ids, stdin="1 2\n3\n")
    assert request == {"token_ids": {"ids": [1, 2, 3]}}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["hi", "--top-p", "x"],
            "argument --top-p: invalid float value: 'x' (see `openengine generate --help`)",
        ),
        (["hi", "--regex", "a", "--choice", "b"], "argument --choice: not allowed with argument --regex"),
        (["hi", "--token-ids", "1"], "the prompt is given twice: as text and with --token-ids"),
        (["--token-ids", "no-such-file"], "--token-ids: cannot read no-such-file: No such file or directory"),
        (["--token-ids", "5000000000"], "--token-ids: 5000000000 is too large for a token id"),
        (["hi", "--max-tokens", "-1"], "argument --max-tokens: -1 is not in 0 ... 4294967295"),
        (["hi", "--seed", "-1"], "argument --seed: -1 is not in 0 ... 18446744073709551615"),
        (["hi", "--priority", "3000000000"], "argument --priority: 3000000000 is not in "),
        (["hi", "--stop-token-id", "-1"], "argument --stop-token-id: -1 is not in "),
        (["hi", "--logprobs", "many"], "--logprobs: expected a number, `all` or `ids:1,2,3`, got 'many'"),
        (["hi", "--metadata", "a"], "--metadata: expected KEY=VALUE, got 'a'"),
        (["hi", "--json-schema", "{bad"], "--json-schema: not JSON: "),
        (["hi", "--json-schema", "none.json"], "--json-schema: cannot read none.json: No such file"),
        (["hi", "--kv-session", '{"x":1}'], "--kv-session: not a KvSessionRef: "),
        (["hi", "--image", "none.png"], "--image: cannot read none.png: No such file"),
        (["hi", "--max-token", "1"], "unrecognized arguments: --max-token 1"),
    ],
)
async def test_wrong_use_is_one_line_and_exit_code_2_and_sends_nothing(
    fake: FakeServer, openengine: OpenEngine, arguments: list[str], said: str
) -> None:
    outcome = await openengine("generate", *arguments)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith(f"openengine: {said}")
    assert outcome.err.count("\n") == 1
    assert not fake.requests
