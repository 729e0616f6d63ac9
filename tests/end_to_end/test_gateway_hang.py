"""A gateway in front of two real servers, one of which is stopped: its requests are served by the other."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from server.replica import Replica, running
from tests.gateway.api.test_kserve import ours
from tests.gateway.running import gateway, until

REQUEST = {"model": "demo", "prompt": "def add(a, b):", "max_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def other(engine_dir) -> Iterator[Replica]:
    """The second server; it asks no canaries, and its watchdog leaves a stopped process alone."""
    with running("demo", canary_interval_s=3600, stall_s=3600) as server:
        yield server


async def test_requests_at_a_stopped_server_are_served_by_the_other(replica: Replica, other: Replica):
    urls = {one.grpc_url: one.metrics_url for one in (replica, other)}
    settings = {
        "replicas": ",".join(urls),
        "metrics_urls": urls,
        "routing": "round_robin",
        "first_token_timeout_s": 2.0,
        "probe_interval_s": 600.0,
        "config": "[reuse]\ncoalesce = false\ncache_bytes = 0",
    }
    async with gateway(**settings) as served, ours(served) as client:
        await until(lambda: len(served.service.replicas.ready()) == 2)
        status, _, body = await served.post("/v1/completions", REQUEST)
        expected = body["choices"][0]["text"]
        assert status == 200 and expected
        pid = replica.server_pid
        os.kill(pid, signal.SIGSTOP)
        try:
            answers = await asyncio.gather(*(served.post("/v1/completions", REQUEST) for _ in range(4)))
            assert [body["choices"][0]["text"] for _, _, body in answers] == [expected] * 4
            done = await asyncio.gather(
                *(client.generate(REQUEST["prompt"], max_tokens=8, temperature=0.0).complete() for _ in range(4))
            )
            assert [one.text for one in done] == [expected] * 4
            page = await served.metrics()
            assert page["trident_gateway_retries_total"] >= 1
        finally:
            os.kill(pid, signal.SIGCONT)
        await until(lambda: not served.service.live)
