r"""Send each request through a prefill server and a decode server, over nothing but the contract.

Start a server of each role, then ask through both:

    openengine-vllm --model Qwen/Qwen3-0.6B --port 50051 \
        --kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_producer"}' &
    openengine-vllm --model Qwen/Qwen3-0.6B --port 50052 \
        --kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_consumer"}' &
    python examples/disagg_router.py 127.0.0.1:50051 127.0.0.1:50052 "The capital of France is"

`Router` knows no engine: the session passes through it unread. An engine whose two sides work at the same time
answers the first leg as soon as the second may come, so that the order is the same for all.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator

import grpc

from openengine.v1 import discovery_pb2, generate_pb2, kv_pb2, lifecycle_pb2, model_pb2
from openengine.v1.service_pb2_grpc import OpenEngineStub

ABORT_S = 5.0


class PrefillFailed(Exception):
    """The prefill server ended an accepted request with an EngineError, which `error` is."""

    def __init__(self, response: generate_pb2.GenerateResponse) -> None:
        super().__init__(response.error.message)
        self.error = response.error


class Router:
    """One prefill and one decode server, as one aggregated server."""

    def __init__(self, prefill: grpc.aio.Channel, decode: grpc.aio.Channel) -> None:
        self._prefill = OpenEngineStub(prefill)
        self._decode = OpenEngineStub(decode)
        self._takes = model_pb2.GenerationCapabilities()

    async def start(self) -> str:
        """Learn what the prefill server takes, and return the model's name."""
        request = model_pb2.GetModelInfoRequest(model=await self._model())
        info = await self._prefill.GetModelInfo(request)
        self._takes = info.generation
        return str(info.served_model_name)

    async def generate(
        self, request: generate_pb2.GenerateRequest
    ) -> AsyncGenerator[generate_pb2.GenerateResponse, None]:
        """The responses of both legs, without the hand-over between them. Raises what the servers refuse."""
        session: kv_pb2.KvSessionRef | None = None
        done = False
        try:
            async for response in self._prefill.Generate(self._first_leg(request)):
                match response.WhichOneof("event"):
                    case "prefill_ready":
                        session = response.prefill_ready.kv_session
                    case "error":
                        raise PrefillFailed(response)
                    case _:
                        yield response  # the prompt's log-probabilities
            if session is not None:
                async for response in self._decode.Generate(self._second_leg(request, session)):
                    yield response
                done = True
        finally:
            if session is not None and not done:
                await self._abort(session)

    def _first_leg(self, request: generate_pb2.GenerateRequest) -> generate_pb2.GenerateRequest:
        """What the prefill server has no use for stays behind; one that draws the first token says so by taking it."""
        leg = generate_pb2.GenerateRequest()
        leg.CopyFrom(request)
        if not self._takes.guided_decoding.supported:
            leg.ClearField("guided")
        if not self._takes.output_logprobs.supported:
            leg.response.ClearField("return_output_logprobs")
            leg.response.ClearField("output_candidates")
        return leg

    def _second_leg(
        self, request: generate_pb2.GenerateRequest, session: kv_pb2.KvSessionRef
    ) -> generate_pb2.GenerateRequest:
        """The same request with the session; the prompt's log-probabilities came with the first leg."""
        leg = generate_pb2.GenerateRequest()
        leg.CopyFrom(request)
        leg.kv.session.CopyFrom(session)
        for field in ("return_prompt_logprobs", "prompt_candidates", "prompt_logprob_start"):
            leg.response.ClearField(field)
        return leg

    async def _abort(self, session: kv_pb2.KvSessionRef) -> None:
        """Nobody will come for the session: its blocks need not wait for their time-out."""
        request = lifecycle_pb2.AbortRequest(kv_session=session)
        with contextlib.suppress(grpc.RpcError):
            await self._prefill.Abort(request, timeout=ABORT_S)

    async def _model(self) -> str:
        info = await self._prefill.GetEngineInfo(discovery_pb2.GetEngineInfoRequest())
        return str(info.supported_models[0])


async def ask(prefill: str, decode: str, prompt: str, max_tokens: int) -> None:
    """Stream one greedy answer to the terminal, and say what the decode server did not have to compute."""
    async with grpc.aio.insecure_channel(prefill) as one, grpc.aio.insecure_channel(decode) as other:
        router = Router(one, other)
        request = generate_pb2.GenerateRequest(
            request_id=uuid.uuid4().hex,
            model=await router.start(),
            prompt=prompt,
            sampling=generate_pb2.SamplingParams(temperature=0.0),
            stopping=generate_pb2.StoppingOptions(max_tokens=max_tokens),
        )
        async with contextlib.aclosing(router.generate(request)) as responses:
            async for response in responses:
                print(response.token.text, end="", flush=True)
                if response.HasField("error"):
                    raise SystemExit(response.error.message)
        usage = response.usage
        print(
            f"\n[{usage.prompt_tokens} prompt tokens, {usage.cached_prompt_tokens} of them handed over; "
            f"{usage.completion_tokens} generated]"
        )


def main() -> None:
    """Ask through the two servers of the command line."""
    parser = argparse.ArgumentParser(description="Ask a prefill and a decode server as if they were one.")
    parser.add_argument("prefill", metavar="PREFILL_HOST:PORT")
    parser.add_argument("decode", metavar="DECODE_HOST:PORT")
    parser.add_argument("prompt")
    parser.add_argument("--max-tokens", type=int, default=24)
    chosen = parser.parse_args()
    asyncio.run(ask(chosen.prefill, chosen.decode, chosen.prompt, chosen.max_tokens))


if __name__ == "__main__":
    main()
