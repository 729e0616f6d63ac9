"""Where the semantic cache gets embeddings: an encoder of this gateway, or an OpenAI-style embeddings endpoint."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import aiohttp
import numpy as np
import orjson

from contract.errors import InvalidArgument, TridentError
from gateway.encoding import Encoding
from gateway.routing.circuit_breaker import Breaker, BreakerPolicy

MAX_CONCURRENT = 64  # texts that are being embedded; one that finds so many is not
MAX_RESPONSE_BYTES = 1024 * 1024
_BREAKER = BreakerPolicy()
_FAILURES = (asyncio.TimeoutError, aiohttp.ClientError, OSError, ValueError, LookupError, TypeError, InvalidArgument)


class Embeddings:
    """A source of embeddings."""

    _outstanding = 0

    async def embed(self, text: str) -> np.ndarray | None:
        """Return the embedding of ``text``: f32[dimensions] of length 1, or None if there is none in time."""
        if self._outstanding >= MAX_CONCURRENT:
            return None
        self._outstanding += 1
        try:
            return await self._embedded(text)
        finally:
            self._outstanding -= 1

    async def _embedded(self, text: str) -> np.ndarray | None:
        raise NotImplementedError

    async def aclose(self) -> None:
        """Close its connections."""


class OwnEmbeddings(Embeddings):
    """Embed texts with an encoder of this gateway. It costs no tenant anything.

    pool: return the pool of the encoder's model; it raises TridentError while the configuration has no such model.
    """

    def __init__(self, encoding: Encoding, pool: Callable[[], str], timeout_s: float) -> None:
        self._encoding, self._pool, self._timeout_s = encoding, pool, timeout_s

    async def _embedded(self, text: str) -> np.ndarray | None:
        try:
            return await self._encoding.embedding(text, self._pool(), self._timeout_s)
        except TridentError:
            return None


class EmbeddingsClient(Embeddings):
    """Embed texts with ``POST {url}/embeddings``. After 5 failures in a row the endpoint gets no requests for 10 s, so
    that an outage does not delay every request by the timeout.

    url: of the API, up to and with ``/v1``.
    model: sent as ``model``.
    api_key: returns what is sent as a bearer token; empty: none is sent.
    timeout_s: longest time of one request.
    """

    def __init__(self, url: str, model: str, api_key: Callable[[], str], timeout_s: float) -> None:
        self._url, self._model = f"{url.rstrip('/')}/embeddings", model
        self._api_key, self._timeout_s = api_key, timeout_s
        self._session: aiohttp.ClientSession | None = None
        self._breaker = Breaker()

    async def _embedded(self, text: str) -> np.ndarray | None:
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


def _unit_vector(body: bytes) -> np.ndarray:
    """Return the embedding of an endpoint's response, scaled to length 1.

    Raises: ValueError, LookupError or TypeError for a response that holds no usable embedding.
    """
    vector = np.asarray(orjson.loads(body)["data"][0]["embedding"], np.float32)
    length = float(np.linalg.norm(vector)) if vector.ndim == 1 else 0.0
    if not 0.0 < length < float("inf"):
        raise ValueError("embedding: must be a list of finite numbers, not all zero")
    return vector / length
