"""An OpenAI-style embeddings server on loopback that embeds a text by the words in it."""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from aiohttp import web


@dataclass
class EmbeddingsServer:
    """Texts that share words have similar vectors, so that the order and the number of other words do not matter.

    status: other than 200 is answered with an error. body: is answered in place of an embedding. gate: responses wait
    for it. dimensions: of the vectors.
    """

    status: int = 200
    body: bytes | None = None
    dimensions: int = 64
    headers: dict[str, str] = field(default_factory=dict)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    seen: list[tuple[str, str | None, dict[str, Any]]] = field(default_factory=list)  # (path, authorization, body)
    url: str = ""

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.seen.append((request.path, request.headers.get("authorization"), body))
        await self.gate.wait()
        if self.status != 200:
            return web.json_response({"error": {"message": "no"}}, status=self.status, headers=self.headers)
        if self.body is not None:
            return web.Response(body=self.body, content_type="application/json")
        return web.json_response({"data": [{"index": 0, "embedding": self.vector(body["input"]).tolist()}]})

    def vector(self, text: str) -> np.ndarray:
        words = text.lower().replace("?", "").split()
        places = [zlib.crc32(word.encode()) % self.dimensions for word in words]
        return np.bincount(places, minlength=self.dimensions).astype(np.float32)


@contextlib.asynccontextmanager
async def embeddings_server(**values: Any) -> AsyncIterator[EmbeddingsServer]:
    server = EmbeddingsServer(**values)
    server.gate.set()
    app = web.Application()
    app.router.add_post("/v1/embeddings", server.answer)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    try:
        yield server
    finally:
        server.gate.set()
        await runner.cleanup()
