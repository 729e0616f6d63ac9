"""Cancelling streams under load, against a scripted replica; the whole command runs in tests/end_to_end."""

import asyncio
import http.server
import threading

import pytest

from benchmarks import cancel
from benchmarks.measurement import ServerUnderTest
from clients import NO_RETRY, AsyncClient
from contract.errors import EngineFailed, InvalidArgument, PromptTooLong
from contract.generation import FinishReason
from tests.fakes.replica import Script


async def test_running_streams_are_filled_to_the_count_and_cancelled(replica):
    server = replica(lambda seen: Script(("a",) * 1000, FinishReason.LENGTH, gap_s=0.01))
    async with AsyncClient(server.url, retry=NO_RETRY) as client:
        streams = cancel.RunningStreams(client, 1000)
        await streams.fill(3)
        assert len(streams.running) == 3 and streams.done == 0
        await streams.cancel_all()
        assert not streams.running and streams.done == 3
    async with asyncio.timeout(60):
        while server.counts.cancelled < 3:
            await asyncio.sleep(0.01)


async def test_a_stream_that_is_refused_ends_the_measurement(replica):
    server = replica(lambda seen: Script(refuse=PromptTooLong("prompt", "is too long")))
    async with AsyncClient(server.url, retry=NO_RETRY) as client:
        with pytest.raises(PromptTooLong):
            await cancel.RunningStreams(client, 1000).fill(2)


@pytest.fixture
def metrics():
    """``metrics(text)`` serves one page of metrics and returns its URL."""
    servers = []

    def serve(text):
        class Page(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(200)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_):
                pass

        servers.append(http.server.HTTPServer(("127.0.0.1", 0), Page))
        threading.Thread(target=servers[-1].serve_forever, args=(0.01,), daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}/metrics"

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


GAUGES = """nv_trt_llm_request_metrics{request_type="max"} 64
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="max"} 100
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="tokens_per"} 32
"""


@pytest.mark.parametrize(("max_tokens", "expected"), [(10, 64), (200, 14)])
def test_the_capacity_is_that_of_slots_or_of_kv_blocks(metrics, max_tokens, expected):
    server = ServerUnderTest("127.0.0.1:1", metrics(GAUGES))
    assert cancel.capacity(server, max_tokens) == expected


def test_streams_for_which_the_cache_has_no_room_are_refused(metrics):
    with pytest.raises(InvalidArgument, match="max_tokens: must be at most 31.., as many as the KV cache holds"):
        cancel.capacity(ServerUnderTest("127.0.0.1:1", metrics(GAUGES)), 3200)


def test_a_server_without_these_gauges_is_named(metrics):
    with pytest.raises(EngineFailed, match="no gauges of slots and KV blocks"):
        cancel.capacity(ServerUnderTest("127.0.0.1:1", metrics("up 1\n")), 10)


def test_a_server_whose_metrics_are_not_known_is_refused():
    with pytest.raises(InvalidArgument, match="metrics_url: must be given"):
        cancel.capacity(ServerUnderTest("10.0.0.1:8001"), 10)
