"""The embeddings client against a real HTTP server: what it sends, and what counts as no embedding."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import pytest

from gateway.cache import embeddings
from gateway.cache.embeddings import EmbeddingsClient
from tests.gateway.embeddings_server import EmbeddingsServer, embeddings_server


def client(server: EmbeddingsServer, api_key: str = "", timeout_s: float = 30.0) -> EmbeddingsClient:
    return EmbeddingsClient(server.url, "small", lambda: api_key, timeout_s)


def vector_body(*numbers: float) -> bytes:
    return json.dumps({"data": [{"index": 0, "embedding": numbers}]}).encode()


class Encoder:
    """An encoding whose embeddings wait for a gate."""

    def __init__(self) -> None:
        self.gate, self.asked = asyncio.Event(), 0

    async def embedding(self, text: str, pool: str, timeout_s: float) -> np.ndarray | None:
        self.asked += 1
        await self.gate.wait()
        return np.ones(1, np.float32)


async def test_an_own_encoder_embeds_so_many_texts_at_once_and_no_more() -> None:
    encoder: Any = Encoder()
    own = embeddings.OwnEmbeddings(encoder, lambda: "small", 30.0)
    tasks = [asyncio.create_task(own.embed("a")) for _ in range(embeddings.MAX_CONCURRENT)]
    while encoder.asked < embeddings.MAX_CONCURRENT:
        await asyncio.sleep(0)
    assert await own.embed("a") is None
    encoder.gate.set()
    assert all(vector is not None for vector in await asyncio.gather(*tasks))
    assert await own.embed("a") is not None
    await own.aclose()


async def test_a_text_becomes_a_vector_of_length_one() -> None:
    async with embeddings_server() as server:
        endpoint = client(server)
        vector = await endpoint.embed("one two two")
        await endpoint.aclose()
    expected = server.vector("one two two")
    np.testing.assert_allclose(vector, expected / np.linalg.norm(expected), rtol=1e-6)
    assert vector is not None and vector.dtype == np.float32


@pytest.mark.parametrize(("api_key", "header"), [("", None), ("secret", "Bearer secret")])
async def test_the_request_is_openais(api_key: str, header: str | None) -> None:
    async with embeddings_server() as server:
        endpoint = client(server, api_key)
        await endpoint.embed("one")
        await endpoint.aclose()
    body = {"model": "small", "input": "one", "encoding_format": "float"}
    assert server.seen == [("/v1/embeddings", header, body)]


@pytest.mark.parametrize(
    "failure",
    [
        {"status": 500},
        {"status": 307, "headers": {"location": "/v1/embeddings"}},
        {"body": b"not JSON"},
        {"body": b"[]"},
        {"body": b'{"data": []}'},
        {"body": vector_body()},
        {"body": vector_body(0.0, 0.0)},
        {"body": vector_body(1e300, 1.0)},
        {"body": b'{"data": [{"embedding": [[1.0]]}]}'},
        {"body": b'{"data": [{"embedding": "AACAPw=="}]}'},
        {"body": b" " * (embeddings.MAX_RESPONSE_BYTES + 1)},
    ],
    ids=repr,
)
@pytest.mark.filterwarnings("ignore:overflow")
async def test_a_response_without_an_embedding_gives_none(failure: dict[str, Any]) -> None:
    async with embeddings_server(**failure) as server:
        endpoint = client(server)
        assert await endpoint.embed("one") is None
        server.status, server.body = 200, None
        assert await endpoint.embed("one") is not None
        await endpoint.aclose()
        assert len(server.seen) == 2


async def test_a_slow_endpoint_gives_none_and_an_absent_one_too() -> None:
    async with embeddings_server() as server:
        server.gate.clear()
        endpoint = client(server, timeout_s=0.02)
        assert await endpoint.embed("one") is None
        await endpoint.aclose()
    endpoint = client(server)
    assert await endpoint.embed("one") is None
    await endpoint.aclose()


async def test_an_endpoint_that_fails_five_times_gets_no_requests_for_a_while() -> None:
    async with embeddings_server(status=500) as server:
        endpoint = client(server)
        assert [await endpoint.embed("one") for _ in range(20)] == [None] * 20
        await endpoint.aclose()
    assert len(server.seen) == 5


async def test_no_more_requests_are_under_way_than_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embeddings, "MAX_CONCURRENT", 3)
    async with embeddings_server() as server:
        server.gate.clear()
        endpoint = client(server)
        waiting = [asyncio.ensure_future(endpoint.embed("one")) for _ in range(3)]
        await asyncio.sleep(0)
        assert await endpoint.embed("two") is None
        waiting[0].cancel()
        await asyncio.gather(waiting[0], return_exceptions=True)
        server.gate.set()
        assert await endpoint.embed("two") is not None
        assert all(vector is not None for vector in await asyncio.gather(*waiting[1:]))
        await endpoint.aclose()
