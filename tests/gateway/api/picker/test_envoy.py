"""A real Envoy asks the picker, as examples/envoy.yaml sets it up, for requests of OpenAI's and Triton's clients."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import grpc.aio
import openai
import pytest
from tritonclient.grpc import aio as triton

from clients import NO_RETRY, AsyncClient
from tests.fakes.replica import FakeReplica
from tests.gateway.api.picker import envoys
from tests.gateway.api.picker.endpoints import Pool, pool
from tests.gateway.api.test_kserve import inputs
from tests.gateway.config.test_configuration import ALICE, keys
from tests.gateway.running import gateway, until

pytestmark = pytest.mark.slow
COMPLETION = {"model": "demo", "prompt": "one two", "max_tokens": 8}
TOKENS = 'trident_gateway_tokens_total{direction="%s",source="engine",tenant="%s"}'


@contextlib.asynccontextmanager
async def asked(
    folder: Path, running: Pool, change: Callable[[dict[str, Any]], None] = lambda table: None
) -> AsyncIterator[str]:
    """An Envoy that knows all endpoints of the pool."""
    async with envoys.envoy(folder, running.running.picker_url, running.urls, change) as url:
        yield url


async def post(url: str, body: Any = None, path: str = "/v1/completions", **headers: str) -> tuple[int, dict, Any]:
    named = {key.replace("_", "-"): value for key, value in headers.items()}
    async with aiohttp.ClientSession() as session:
        async with session.post(f"http://{url}{path}", json=body or COMPLETION, headers=named) as answer:
            text = await answer.text()
            parsed = json.loads(text) if text.startswith("{") else text
            return answer.status, {key.lower(): value for key, value in answer.headers.items()}, parsed


def by_header(table: dict[str, Any]) -> None:
    """Has Envoy send the header x-test-subset as the subset hint, as a gateway's pools are sent."""
    rule = {
        "header": "x-test-subset",
        "on_header_present": {
            "metadata_namespace": "envoy.lb.subset_hint",
            "key": "x-gateway-destination-endpoint-subset",
            "type": "STRING",
        },
        "remove": True,
    }
    kind = "type.googleapis.com/envoy.extensions.filters.http.header_to_metadata.v3.Config"
    hint = {"name": "hint", "typed_config": {"@type": kind, "request_rules": [rule]}}
    envoys.http_filters(table).insert(0, hint)


def idle(running: Pool) -> bool:
    service = running.running.service
    return not service.live and not service.admission.running and not any(running.outstanding())


async def test_requests_go_where_the_picker_says_and_their_tokens_are_charged(tmp_path):
    async with pool(2) as running, asked(tmp_path, running) as url:
        for endpoint in running.endpoints:
            endpoint.held.clear()
        requests = []
        for number in range(1, 5):
            requests.append(asyncio.ensure_future(post(url, x_gateway_destination_endpoint="10.9.9.9:1")))
            await until(lambda number=number: sum(running.outstanding()) == number or requests[-1].done())
            assert not requests[-1].done(), requests[-1].result()
        assert running.outstanding() == [2, 2]
        for endpoint in running.endpoints:
            endpoint.held.set()
        for status, _, body in await asyncio.gather(*requests):
            assert status == 200 and json.loads(body["body"]) == COMPLETION
        assert [len(endpoint.seen) for endpoint in running.endpoints] == [2, 2]
        await until(lambda: idle(running))
        metrics = await running.running.metrics()
        assert (metrics[TOKENS % ("input", "anonymous")], metrics[TOKENS % ("output", "anonymous")]) == (12, 16)


async def test_a_large_body_arrives_as_it_was_sent(tmp_path):
    async with pool(1) as running, asked(tmp_path, running) as url:
        sent = {**COMPLETION, "prompt": "long " * 100_000}
        status, _, _ = await post(url, sent)
        assert status == 200 and json.loads(running.endpoints[0].seen[-1]["body"]) == sent


async def test_a_body_without_a_length_is_read_to_its_end(tmp_path):
    async def parts() -> AsyncIterator[bytes]:
        for part in (b'{"model": "demo", ', b'"prompt": "x", ', b'"max_tokens": 3}'):
            yield part
            await asyncio.sleep(0.02)

    async with pool(1) as running, asked(tmp_path, running) as url, aiohttp.ClientSession() as session:
        headers = {"content-type": "application/json"}
        async with session.post(f"http://{url}/v1/completions", data=parts(), headers=headers) as answer:
            assert answer.status == 200
        assert json.loads(running.endpoints[0].seen[-1]["body"]) == {"model": "demo", "prompt": "x", "max_tokens": 3}


async def test_a_picker_that_dies_ends_the_streams_it_knows(tmp_path):
    async with contextlib.AsyncExitStack() as stack:
        running = await stack.enter_async_context(pool(1))
        url = await stack.enter_async_context(asked(tmp_path, running))
        running.endpoints[0].held.clear()
        request = asyncio.ensure_future(post(url))
        await until(lambda: bool(running.endpoints[0].seen))
        await running.running.service.drain(0.0)
        status, _, _ = await request
        assert status == 503
        running.endpoints[0].held.set()


async def test_a_subset_is_kept_to_and_without_one_it_is_503(tmp_path):
    async with pool(3) as running, asked(tmp_path, running, by_header) as url:
        for endpoint in running.endpoints:
            status, _, body = await post(url, x_test_subset=f"{endpoint.url},10.9.9.9:1")
            assert (status, body["endpoint"]) == (200, endpoint.url)
        status, headers, body = await post(url, x_test_subset="10.9.9.9:1")
        assert (status, headers["retry-after"], body["error"]["code"]) == (503, "1", "unavailable")


async def test_fallbacks_are_tried_and_the_one_that_served_is_told_back(tmp_path):
    async with pool(2) as running, asked(tmp_path, running) as url:
        first, second = running.endpoints
        await first.stop()
        second.held.clear()
        requests = [asyncio.ensure_future(post(url)) for _ in range(4)]
        await until(lambda: len(second.seen) == 4)
        second.held.set()
        for status, _, body in await asyncio.gather(*requests):
            assert (status, body["endpoint"]) == (200, second.url)
        await until(lambda: idle(running))
        blamed = {each.url: each.breaker.failures for each in running.running.service.replicas.all()}
        assert blamed[running.replicas[0].url] > 0 and blamed[running.replicas[1].url] == 0


async def test_over_budget_is_429_with_retry_after(tmp_path):
    config = keys(ALICE, limits="tokens_per_minute = 60\nburst_tokens = 60")
    async with pool(1, config=config) as running, asked(tmp_path, running) as url:
        big = {**COMPLETION, "max_tokens": 30}
        running.endpoints[0].held.clear()
        first = asyncio.ensure_future(post(url, big, authorization=f"Bearer {ALICE}"))
        await until(lambda: len(running.endpoints[0].seen) == 1)
        status, headers, body = await post(url, big, authorization=f"Bearer {ALICE}")
        assert status == 429 and int(headers["retry-after"]) >= 1 and body["error"]["type"] == "rate_limit_error"
        running.endpoints[0].held.set()
        status, headers, _ = await first
        assert status == 200 and headers["x-ratelimit-limit-tokens"] == "60"
        assert (await post(url))[0] == 401


async def test_a_request_waits_for_a_slot_for_longer_than_a_message_may(tmp_path):
    def hasty(table: dict[str, Any]) -> None:
        envoys.http_filters(table)[0]["typed_config"]["message_timeout"] = "2s"

    config = "[admission]\nmax_running = 1\n"
    async with pool(1, config=config) as running, asked(tmp_path, running, hasty) as url:
        [endpoint] = running.endpoints
        endpoint.held.clear()
        requests = [asyncio.ensure_future(post(url)) for _ in range(3)]
        await until(lambda: running.running.service.admission.waiting == 2)
        await until(lambda: bool(endpoint.seen))
        await asyncio.sleep(2.5)
        assert len(endpoint.seen) == 1
        endpoint.held.set()
        assert [status for status, _, _ in await asyncio.gather(*requests)] == [200, 200, 200]


async def test_a_caller_that_leaves_releases_everything(tmp_path):
    async with pool(1) as running, asked(tmp_path, running) as url:
        running.endpoints[0].held.clear()
        leaving = asyncio.ensure_future(post(url))
        await until(lambda: len(running.endpoints[0].seen) == 1)
        leaving.cancel()
        await until(lambda: idle(running))
        running.endpoints[0].held.set()


async def test_shortened_requests_reach_the_endpoint_shortened(tmp_path):
    config = "[degradation]\nshorter_at = 0.01\noverflow_at = 0.9\nrefuse_at = 0.95\nmax_tokens = 4\n"
    async with pool(1, config=config, max_in_flight=10) as running, asked(tmp_path, running) as url:
        [endpoint] = running.endpoints
        endpoint.held.clear()
        requests = [asyncio.ensure_future(post(url, {**COMPLETION, "max_tokens": 64})) for _ in range(2)]
        await until(lambda: len(endpoint.seen) == 2)
        endpoint.held.set()
        answers = await asyncio.gather(*requests)
        assert json.loads(endpoint.seen[1]["body"])["max_tokens"] < 64
        assert any("x-trident-degraded" in headers for _, headers, _ in answers)


async def test_openais_client_streams_from_a_gateway_beside_each_replica(tmp_path):
    async with contextlib.AsyncExitStack() as stack:
        replicas = [await stack.enter_async_context(FakeReplica()) for _ in range(2)]
        beside = [await stack.enter_async_context(gateway(replica)) for replica in replicas]
        named = {each.url: f"127.0.0.1:{own.port}" for each, own in zip(replicas, beside, strict=True)}
        running = await stack.enter_async_context(gateway(*replicas, picker_port=0, picker_endpoints=named))
        url = await stack.enter_async_context(envoys.envoy(tmp_path, running.picker_url, [*named.values()]))
        client = await stack.enter_async_context(openai.AsyncOpenAI(base_url=f"http://{url}/v1", api_key="none"))
        for _ in range(3):
            stream = await client.chat.completions.create(
                model="demo", messages=[{"role": "user", "content": "a b"}], max_tokens=6, stream=True
            )
            text = "".join([event.choices[0].delta.content or "" async for event in stream if event.choices])
            assert len(text.split()) == 6
        assert {model.id async for model in client.models.list()} == {"demo"}
        await until(lambda: not running.service.live)
        assert (await running.metrics())[TOKENS % ("output", "anonymous")] >= 18
        assert sum(replica.counts.finished for replica in replicas) == 3


async def test_tritons_grpc_client_streams_from_the_replicas(tmp_path):
    async with pool(2) as running, asked(tmp_path, running) as url:
        for replica in running.replicas:
            replica.packed = True
        async with AsyncClient(url, model="ensemble_packed", retry=NO_RETRY) as ours:
            assert (await ours.generate("one two", max_tokens=3).complete()).text == " one two one"
        await until(lambda: idle(running))
        assert (await running.running.metrics())[TOKENS % ("output", "anonymous")] == 3

        async def requests() -> AsyncIterator[dict[str, Any]]:
            for number in range(2):
                yield {"model_name": "ensemble", "inputs": inputs("one two", 3), "request_id": f"r{number}"}

        async with triton.InferenceServerClient(url) as client:
            assert await client.is_server_ready()
            words = []
            async for result, error in client.stream_infer(requests()):
                assert error is None
                words.append(result.as_numpy("text_output").flatten()[0].decode())
        assert len(words) == 6
        await until(lambda: idle(running))
        assert sum(replica.counts.finished for replica in running.replicas) == 3
        assert (await running.running.metrics())[TOKENS % ("output", "anonymous")] == 9  # of all requests


async def test_a_grpc_request_is_refused_with_a_grpc_status(tmp_path):
    async with pool(0) as running, asked(tmp_path, running) as url:

        async def requests() -> AsyncIterator[dict[str, Any]]:
            yield {"model_name": "ensemble", "inputs": inputs("one two", 3)}

        async with triton.InferenceServerClient(url) as client:
            with pytest.raises(grpc.aio.AioRpcError, match="no endpoint is ready"):
                async for _ in client.stream_infer(requests()):
                    pass
