"""Responses to prompts of similar meaning, found by the cosine of their embeddings. Off unless a model is set: an
encoder of this gateway, or one behind an OpenAI-style embeddings endpoint.

Only the last user turn of a chat is compared by meaning; the rest of the request, the tenant and the engine must be
equal. A high cosine does not prove that two prompts ask the same: see docs/decisions/0011.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import aiohttp
import numpy as np
import orjson
from cachetools import LRUCache
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from contract.errors import InvalidArgument, TridentError
from contract.generation import GenerationRequest
from gateway.cache.response_cache import HEADER, Answer, CacheControl, answer_bytes, is_complete
from gateway.config.settings import Settings, variable
from gateway.encoding import Encoding
from gateway.request_key import request_key
from gateway.routing.circuit_breaker import Breaker, BreakerPolicy

MAX_CHARACTERS = 1000  # of a last turn; longer ones are documents, which one vector describes too coarsely
MAX_REMEMBERED = 1024  # embeddings kept between a lookup and the storing of its response
LOOKUP_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
MAX_CONCURRENT = 64  # texts that are being embedded; one that finds so many is not
MAX_RESPONSE_BYTES = 1024 * 1024
_BREAKER = BreakerPolicy()
_FAILURES = (asyncio.TimeoutError, aiohttp.ClientError, OSError, ValueError, LookupError, TypeError, InvalidArgument)


class Hit(NamedTuple):
    """A cached response to a similar prompt, and the headers that tell its similarity and age."""

    answer: Answer
    headers: dict[str, str]


@dataclass(eq=False)
class Entry:
    """A stored response. vector: f32[dimensions], of length 1."""

    scope: str
    text: str
    vector: np.ndarray
    answer: Answer
    stored_s: float
    used_s: float

    @property
    def bytes(self) -> int:
        return answer_bytes(self.answer) + self.vector.nbytes + 4 * len(self.text) + 1000


class TenantCache:
    """One tenant's entries, searched by cosine; the least recently used leave first. dimensions: of the vectors."""

    def __init__(self, max_entries: int, max_bytes: int, dimensions: int) -> None:
        self._max_entries, self._max_bytes, self.dimensions = max_entries, max_bytes, dimensions
        self._entries: list[Entry] = []
        self._vectors = np.empty((min(16, max_entries), dimensions), np.float32)
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def similar(self, scope: str, vector: np.ndarray, threshold: float) -> list[tuple[float, Entry]]:
        """Return (similarity, entry) of ``scope`` from ``threshold`` on, the most similar first."""
        scores = self._vectors[: len(self._entries)] @ vector
        rows = np.flatnonzero(scores >= threshold)
        rows = rows[np.argsort(-scores[rows], kind="stable")]
        return [(float(scores[row]), self._entries[row]) for row in rows if self._entries[row].scope == scope]

    def add(self, entry: Entry, expired_before_s: float) -> bool:
        """Store an entry in place of one with the same text. Returns False if it is larger than ``max_bytes``."""
        for row in range(len(self._entries) - 1, -1, -1):
            old = self._entries[row]
            if old.stored_s < expired_before_s or (old.scope == entry.scope and old.text == entry.text):
                self._remove(row)
        if entry.bytes > self._max_bytes:
            return False
        while len(self._entries) >= self._max_entries or self.bytes + entry.bytes > self._max_bytes:
            self._remove(min(range(len(self._entries)), key=lambda row: self._entries[row].used_s))
        if len(self._entries) == len(self._vectors):
            more = min(self._max_entries, 2 * len(self._vectors)) - len(self._vectors)
            self._vectors = np.concatenate([self._vectors, np.empty((more, self.dimensions), np.float32)])
        self._vectors[len(self._entries)] = entry.vector
        self._entries.append(entry)
        self.bytes += entry.bytes
        return True

    def _remove(self, row: int) -> None:
        self.bytes -= self._entries[row].bytes
        last = self._entries.pop()
        if row < len(self._entries):
            self._entries[row], self._vectors[row] = last, self._vectors[len(self._entries)]


class SemanticCache:
    """``get`` before a request is sent to an engine, ``put`` with the engine's response; neither raises. A text that
    cannot be embedded is a miss and is not stored."""

    def __init__(
        self, embeddings: Embeddings, settings: Settings, clock: Callable[[], float], registry: CollectorRegistry
    ) -> None:
        self._embeddings, self._settings, self._clock = embeddings, settings, clock
        self._embedding_now = 0
        self._exclude = re.compile(settings.semantic_exclude, re.IGNORECASE) if settings.semantic_exclude else None
        self._tenants: dict[str, TenantCache] = {}
        self._remembered: LRUCache[tuple[str, str], np.ndarray] = LRUCache(MAX_REMEMBERED)
        prefix = "trident_gateway_semantic_cache"
        self._lookups = Counter(
            f"{prefix}_lookups", "Lookups by result: hit, miss, unavailable, excluded", ("result",), registry=registry
        )
        self._excluded = Counter(
            f"{prefix}_excluded", "Requests that bypassed the cache, by reason", ("reason",), registry=registry
        )
        self._seconds = Histogram(
            f"{prefix}_lookup_seconds", "Lookup latency, the embedding included", buckets=LOOKUP_S, registry=registry
        )
        entries = Gauge(f"{prefix}_entries", "Responses held", registry=registry)
        entries.set_function(lambda: sum(map(len, self._tenants.values())))
        size = Gauge(f"{prefix}_bytes", "Bytes held", registry=registry)
        size.set_function(lambda: sum(tenant.bytes for tenant in self._tenants.values()))

    async def get(self, request: GenerationRequest, tenant: str, engine: str, control: CacheControl) -> Hit | None:
        """Return the stored response to the most similar prompt, or None."""
        reason = exclusion(request, control, self._exclude) or ("" if control.max_age_s > 0 else "header")
        if reason:
            self._excluded.labels(reason).inc()
            self._lookups.labels("excluded").inc()
            return None
        with self._seconds.time():
            scope, text = cache_scope(request, tenant, engine)
            vector = await self._embedding(scope, text)
            hit = None if vector is None else self._find(tenant, scope, vector, control.max_age_s)
        self._lookups.labels("unavailable" if vector is None else "miss" if hit is None else "hit").inc()
        return hit

    async def put(
        self, request: GenerationRequest, tenant: str, engine: str, answer: Answer, control: CacheControl
    ) -> bool:
        """Store a complete response of an engine, never a hit of this cache, which would drift from prompt to prompt.
        Return whether it was stored."""
        if not is_complete(answer) or exclusion(request, control, self._exclude):
            return False
        scope, text = cache_scope(request, tenant, engine)
        vector = await self._embedding(scope, text)
        if vector is None:
            return False
        cache = self._tenants.get(tenant)
        if cache is None or cache.dimensions != len(vector):  # the endpoint serves another model now
            bounds = self._settings.semantic_max_entries, self._settings.semantic_max_bytes
            cache = self._tenants[tenant] = TenantCache(*bounds, len(vector))
        now_s = self._clock()
        return cache.add(Entry(scope, text, vector, answer, now_s, now_s), now_s - self._settings.semantic_ttl_s)

    async def aclose(self) -> None:
        await self._embeddings.aclose()

    def _find(self, tenant: str, scope: str, vector: np.ndarray, max_age_s: float) -> Hit | None:
        cache, now_s = self._tenants.get(tenant), self._clock()
        if cache is None or cache.dimensions != len(vector):
            return None
        max_age_s = min(max_age_s, self._settings.semantic_ttl_s)
        for similarity, entry in cache.similar(scope, vector, self._settings.semantic_threshold):
            if now_s - entry.stored_s < max_age_s:
                entry.used_s = now_s
                told = {f"{HEADER}-similarity": f"{similarity:.4f}", "age": str(int(now_s - entry.stored_s))}
                return Hit(entry.answer, {HEADER: "semantic", **told})
        return None

    async def _embedding(self, scope: str, text: str) -> np.ndarray | None:
        """Return a text's embedding. It is remembered by scope, which differs by tenant: the time of a lookup tells
        nothing about another tenant."""
        vector = self._remembered.get((scope, text))
        if vector is None and self._embedding_now < MAX_CONCURRENT:
            self._embedding_now += 1
            try:
                vector = await self._embeddings.embed(text)
            finally:
                self._embedding_now -= 1
            if vector is not None:
                self._remembered[scope, text] = vector
        return vector


class OwnEmbeddings:
    """Embed texts with an encoder of this gateway, at no tenant's cost. pool: returns the pool of its model, or raises
    TridentError."""

    def __init__(self, encoding: Encoding, pool: Callable[[], str], timeout_s: float) -> None:
        self._encoding, self._pool, self._timeout_s = encoding, pool, timeout_s

    async def embed(self, text: str) -> np.ndarray | None:
        """Return the embedding of ``text``: f32[dimensions] of length 1, or None if there is none in time."""
        try:
            return await self._encoding.embedding(text, self._pool(), self._timeout_s)
        except TridentError:
            return None

    async def aclose(self) -> None:
        pass


class EmbeddingsClient:
    """Embed texts with ``POST {url}/embeddings``. After 5 failures in a row the endpoint gets no requests for 10 s, so
    that an outage does not delay every request by the timeout. api_key: returns the bearer token; "" for none."""

    def __init__(self, url: str, model: str, api_key: Callable[[], str], timeout_s: float) -> None:
        self._url, self._model = f"{url.rstrip('/')}/embeddings", model
        self._api_key, self._timeout_s = api_key, timeout_s
        self._session: aiohttp.ClientSession | None = None
        self._breaker = Breaker()

    async def embed(self, text: str) -> np.ndarray | None:
        """Return the embedding of ``text``: f32[dimensions] of length 1, or None if there is none in time."""
        now_s = time.monotonic()
        if not self._breaker.allows(now_s):
            return None
        self._breaker = self._breaker.sent(now_s)
        vector = None
        try:
            vector = _unit_vector(await asyncio.wait_for(self._post(text), self._timeout_s))
        except _FAILURES:
            pass
        except asyncio.CancelledError:
            self._breaker = self._breaker.left(time.monotonic(), now_s)
            raise
        self._breaker = self._breaker.after(vector is not None, time.monotonic(), _BREAKER, now_s)
        return vector

    async def aclose(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _post(self, text: str) -> bytes:
        if self._session is None:
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=MAX_CONCURRENT))
        body = orjson.dumps({"model": self._model, "input": text, "encoding_format": "float"})
        headers = {"content-type": "application/json"}
        if api_key := self._api_key():
            headers["authorization"] = f"Bearer {api_key}"
        # A redirect would send the text and the key to an address that is not configured.
        async with self._session.post(self._url, data=body, headers=headers, allow_redirects=False) as response:
            if response.status != 200:
                raise ValueError(f"status {response.status}")
            received = bytearray()
            async for part in response.content.iter_any():
                received += part
                if len(received) > MAX_RESPONSE_BYTES:
                    raise ValueError(f"more than {MAX_RESPONSE_BYTES} bytes")
            return bytes(received)


Embeddings = OwnEmbeddings | EmbeddingsClient


def configured(
    settings: Settings,
    clock: Callable[[], float],
    registry: CollectorRegistry,
    encoding: Encoding | None = None,
    pool: Callable[[str], str] | None = None,
) -> SemanticCache | None:
    """Return the cache that the settings describe, None without a model. encoding, pool: serve the model where no URL
    is set; ``pool`` returns the pool of a model, or raises."""
    if not settings.semantic_model:
        return None
    model, timeout_s = settings.semantic_model, settings.semantic_timeout_s
    embeddings: Embeddings
    if settings.semantic_url:
        api_key = functools.partial(settings.secret, "semantic_api_key")
        embeddings = EmbeddingsClient(settings.semantic_url, model, api_key, timeout_s)
    else:
        assert encoding is not None and pool is not None
        found = functools.partial(pool, model)
        try:
            found()
        except TridentError as error:
            problem = f"must be a model with embeddings where SEMANTIC_URL is unset, got {model!r}: {error}"
            raise InvalidArgument(variable("semantic_model"), problem) from error
        embeddings = OwnEmbeddings(encoding, found, timeout_s)
    return SemanticCache(embeddings, settings, clock, registry)


def exclusion(request: GenerationRequest, control: CacheControl, exclude: re.Pattern[str] | None) -> str:
    """Return why a request bypasses the cache, as a metric label; empty if it does not."""
    if not control.enabled:
        return "header"
    if not request.sampling.greedy:
        return "sampled"
    if not request.messages:
        return "completion"  # it continues the exact words of its prompt
    if request.tools:
        return "tools"  # the arguments of a call follow the exact words
    if request.sampling.log_probs or request.echo:
        return "prompt_in_answer"
    last = request.messages[-1]
    text = last.get("content")
    if last.get("role") != "user" or not isinstance(text, str) or not text.strip():
        return "last_turn"
    if len(text) > MAX_CHARACTERS:
        return "long"
    if exclude is not None and exclude.search(text):
        return "rule"
    return ""


def cache_scope(request: GenerationRequest, tenant: str, engine: str) -> tuple[str, str]:
    """Return (a key of everything that must be equal, the text that is compared by meaning)."""
    assert request.messages
    *earlier, last = request.messages
    rest = dataclasses.replace(request, messages=(*earlier, {**last, "content": ""}))
    return request_key(rest, tenant, engine), last["content"]


def _unit_vector(body: bytes) -> np.ndarray:
    """Return the embedding of an endpoint's response, scaled to length 1. Raises: ValueError, LookupError or TypeError
    for a response that holds no usable embedding."""
    vector = np.asarray(orjson.loads(body)["data"][0]["embedding"], np.float32)
    length = float(np.linalg.norm(vector)) if vector.ndim == 1 else 0.0
    if not 0.0 < length < float("inf"):
        raise ValueError("embedding: must be a list of finite numbers, not all zero")
    return vector / length
