"""The semantic cache over the OpenAI endpoint: off, then on."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from tests.fakes.encoder_replica import EncoderReplica
from tests.fakes.replica import FakeReplica, Script, SeenRequest
from tests.gateway.config.test_configuration import ALICE, BOB, keys
from tests.gateway.embeddings_server import embeddings_server
from tests.gateway.running import Running, gateway, until
from tests.gateway.test_encoding import config

CHAT, ENGINE = "/v1/chat/completions", "e" * 64
TABLE = """
[models.demo]
pools = [""]
[models.vectors]
pools = ["small"]
aliases = ["alias"]
"""
PROMPT, AGAIN = "How is a list sorted", "How is a long list sorted"


def numbered() -> Callable[[SeenRequest], Script]:
    """Another text at every call."""
    calls: list[SeenRequest] = []

    def script(seen: SeenRequest) -> Script:
        calls.append(seen)
        return Script((f" call-{len(calls)}", " and", " more"))

    return script


@pytest.fixture
async def on() -> AsyncIterator[dict[str, Any]]:
    """Settings with an embeddings server."""
    async with embeddings_server() as server:
        settings = {"semantic_url": server.url, "semantic_model": "small", "semantic_threshold": 0.7}
        yield {**settings, "semantic_timeout_s": 60.0}


async def complete_chat(running: Running, text: str, key: str = "", **headers: str) -> tuple[dict[str, str], str]:
    body = {"model": "demo", "messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 4}
    if key:
        headers["authorization"] = f"Bearer {key}"
    status, found, answer = await running.post(CHAT, body, **headers)
    assert status == 200, answer
    return found, answer["choices"][0]["message"]["content"]


async def kept(running: Running, answers: int) -> None:
    """An answer is kept a moment after it was given."""
    cache = running.service.metrics.registry
    await until(lambda: cache.get_sample_value("trident_gateway_semantic_cache_entries") == answers)


async def test_a_similar_prompt_is_answered_without_the_engine_and_says_so(on: dict[str, Any]) -> None:
    async with FakeReplica(numbered(), engine=ENGINE) as replica, gateway(replica, **on) as running:
        headers, first = await complete_chat(running, PROMPT)
        assert headers["x-trident-cache"] == "miss"
        await kept(running, 1)
        headers, again = await complete_chat(running, AGAIN)
        assert headers["x-trident-cache"] == "semantic" and again == first
        assert 0.7 <= float(headers["x-trident-cache-similarity"]) <= 1 and headers["age"].isdigit()
        assert replica.counts.started == 1
        for refused in ({"x_trident_cache": "off"}, {"cache_control": "no-store"}):
            headers, other = await complete_chat(running, AGAIN, **refused)
            assert "x-trident-cache-similarity" not in headers and other != first
        headers, near = await complete_chat(running, "Where is Hamburg")
        assert headers["x-trident-cache"] == "miss" and near != first
        page = await running.metrics()
        assert page['trident_gateway_semantic_cache_lookups_total{result="hit"}'] == 1


@pytest.mark.parametrize("name", ["small", "alias"])
async def test_an_encoder_of_this_gateway_serves_it_without_any_url(name: str) -> None:
    settings: dict[str, Any] = {"semantic_model": name, "semantic_threshold": 0.7, "semantic_timeout_s": 60.0}
    async with EncoderReplica() as encoder, FakeReplica(numbered(), engine=ENGINE) as replica:
        file = config(encoder, more=TABLE if name == "alias" else "")
        async with gateway(replica, config=file, **settings) as running:
            await until(lambda: bool(running.service.replicas.ready_in("small")))
            _, first = await complete_chat(running, PROMPT)
            await kept(running, 1)
            headers, again = await complete_chat(running, AGAIN)
            assert headers["x-trident-cache"] == "semantic" and again == first
            assert replica.counts.started == 1


async def test_it_is_off_unless_an_endpoint_is_set() -> None:
    async with FakeReplica(numbered(), engine=ENGINE) as replica, gateway(replica) as running:
        await complete_chat(running, PROMPT)
        headers, _ = await complete_chat(running, AGAIN)
        assert headers["x-trident-cache"] == "miss" and replica.counts.started == 2
        assert not [name for name in await running.metrics() if "semantic_cache" in name]


async def test_no_tenant_gets_anothers_answer(on: dict[str, Any]) -> None:
    async with FakeReplica(numbered(), engine=ENGINE) as replica:
        async with gateway(replica, config=keys(ALICE, BOB), **on) as running:
            _, alices = await complete_chat(running, PROMPT, ALICE)
            await kept(running, 1)
            headers, bobs = await complete_chat(running, AGAIN, BOB)
            assert headers["x-trident-cache"] == "miss" and bobs != alices
            headers, again = await complete_chat(running, AGAIN, ALICE)
            assert headers["x-trident-cache"] == "semantic" and again == alices
