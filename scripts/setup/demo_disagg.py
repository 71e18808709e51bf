# SPDX-License-Identifier: Apache-2.0
"""What `make demo-disagg` shows: a prefill and a decode server answer one request together.

The same request goes to an aggregated server first; then the pair must give the same tokens, without the decode server
computing the prompt. Each command is printed before it is run. Usage: demo_disagg.py [vllm|sglang]
"""

from __future__ import annotations

import asyncio
import shlex
import signal
import sys
import uuid
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import grpc

from examples.disagg_router import Router
from openengine.v1 import generate_pb2
from openengine.v1.service_pb2_grpc import OpenEngineStub
from tests.support import cpu_env
from tests.support.pairs import pair_flags
from tests.support.server import Server, ServerFailed

PROMPT = (
    " ".join(["The history of France is long, and its cities are old."] * 12) + " The capital of France is"
)
TOKENS = 24


def start(engine: str, flags: list[str], env: dict[str, str]) -> Server:
    """Start a server and show how."""
    server = Server(engine, flags, env)
    print("$ export " + " ".join(f"{name}={shlex.quote(value)}" for name, value in server.env.items()))
    print(f"$ {shlex.join(server.command)} &", flush=True)
    server.start()
    return server


def question(model: str) -> generate_pb2.GenerateRequest:
    """A greedy request with a prompt of some length."""
    return generate_pb2.GenerateRequest(
        request_id=uuid.uuid4().hex,
        model=model,
        prompt=PROMPT,
        sampling=generate_pb2.SamplingParams(temperature=0.0),
        stopping=generate_pb2.StoppingOptions(max_tokens=TOKENS),
    )


async def show(responses: object) -> tuple[str, generate_pb2.Usage]:
    """Print an answer as it comes, and return it."""
    text, usage = "", generate_pb2.Usage()
    async for response in responses:  # type: ignore[attr-defined]  # a gRPC call, or the router's generator
        if response.HasField("error"):
            raise ServerFailed(response.error.message)
        text += response.token.text
        usage = response.usage
        print(response.token.text, end="", flush=True)
    print(
        f"\n  ({usage.prompt_tokens} prompt tokens, {usage.cached_prompt_tokens} of them not computed here, "
        f"{usage.completion_tokens} generated)\n",
        flush=True,
    )
    return text, usage


async def aggregated(target: str, model: str) -> tuple[str, generate_pb2.Usage]:
    """Ask one server."""
    async with grpc.aio.insecure_channel(target) as channel:
        return await show(OpenEngineStub(channel).Generate(question(model)))


async def disaggregated(prefill: str, decode: str, model: str) -> tuple[str, generate_pb2.Usage]:
    """Ask through both."""
    async with grpc.aio.insecure_channel(prefill) as one, grpc.aio.insecure_channel(decode) as other:
        router = Router(one, other)
        await router.start()
        return await show(router.generate(question(model)))


def run(engine: str) -> int:
    """Run the demo with one engine and return its exit status."""
    model = str(cpu_env.model(cpu_env.SMOLLM2))
    servers = []
    status = 1
    try:
        print("A server that does both:")
        servers.append(start(engine, cpu_env.flags(engine, cpu_env.SMOLLM2), cpu_env.env(engine)))
        print(f"  (READY after {servers[-1].wait_ready():.0f} s)\n", flush=True)
        expected, _ = asyncio.run(aggregated(servers[0].target, model))
        servers[0].stop()

        print("A server for the prompt, and one for the answer:")
        servers += [
            start(engine, [*cpu_env.flags(engine, cpu_env.SMOLLM2), *flags], {**cpu_env.env(engine), **env})
            for flags, env in pair_flags(engine)
        ]
        print(f"  (READY after {max(server.wait_ready() for server in servers[1:]):.0f} s)\n", flush=True)
        text, usage = asyncio.run(disaggregated(servers[1].target, servers[2].target, model))
        right = text == expected
        print(f"the same answer: {_yes(right)}")
        if engine == "vllm":  # SGLang does not count what came from elsewhere
            handed_over = usage.cached_prompt_tokens >= usage.prompt_tokens - 1
            print(f"without computing the prompt again: {_yes(handed_over)}")
            right = right and handed_over
        status = 0 if right else 1
    except ServerFailed as error:
        print(f"demo-disagg: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        status = 128 + signal.SIGINT
    finally:
        for server in servers:
            server.stop()
    if status == 0:
        for server in servers:
            server.log.unlink()
    else:
        print(
            "demo-disagg: the logs are " + ", ".join(str(server.log) for server in servers), file=sys.stderr
        )
    return status


def _yes(fact: bool) -> str:
    return "yes" if fact else "NO"


def main(arguments: list[str]) -> int:
    """Run the demo."""
    # `kill` ends the demo as Ctrl-C does: with the servers stopped.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if len(arguments) > 1 or arguments not in (["vllm"], ["sglang"], []):
        print(__doc__, file=sys.stderr)
        return 2
    return run(arguments[0] if arguments else "vllm")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
