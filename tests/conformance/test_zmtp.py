# SPDX-License-Identifier: Apache-2.0
"""The small ZMQ subscriber against the real library."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import zmq
import zmq.asyncio

from openengine_conformance.zmtp import NotZmq, subscribe


@pytest.fixture
def context() -> Iterator[zmq.asyncio.Context]:
    context = zmq.asyncio.Context()
    yield context
    context.destroy(linger=0)


async def test_it_reads_what_is_published_under_its_topic(context: zmq.asyncio.Context) -> None:
    publisher = context.socket(zmq.XPUB)
    port = publisher.bind_to_random_port("tcp://127.0.0.1")
    async with asyncio.timeout(10), subscribe("127.0.0.1", port, "kv") as subscriber:
        assert await publisher.recv() == b"\x01kv"
        await publisher.send_multipart([b"other", b"nothing"])
        await publisher.send_multipart([b"kv@rank", b"\x00" * 8, b"x" * 100_000])
        assert await subscriber.message() == [b"kv@rank", b"\x00" * 8, b"x" * 100_000]


async def test_another_server_is_told_apart() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n" + b"\r\n" * 40)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server, asyncio.timeout(10):
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(NotZmq):
            async with subscribe("127.0.0.1", port, ""):
                pass
