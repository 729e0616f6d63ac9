"""The gateway as a process: what signals do to it, and how it says that it cannot start."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from tests.fakes.replica import FakeReplica, Script
from tests.gateway.running import until

pytestmark = pytest.mark.slow

TOKENS = 40
ASKED = {"model": "demo", "prompt": "x", "max_tokens": TOKENS, "stream": True}


@contextlib.asynccontextmanager
async def process(replica: FakeReplica, **settings: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """The process, and the URL of its HTTP door."""
    named = {"HTTP_PORT": "0", "GRPC_PORT": "0", "METRICS_PORT": "0", "DEEP_PROBES": "false", "REPLICAS": replica.url}
    environ = os.environ | {f"TRIDENT_GATEWAY_{name}": value for name, value in (named | settings).items()}
    started = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gateway", env=environ, cwd=Path(__file__).parents[2], stdout=-1, stderr=-1
    )
    try:
        words = (await asyncio.wait_for(started.stdout.readline(), 60.0)).split()
        yield started, f"http://{words[1].decode()}" if words[:1] == [b"http"] else ""
    finally:
        if started.returncode is None:
            started.kill()
            await started.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
async def test_a_signal_ends_it_when_the_streams_have_ended(number: signal.Signals):
    async with FakeReplica(lambda seen: Script((" a",) * TOKENS, gap_s=0.02)) as replica:
        async with process(replica) as (gateway, url), aiohttp.ClientSession() as session:
            async with session.post(f"{url}/v1/completions", json=ASKED) as answer:
                await until(lambda: replica.counts.running == 1, 60.0)
                gateway.send_signal(number)
                text = await answer.text()
            assert text.count('"text":" a"') == TOKENS and text.endswith("data: [DONE]\n\n")
            assert await asyncio.wait_for(gateway.wait(), 60.0) == 0


async def test_a_second_signal_ends_the_streams_at_once_and_they_hear_why():
    async with FakeReplica(lambda seen: Script((" a", " b"), stall_after=1)) as replica:
        async with process(replica, DRAIN_S="600") as (gateway, url), aiohttp.ClientSession() as session:
            async with session.post(f"{url}/v1/completions", json=ASKED) as answer:
                await until(lambda: replica.counts.running == 1, 60.0)
                gateway.send_signal(signal.SIGTERM)
                while await ready(session, url):
                    await asyncio.sleep(0.01)
                gateway.send_signal(signal.SIGTERM)
                assert "the gateway is stopping" in await answer.text()
            assert await asyncio.wait_for(gateway.wait(), 60.0) == 0


async def ready(session: aiohttp.ClientSession, url: str) -> bool:
    async with session.get(f"{url}/health/ready") as answer:
        return answer.status == 200


@pytest.mark.parametrize("door", ["HTTP_PORT", "GRPC_PORT"])
async def test_a_port_that_is_taken_is_named(door: str):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        async with FakeReplica() as replica:
            async with process(replica, **{door: str(taken.getsockname()[1])}) as (gateway, _):
                said = (await asyncio.wait_for(gateway.stderr.read(), 60.0)).decode()
                assert await gateway.wait() == 2
    assert f"error: TRIDENT_GATEWAY_{door}: cannot listen at 127.0.0.1" in said and "Traceback" not in said
