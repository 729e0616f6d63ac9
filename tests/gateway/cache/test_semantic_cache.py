"""Who shares a response with whom, which requests bypass the cache, what is stored; over a real embeddings server."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import time
import zlib
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from contract.errors import InvalidArgument
from contract.generation import FinishReason, GenerationRequest, Guide, SamplingParams, TokenDelta
from gateway.cache import semantic_cache
from gateway.cache.response_cache import CacheControl
from gateway.cache.semantic_cache import EmbeddingsClient, Entry, SemanticCache, TenantCache, configured
from gateway.config.settings import Settings
from tests.gateway.embeddings_server import EmbeddingsServer, embeddings_server
from tests.gateway.scripted_source import words

ANSWER = tuple(words(3))
PROMPT, SIMILAR = "How do I sort a list?", "How do I sort a long list?"
GREEDY = SamplingParams(temperature=0.0)
PREFIX = "TRIDENT_GATEWAY_SEMANTIC_"


@dataclasses.dataclass
class Made:
    """A cache from settings, its embeddings server, clock and metrics."""

    cache: SemanticCache
    server: EmbeddingsServer
    clock: Any
    registry: CollectorRegistry

    async def put(self, text: Any = PROMPT, *, tenant: str = "a", engine: str = "e", **more: Any) -> bool:
        control, answer = control_of(more), more.pop("answer", ANSWER)
        return await self.cache.put(chat(text, **more), tenant, engine, answer, control)

    async def hit(self, text: Any = SIMILAR, *, tenant: str = "a", engine: str = "e", **more: Any) -> bool:
        control = control_of(more)
        return await self.cache.get(chat(text, **more), tenant, engine, control) is not None

    def counted(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"trident_gateway_semantic_cache_{name}", labels) or 0.0


def control_of(more: dict[str, Any]) -> CacheControl:
    return CacheControl.from_headers(more.pop("headers", {}))


@contextlib.asynccontextmanager
async def opened(clock: Any, **environ: str) -> AsyncIterator[Made]:
    registry = CollectorRegistry()
    async with embeddings_server() as server:
        values = {"URL": server.url, "MODEL": "small", "THRESHOLD": "0.8", "TIMEOUT_S": "30", "TTL_S": "60", **environ}
        settings = Settings.from_environment({PREFIX + name: value for name, value in values.items()})
        cache = configured(settings, clock, registry)
        assert cache is not None
        try:
            yield Made(cache, server, clock, registry)
        finally:
            await cache.aclose()


@pytest.fixture
async def made(clock: Any) -> AsyncIterator[Made]:
    async with opened(clock) as made:
        yield made


def chat(text: Any, *, system: str = "Be kind.", **more: Any) -> GenerationRequest:
    sampling = more.pop("sampling", GREEDY)
    messages = ({"role": "system", "content": system}, {"role": more.pop("role", "user"), "content": text})
    return GenerationRequest(**{"messages": messages, "sampling": sampling} | more)


async def test_a_similar_prompt_gets_the_response_with_its_similarity_and_age(made: Made) -> None:
    assert not await made.hit() and await made.put()
    made.clock.advance(12.5)
    hit = await made.cache.get(chat(SIMILAR, request_id="r", stream=False, timeout_s=3.0), "a", "e", CacheControl())
    assert hit is not None and hit.answer == ANSWER
    similarity = hit.headers.pop("x-trident-cache-similarity")
    assert hit.headers == {"x-trident-cache": "semantic", "age": "12"} and 0.8 <= float(similarity) < 1.0
    assert made.counted("lookups_total", result="hit") == made.counted("lookups_total", result="miss") == 1
    assert made.counted("entries") == 1 and made.counted("bytes") > 0 and made.counted("lookup_seconds_count") == 2


@pytest.mark.parametrize(
    "other",
    [
        {"tenant": "b"},
        {"engine": "f"},
        {"system": "Be rude."},
        {"max_tokens": 7},
        {"stop": ("x",)},
        {"guide": Guide("json")},
        {"sampling": dataclasses.replace(GREEDY, seed=1)},
        {"sampling": dataclasses.replace(GREEDY, repetition_penalty=1.1)},
    ],
)
async def test_nothing_is_shared_where_anything_but_the_last_turn_differs(made: Made, other: dict[str, Any]) -> None:
    assert await made.put() and await made.hit()
    assert not await made.hit(**other) and not await made.hit(PROMPT, **other)


async def test_an_earlier_turn_is_not_matched_by_its_meaning(made: Made) -> None:
    def told(first: str) -> GenerationRequest:
        turns = (("user", first), ("assistant", "Yes."), ("user", PROMPT))
        messages = tuple({"role": role, "content": text} for role, text in turns)
        return GenerationRequest(messages=messages, sampling=GREEDY)

    await made.cache.put(told("I use Python"), "a", "e", ANSWER, CacheControl())
    assert await made.cache.get(told("I use Python"), "a", "e", CacheControl()) is not None
    assert await made.cache.get(told("I use python"), "a", "e", CacheControl()) is None


@pytest.mark.parametrize(
    ("request_body", "reason"),
    [
        ({"headers": {"x-trident-cache": "off"}}, "header"),
        ({"headers": {"cache-control": "max-age=9, No-Store"}}, "header"),
        ({"sampling": SamplingParams()}, "sampled"),
        ({"sampling": SamplingParams(seed=3)}, "sampled"),
        ({"sampling": dataclasses.replace(GREEDY, log_probs=True)}, "prompt_in_answer"),
        ({"echo": True}, "prompt_in_answer"),
        ({"tools": "[]"}, "tools"),
        ({"messages": None, "text_input": PROMPT}, "completion"),
        ({"role": "assistant"}, "last_turn"),
        ({"text": [{"type": "text", "text": PROMPT}]}, "last_turn"),
        ({"text": " \n"}, "last_turn"),
        ({"text": "how " * 251}, "long"),
        ({"text": "How do I sort SECRET lists?"}, "rule"),
    ],
)
async def test_what_is_excluded_is_neither_stored_nor_looked_up_nor_sent_to_the_endpoint(
    clock: Any, request_body: dict[str, Any], reason: str
) -> None:
    text = request_body.pop("text", PROMPT)
    async with opened(clock, EXCLUDE=r"\bsecret\b") as made:
        assert not await made.put(text, **dict(request_body)) and not await made.hit(text, **dict(request_body))
        assert made.counted("excluded_total", reason=reason) == made.counted("lookups_total", result="excluded") == 1
        assert made.server.seen == [] and made.counted("entries") == 0


async def test_a_client_may_ask_for_a_new_response_or_one_of_some_age(made: Made) -> None:
    await made.put(headers={"cache-control": "no-cache"})
    made.clock.advance(30)
    assert not await made.hit(headers={"cache-control": "no-cache"})
    assert not await made.hit(headers={"cache-control": "private, max-age=30"})
    assert await made.hit(headers={"cache-control": "max-age=31"})


async def test_an_answer_is_good_for_its_time(made: Made) -> None:
    await made.put()
    made.clock.advance(59.9)
    assert await made.hit()
    made.clock.advance(0.1)
    assert not await made.hit()
    await made.put("What is a tuple?")
    assert made.counted("entries") == 2
    made.clock.advance(0.1)
    await made.put("What is a set?")
    assert made.counted("entries") == 2, "what is too old left"


@pytest.mark.parametrize("answer", [(), tuple(words(3, None)), (TokenDelta(finish_reason=FinishReason.CANCELLED),)])
async def test_only_a_whole_answer_is_kept(made: Made, answer: tuple[TokenDelta, ...]) -> None:
    assert not await made.put(answer=answer) and made.counted("entries") == 0


async def test_the_same_text_again_replaces_its_answer(made: Made) -> None:
    await made.put()
    await made.put(answer=ANSWER[1:])
    assert made.counted("entries") == 1
    hit = await made.cache.get(chat(SIMILAR), "a", "e", CacheControl())
    assert hit is not None and hit.answer == ANSWER[1:]


async def test_a_prompt_below_the_threshold_is_a_miss(made: Made) -> None:
    await made.put()
    assert not await made.hit("When is dinner?") and made.counted("lookups_total", result="miss") == 1


async def test_a_text_is_embedded_once_for_its_lookup_and_its_storing(made: Made) -> None:
    await made.hit(PROMPT)
    await made.put(PROMPT)
    assert len(made.server.seen) == 1
    await made.hit(PROMPT, tenant="b")
    assert len(made.server.seen) == 2, "another tenant's lookup must not be faster for it"


async def test_a_slow_endpoint_is_a_miss(clock: Any) -> None:
    async with opened(clock, TIMEOUT_S="0.01") as made:
        made.server.gate.clear()
        assert not await made.hit() and not await made.put()
        assert made.counted("lookups_total", result="unavailable") == 1


async def test_a_failing_endpoint_is_a_miss(made: Made) -> None:
    made.server.status = 503
    assert not await made.hit() and not await made.put()
    assert made.counted("lookups_total", result="unavailable") == 1 and made.counted("entries") == 0


async def test_an_endpoint_that_serves_another_model_empties_the_tenants_cache(made: Made) -> None:
    await made.put()
    made.server.dimensions = 32
    assert not await made.hit() and made.counted("lookups_total", result="miss") == 1
    await made.put("What is a tuple?")
    assert made.counted("entries") == 1 and await made.hit("What is a tuple ?")


async def test_one_tenants_flood_leaves_the_others_responses(clock: Any) -> None:
    async with opened(clock, MAX_ENTRIES="3") as made:
        await made.put(tenant="b")
        for number in range(9):
            await made.put(f"What is {number}?")
        assert await made.hit(tenant="b") and made.counted("entries") == 4


def test_the_cache_is_off_unless_an_endpoint_is_set(clock: Any) -> None:
    assert configured(Settings(), clock, CollectorRegistry()) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("URL", "localhost"),
        ("MODEL", ""),
        ("EXCLUDE", "("),
        ("THRESHOLD", "0.2"),
        ("MAX_ENTRIES", "0"),
        ("MAX_BYTES", "0"),
        ("TIMEOUT_S", "0"),
    ],
)
def test_a_setting_that_cannot_be_is_named(clock: Any, name: str, value: str) -> None:
    environ = {PREFIX + "URL": "http://127.0.0.1:1/v1", PREFIX + "MODEL": "small", PREFIX + name: value}
    with pytest.raises(InvalidArgument) as caught:
        configured(Settings.from_environment(environ), clock, CollectorRegistry())
    assert caught.value.field == PREFIX + name


def test_the_key_does_not_show_in_the_settings_text() -> None:
    assert "s3cret" not in repr(Settings(semantic_api_key="s3cret"))


def entry(text: str, scope: str, size: int, at_s: float) -> Entry:
    vector = np.zeros(8, np.float32)
    vector[zlib.crc32(text.encode()) % 8] = 1.0
    answer = (TokenDelta(text="x" * size, finish_reason=FinishReason.STOP),)
    return Entry(scope, text, vector, answer, at_s, at_s)


STEPS = st.lists(st.tuples(st.sampled_from("abcdefgh"), st.sampled_from("st"), st.integers(0, 4000)), max_size=60)


@given(STEPS, st.integers(1, 6), st.integers(1500, 9000))
def test_a_tenant_cache_keeps_within_its_bounds_and_gives_what_it_holds(
    steps: list[tuple[str, str, int]], max_entries: int, max_bytes: int
) -> None:
    cache = TenantCache(max_entries, max_bytes, 8)
    model: dict[tuple[str, str], Entry] = {}  # the least recently used first
    for at_s, (text, scope, size) in enumerate(steps):
        new = entry(text, scope, size, at_s)
        model = {place: old for place, old in model.items() if place != (scope, text) and old.stored_s >= at_s - 20}
        assert cache.add(new, at_s - 20) == (new.bytes <= max_bytes)
        if new.bytes <= max_bytes:
            while len(model) >= max_entries or sum(old.bytes for old in model.values()) + new.bytes > max_bytes:
                del model[next(iter(model))]
            model[scope, text] = new
        assert len(cache) == len(model) and cache.bytes == sum(old.bytes for old in model.values())
        for (scope_, text_), kept in model.items():
            found = cache.similar(scope_, kept.vector, 0.9)
            assert (1.0, kept) in found and all(other.scope == scope_ for _, other in found), text_


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


def cache_of(embeddings: Any) -> SemanticCache:
    return SemanticCache(embeddings, Settings.from_environment({}), time.monotonic, CollectorRegistry())


async def test_an_own_encoder_embeds_so_many_texts_at_once_and_no_more() -> None:
    encoder: Any = Encoder()
    own = cache_of(semantic_cache.OwnEmbeddings(encoder, lambda: "small", 30.0))
    tasks = [asyncio.create_task(own._embedding("s", "a")) for _ in range(semantic_cache.MAX_CONCURRENT)]
    while encoder.asked < semantic_cache.MAX_CONCURRENT:
        await asyncio.sleep(0)
    assert await own._embedding("s", "b") is None
    encoder.gate.set()
    assert all(vector is not None for vector in await asyncio.gather(*tasks))
    assert await own._embedding("s", "b") is not None
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
        {"body": b" " * (semantic_cache.MAX_RESPONSE_BYTES + 1)},
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
    monkeypatch.setattr(semantic_cache, "MAX_CONCURRENT", 3)
    async with embeddings_server() as server:
        server.gate.clear()
        endpoint = cache_of(client(server))
        waiting = [asyncio.ensure_future(endpoint._embedding("s", "one")) for _ in range(3)]
        await asyncio.sleep(0)
        assert await endpoint._embedding("s", "two") is None
        waiting[0].cancel()
        await asyncio.gather(waiting[0], return_exceptions=True)
        server.gate.set()
        assert await endpoint._embedding("s", "two") is not None
        assert all(vector is not None for vector in await asyncio.gather(*waiting[1:]))
        await endpoint.aclose()
