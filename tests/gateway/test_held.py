"""Requests to a pool that is scaled to zero: held, told so, counted, and served when a replica is there."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from clients import AsyncClient
from contract.errors import Unavailable
from tests.fakes.replica import FakeReplica
from tests.gateway.running import Running, gateway

BODY = {"model": "demo", "prompt": "one two three", "max_tokens": 3}
HELD = "x-trident-held"


def config(hold_s: float = 60.0) -> str:
    return f'[pools.""]\nscale_to_zero = true\nhold_s = {hold_s}\n'


def scaled_to_zero(replica: FakeReplica, hold_s: float = 60.0):
    """A gateway whose only replica is not there yet."""
    replica.ready = False
    return gateway(replica, config=config(hold_s), probe_interval_s=0.02)


async def waiting(running: Running, count: int = 1) -> None:
    while running.service.admission.waiting != count:
        await asyncio.sleep(0.005)


pytestmark = pytest.mark.slow  # meets a gateway on the wire


async def test_a_stream_begins_at_once_and_has_its_tokens_when_a_replica_is_there():
    async with FakeReplica() as replica, scaled_to_zero(replica) as running, aiohttp.ClientSession() as http:
        assert (await running.get("/health/ready"))[0] == 200  # or nobody would send what wakes it
        async with http.post(f"{running.base_url}/v1/completions", json={**BODY, "stream": True}) as answer:
            assert answer.status == 200 and answer.headers[HELD] == "60"
            assert await answer.content.readline() == b": waiting\n"
            await waiting(running)
            page = await running.metrics()
            labels = '{pool="",priority="1",state="queued"}'
            assert page[f"trident_gateway_pool_backlog_tokens{labels}"] >= 3
            assert page['trident_gateway_pool_arrived_tokens_total{pool=""}'] >= 3
            assert not replica.seen
            replica.ready = True
            text = (await answer.content.read()).decode()
        assert "[DONE]" in text and "error" not in text and len(replica.seen) == 1
        status, headers, _ = await running.post("/v1/completions", BODY)
        assert status == 200 and HELD not in headers
        assert running.service.admission.slots().idle


async def test_a_whole_answer_says_that_it_was_held():
    async with FakeReplica() as replica, scaled_to_zero(replica) as running:
        answers = [asyncio.create_task(running.post("/v1/completions", BODY)) for _ in range(3)]
        await waiting(running, 3)
        replica.ready = True
        for status, headers, body in await asyncio.gather(*answers):
            assert status == 200 and headers[HELD] == "60" and body["usage"]["completion_tokens"] == 3


async def test_without_a_replica_in_time_the_caller_gets_an_error():
    async with FakeReplica() as replica, scaled_to_zero(replica, hold_s=0.2) as running:
        status, headers, body = await running.post("/v1/completions", BODY)
        assert status == 504 and "retry-after" in headers and "until its time was up" in body["error"]["message"]
        async with aiohttp.ClientSession() as http:
            async with http.post(f"{running.base_url}/v1/completions", json={**BODY, "stream": True}) as answer:
                assert answer.status == 200 and "until its time was up" in await answer.text()
        assert running.service.admission.slots().idle


async def test_a_caller_who_leaves_is_not_waited_for():
    async with FakeReplica() as replica, scaled_to_zero(replica) as running:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(running.post("/v1/completions", {**BODY, "stream": True}), 0.2)
        await waiting(running, 0)
        replica.ready = True
        status, _, _ = await running.post("/v1/completions", BODY)
        assert status == 200 and len(replica.seen) == 1


async def test_a_gateway_that_stops_tells_held_requests_at_once():
    async with FakeReplica() as replica, scaled_to_zero(replica) as running, AsyncClient(running.grpc_url) as client:
        whole, stream = (
            asyncio.create_task(asyncio.wait_for(call, 60))
            for call in (running.post("/v1/completions", BODY), events(running))
        )
        tensors = asyncio.create_task(client.complete("one two three", max_tokens=3))
        await waiting(running, 3)
        assert await running.service.drain(30.0) == 0
        status, headers, body = await whole
        assert status == 503 and headers["retry-after"] == "1" and "no replica" in body["error"]["message"]
        assert "the gateway is stopping" in await stream
        with pytest.raises(Unavailable, match="the gateway is stopping"):
            await tensors
        assert running.service.admission.slots().idle and not replica.seen


async def events(running: Running) -> str:
    async with aiohttp.ClientSession() as http:
        async with http.post(f"{running.base_url}/v1/completions", json={**BODY, "stream": True}) as answer:
            return await answer.text()


async def test_requests_over_grpc_are_held_too():
    async with FakeReplica() as replica, scaled_to_zero(replica) as running:
        async with AsyncClient(running.grpc_url) as client:
            held = asyncio.create_task(client.complete("one two three", max_tokens=3))
            await waiting(running)
            replica.ready = True
            assert (await held).usage.output_tokens == 3


async def test_a_model_whose_pool_is_at_zero_is_waited_for():
    async with FakeReplica() as replica:
        replica.ready = False
        file = '[pools.rare]\nscale_to_zero = true\nweight = 1.0\n[models.small]\npools = ["rare"]\n'
        async with gateway(
            config=file, replicas=f"rare={replica.url}", metrics_urls={}, probe_interval_s=0.02
        ) as running:
            held = asyncio.create_task(running.post("/v1/completions", {**BODY, "model": "small"}))
            await waiting(running)
            replica.ready = True
            status, headers, _ = await held
            assert status == 200 and headers[HELD] == "300" and headers["x-trident-model"] == "small"


async def test_other_pools_refuse_at_once():
    replica = FakeReplica()
    replica.ready = False
    async with replica, gateway(replica) as running:
        status, headers, _ = await running.post("/v1/completions", BODY)
        assert status == 503 and HELD not in headers
        assert (await running.get("/health/ready"))[0] == 503
