"""What Prometheus reads of the KV plane."""

from __future__ import annotations

import asyncio
import socket
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from openengine.v1 import kv_pb2
from openengine_adapters import metrics
from openengine_adapters.engine import StartupError
from tests.core.conftest import until
from tests.core.kv.test_reference import generate, reference


async def scrape(port: int) -> dict[tuple[str, str], float]:
    """Every sample, by its name and rank."""

    def get() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as response:
            return str(response.read(), "utf-8")

    families = text_string_to_metric_families(await asyncio.to_thread(get))
    return {
        (sample.name, sample.labels["data_parallel_rank"]): sample.value
        for family in families
        for sample in family.samples
    }


async def test_counters_follow_what_the_engine_stores() -> None:
    async with reference(kv_events=True, data_parallel_size=2) as (_, kv):
        with metrics.serving("127.0.0.1", 0, kv.servicer.kv.stats) as port:
            before = await scrape(port)
            assert before["openengine_kv_stored_blocks_total", "1"] == 0
            await generate(kv, "r", [7] * 64, 1, data_parallel_rank=1)
            stats = kv.servicer.kv.stats()[1]
            await until(lambda: stats.stored_blocks > 0)
            after = await scrape(port)
    assert after["openengine_kv_stored_blocks_total", "1"] == stats.stored_blocks
    assert after["openengine_kv_stored_blocks_total", "0"] == 0
    assert after["openengine_kv_index_blocks", "1"] == stats.blocks
    assert after["openengine_kv_index_complete", "1"] == 1
    assert (
        after["openengine_kv_next_sequence_number", "1"] > before["openengine_kv_next_sequence_number", "1"]
    )
    assert after["openengine_kv_gaps_total", "1"] == 0


async def test_subscribers_are_counted_while_they_are_there() -> None:
    async with reference(kv_events=True) as (_, kv):
        with metrics.serving("127.0.0.1", 0, kv.servicer.kv.stats) as port:
            call = kv.stub.SubscribeKvEvents(kv_pb2.SubscribeKvEventsRequest())
            await call.initial_metadata()
            subscribed = await scrape(port)
            call.cancel()
            await until(lambda: kv.servicer.kv.stats()[0].subscribers == 0)
            left = await scrape(port)
    assert subscribed["openengine_kv_subscribers", "0"] == 1
    assert left["openengine_kv_subscribers", "0"] == 0


async def test_without_kv_events_there_is_nothing_to_count() -> None:
    async with reference(kv_events=False) as (_, kv):
        with metrics.serving("127.0.0.1", 0, kv.servicer.kv.stats) as port:
            assert await scrape(port) == {}


def test_a_port_in_use_is_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        reason = f"--metrics-port {port}: .*in use; choose another port"
        with pytest.raises(StartupError, match=reason), metrics.serving("127.0.0.1", port, list):
            pass
