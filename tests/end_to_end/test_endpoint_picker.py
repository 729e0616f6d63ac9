"""A real Envoy in front of the real server, asked where each request goes: all three forms of requests."""

from __future__ import annotations

import json

import aiohttp
import openai
import pytest

from clients import AsyncClient
from server.replica import Replica
from tests.gateway.api.picker import envoys
from tests.gateway.running import gateway, until

pytestmark = pytest.mark.end_to_end
PROMPT, TOKENS = "def fibonacci(n):", 12


async def test_every_form_of_request_streams_through_envoy_and_is_charged(replica: Replica, tmp_path):
    metrics = {replica.grpc_url: replica.metrics_url}
    ports = {"picker_port": 0, "picker_http_port": int(replica.http_url.rpartition(":")[2])}
    where = {"replicas": replica.grpc_url, "metrics_urls": metrics}
    async with gateway(**where) as beside:
        async with gateway(**where, **ports, picker_openai_port=beside.port) as running:
            urls = [replica.grpc_url, replica.http_url.removeprefix("http://"), f"127.0.0.1:{beside.port}"]
            async with envoys.envoy(tmp_path, running.picker_url, urls) as url:
                texts = [await over_grpc(url), await over_generate_stream(url), await over_openai(url)]
            assert texts[0] and texts == [texts[0]] * 3
            await until(lambda: not running.service.live)
            charged = 'trident_gateway_tokens_total{direction="output",source="engine",tenant="anonymous"}'
            assert (await running.metrics())[charged] == 3 * TOKENS
            assert [each.work.outstanding for each in running.service.replicas.all()] == [0]


async def over_grpc(url: str) -> str:
    async with AsyncClient(url, model="ensemble_packed") as client:
        return (await client.generate(PROMPT, max_tokens=TOKENS, temperature=0.0, ignore_eos=True).complete()).text


async def over_generate_stream(url: str) -> str:
    body = {"text_input": PROMPT, "max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True, "stream": True}
    async with aiohttp.ClientSession() as session:
        async with session.post(f"http://{url}/v2/models/ensemble/generate_stream", json=body) as answer:
            assert answer.status == 200, await answer.text()
            events = [line async for line in answer.content if line.startswith(b"data:")]
    return "".join(json.loads(event[5:])["text_output"] for event in events)


async def over_openai(url: str) -> str:
    async with openai.AsyncOpenAI(base_url=f"http://{url}/v1", api_key="none") as client:
        stream = await client.completions.create(
            model="demo",
            prompt=PROMPT,
            max_tokens=TOKENS,
            temperature=0.0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        return "".join([event.choices[0].text async for event in stream if event.choices])
