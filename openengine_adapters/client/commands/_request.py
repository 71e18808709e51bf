"""The options of `openengine generate`, and the request they make."""

from __future__ import annotations

import argparse
import json
import mimetypes
import re
import sys
import uuid
from pathlib import Path
from typing import Any

from google.protobuf import json_format

from openengine.v1 import generate_pb2, inputs_pb2, kv_pb2
from openengine_adapters.client.arguments import UsageError, int32, uint32, uint64
from openengine_adapters.client.commands._common import read_file


def add_request_arguments(parser: argparse.ArgumentParser) -> None:
    """Every option of the contract's GenerateRequest."""
    add = parser.add_argument_group("request").add_argument
    add(
        "prompt",
        nargs="?",
        help="the text to continue (default: standard input, less one newline at its end)",
    )
    add(
        "--token-ids",
        metavar="IDS",
        help="the prompt as token ids: 1,2,3 or a file of them, - for standard input",
    )
    add("--model", default="", help="which model (default: the server's only one)")
    add("--request-id", default="", metavar="ID", help="an id to abort it by (default: a random one)")
    add("--lora", default="", metavar="NAME", help="a loaded LoRA adapter")
    add(
        "--image", action="append", default=[], metavar="FILE|URL", help="an image, in order; may be repeated"
    )
    add("--priority", type=int32, help="larger runs earlier")
    add("--metadata", action="append", default=[], metavar="KEY=VALUE", help="carried along; may be repeated")

    add = parser.add_argument_group("sampling; what is not given is the engine's default").add_argument
    add("--temperature", type=float, help="0 always takes the likeliest token")
    add("--top-p", type=float, help="only the likeliest tokens that make up this probability")
    add("--top-k", type=int32, help="only so many of the likeliest tokens")
    add("--min-p", type=float, help="only tokens at least so likely, relative to the likeliest")
    add("--frequency-penalty", type=float, help="against tokens, by how often they came")
    add("--presence-penalty", type=float, help="against tokens that came at all")
    add("--repetition-penalty", type=float, help="against tokens of prompt and output; 1 is none")
    add("--seed", type=uint64, help="the same seed, the same output")
    add("--n", type=uint32, help="how many outputs")

    add = parser.add_argument_group("end of the output").add_argument
    add("--max-tokens", type=uint32, help="at most so many tokens each (default: what the context holds)")
    add("--min-tokens", type=uint32, help="no end before so many tokens")
    add("--stop", action="append", default=[], metavar="TEXT", help="end at this text; may be repeated")
    add(
        "--stop-token-id",
        action="append",
        default=[],
        type=uint32,
        metavar="ID",
        help="end at this token; may be repeated",
    )
    add("--include-stop", action="store_true", default=None, help="leave the matched stop in the output")
    add("--ignore-eos", action="store_true", default=None, help="go on past the model's own end")

    add = parser.add_argument_group("log-probabilities").add_argument
    selection = "N best candidates, `all`, or the candidates `ids:1,2,3`"
    add("--logprobs", metavar="N", help=f"of the output's tokens, with the {selection}")
    add("--prompt-logprobs", metavar="N", help=f"of the prompt's tokens, with the {selection}")
    add("--prompt-logprob-start", type=uint32, metavar="POSITION", help="the first prompt token to report")

    group = parser.add_argument_group("guided output; one of these")
    add = group.add_mutually_exclusive_group().add_argument
    add("--json-schema", metavar="FILE|JSON", help="JSON of this schema")
    add("--json-object", action="store_true", help="any JSON object")
    add("--regex", metavar="PATTERN", help="text that matches as a whole")
    add("--grammar", metavar="FILE", help="text of this EBNF grammar")
    add("--choice", action="append", metavar="TEXT", help="one of these texts; repeat for each")
    add("--structural-tag", metavar="FILE|JSON", help="free text with parts of a structure")
    group.add_argument("--guided-backend", default="", metavar="NAME", help="which of the engine's backends")

    add = parser.add_argument_group("KV cache").add_argument
    add("--cache-salt", metavar="SALT", help="share cached prefixes only under the same salt")
    add("--bypass-prefix-cache", action="store_true", default=None, help="compute the whole prompt anew")
    add("--data-parallel-rank", type=uint32, metavar="RANK", help="run on this rank")
    add("--kv-session", metavar="FILE|JSON", help="a prefill server's hand-off, for a decode server")


def build_request(args: argparse.Namespace) -> generate_pb2.GenerateRequest:
    """Return the request without its model; only what was asked for is set. Raises `UsageError`."""
    request = generate_pb2.GenerateRequest(
        request_id=args.request_id or f"cli-{uuid.uuid4().hex}",
        lora_name=args.lora,
        priority=args.priority,
        metadata=dict(pair(item) for item in args.metadata),
        media=[image(source) for source in args.image],
    )
    if args.token_ids is not None:
        if args.prompt is not None:
            raise UsageError("the prompt is given twice: as text and with --token-ids")
        request.token_ids.ids.extend(token_ids(args.token_ids, "--token-ids"))
    else:
        request.prompt = _prompt(args.prompt)
    _set_groups(request, args)
    return request


def _set_groups(request: generate_pb2.GenerateRequest, args: argparse.Namespace) -> None:
    """Fill the option groups; a group without a value stays absent."""
    sampling = ("temperature", "top_p", "top_k", "min_p", "seed")
    penalties = ("frequency_penalty", "presence_penalty", "repetition_penalty")
    values: dict[str, Any] = {name: getattr(args, name) for name in (*sampling, *penalties)}
    _set(request, "sampling", values | {"num_sequences": args.n})

    conditions = [generate_pb2.StopCondition(stop_text=text) for text in args.stop]
    conditions += [generate_pb2.StopCondition(stop_token_id=token) for token in args.stop_token_id]
    stopping = {
        "max_tokens": args.max_tokens,
        "min_tokens": args.min_tokens,
        "conditions": conditions or None,
        "ignore_eos": args.ignore_eos,
        "include_stop_in_output": args.include_stop,
    }
    _set(request, "stopping", stopping)

    response = {
        "return_output_logprobs": args.logprobs is not None or None,
        "output_candidates": _candidates(args.logprobs, "--logprobs"),
        "return_prompt_logprobs": args.prompt_logprobs is not None or None,
        "prompt_candidates": _candidates(args.prompt_logprobs, "--prompt-logprobs"),
        "prompt_logprob_start": args.prompt_logprob_start,
    }
    _set(request, "response", response)

    kv = {
        "session": _session(args.kv_session),
        "data_parallel_rank": args.data_parallel_rank,
        "bypass_prefix_cache": args.bypass_prefix_cache,
        "cache_salt": args.cache_salt,
    }
    _set(request, "kv", kv)

    guided = {
        "json_schema": _json(args.json_schema, "--json-schema"),
        "regex": args.regex,
        "ebnf_grammar": None if args.grammar is None else read_file(args.grammar, "--grammar"),
        "structural_tag": _json(args.structural_tag, "--structural-tag"),
        "choice": generate_pb2.ChoiceConstraint(choices=args.choice) if args.choice else None,
        "json_object": generate_pb2.JsonObjectConstraint() if args.json_object else None,
        "backend": args.guided_backend or None,
    }
    _set(request, "guided", guided)


def _set(request: generate_pb2.GenerateRequest, group: str, values: dict[str, Any]) -> None:
    given = {name: value for name, value in values.items() if value is not None}
    if given:
        message = getattr(request, group)
        message.CopyFrom(type(message)(**given))


def _prompt(text: str | None) -> str:
    if text is not None:
        return text
    if sys.stdin.isatty():
        sys.stderr.write("openengine: type the prompt, end it with Ctrl-D\n")
    return read_file("-", "the prompt").removesuffix("\n")


def token_ids(text: str, option: str) -> list[int]:
    """Return ids given in place, as `1,2,3`, or in a file. Raises `UsageError`."""
    if not re.match(r"[\s\d,\[\]]+$", text):
        text = read_file(text, option)
    try:
        ids = [int(word) for word in re.split(r"[\s,\[\]]+", text) if word]
    except ValueError:
        raise UsageError(f"{option}: token ids are whole numbers, as in 1,2,3") from None
    if any(token >= 1 << 32 for token in ids):
        raise UsageError(f"{option}: {max(ids)} is too large for a token id")
    return ids


def _candidates(text: str | None, option: str) -> generate_pb2.CandidateTokenSelection | None:
    match text:
        case None | "0":
            return None
        case "all":
            return generate_pb2.CandidateTokenSelection(all=generate_pb2.AllCandidates())
        case str() if text.startswith("ids:"):
            ids = inputs_pb2.TokenIds(ids=token_ids(text.removeprefix("ids:"), option))
            return generate_pb2.CandidateTokenSelection(token_ids=ids)
        case str() if text.isdecimal():
            return generate_pb2.CandidateTokenSelection(top_n=int(text))
    raise UsageError(f"{option}: expected a number, `all` or `ids:1,2,3`, got {text!r}")


def _json(text: str | None, option: str) -> str | None:
    """Return JSON given in place or as a file's name, after a look that it is JSON."""
    if text is None:
        return None
    if not text.lstrip().startswith("{"):
        text = read_file(text, option)
    try:
        json.loads(text)
    except ValueError as error:
        raise UsageError(f"{option}: not JSON: {error}") from None
    return text


def _session(text: str | None) -> kv_pb2.KvSessionRef | None:
    document = _json(text, "--kv-session")
    if document is None:
        return None
    try:
        return json_format.Parse(document, kv_pb2.KvSessionRef())
    except json_format.ParseError as error:
        raise UsageError(f"--kv-session: not a KvSessionRef: {error}") from None


def image(source: str) -> inputs_pb2.MediaItem:
    """Return an image from a file, a URL or a data URI. Raises `UsageError`."""
    item = inputs_pb2.MediaItem(modality=inputs_pb2.MODALITY_IMAGE)
    if source.startswith("data:"):
        item.data_uri = source
    elif source.startswith(("http://", "https://")):
        item.url = source
    else:
        try:
            item.raw_bytes = Path(source).read_bytes()
        except OSError as error:
            raise UsageError(f"--image: cannot read {source}: {error.strerror}") from None
        item.mime_type = mimetypes.guess_type(source)[0] or ""
    return item


def pair(text: str) -> tuple[str, str]:
    """Return the key and value of --metadata. Raises `UsageError`."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise UsageError(f"--metadata: expected KEY=VALUE, got {text!r}")
    return key, value
