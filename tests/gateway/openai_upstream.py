"""A server that speaks OpenAI's protocol as an upstream of the gateway, and does what the test says."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from aiohttp import web


@dataclass
class OpenAIUpstream:
    """texts: the pieces of every answer, of a chat also as the fields of a delta.
    status: other than 200 refuses, with ``headers`` and ``error``, the body.
    hangs: nothing is ever answered. gap_s: between pieces.
    usage: whether it counts, or its counts. cut_after: after so many pieces the connection is dropped. broken_after:
    after so many an error event comes. more: fields of every other event."""

    texts: tuple[str | dict, ...] = (" from", " afar")
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    error: dict | None = None
    hangs: bool = False
    gap_s: float = 0.0
    usage: bool | dict = True
    cut_after: int | None = None
    broken_after: int | None = None
    more: dict = field(default_factory=dict)
    seen: list[tuple[str, dict, dict]] = field(default_factory=list)  # (path, headers in lower case, body)
    running: int = 0
    url: str = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.seen.append((request.path, {key.lower(): value for key, value in request.headers.items()}, body))
        if self.hangs:
            await asyncio.Event().wait()
        if self.status != 200:
            error = self.error or {"error": {"message": "the upstream said no", "type": "x", "code": "y"}}
            return web.json_response(error, status=self.status, headers=self.headers)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        self.running += 1
        try:
            await response.prepare(request)
            await self._play(response, "chat" in request.path, request)
        finally:
            self.running -= 1
        return response

    async def _play(self, response: web.StreamResponse, chat: bool, request: web.Request) -> None:
        async def say(event: dict) -> None:
            await response.write(b"data: %b\n\n" % json.dumps(self.more | event).encode())

        for number, text in enumerate(self.texts):
            if number == self.cut_after:
                request.transport.abort()
                return
            if number == self.broken_after:
                await say({"error": {"message": "it broke"}})
                return
            delta = text if isinstance(text, dict) else {"content": text}
            choice = {"index": 0, "delta": delta} if chat else {"index": 0, "text": text}
            await say({"choices": [{**choice, "finish_reason": None}]})
            await asyncio.sleep(self.gap_s)
        await say({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        if self.usage:
            counted = {"prompt_tokens": 7, "completion_tokens": len(self.texts)}
            await say({"choices": [], "usage": counted if self.usage is True else self.usage})
        await response.write(b": a comment\n\ndata: [DONE]\n\n")


@contextlib.asynccontextmanager
async def upstream(**script: object) -> AsyncIterator[OpenAIUpstream]:
    """One on loopback."""
    served = OpenAIUpstream(**script)
    app = web.Application()
    app.router.add_post("/v1/chat/completions", served.answer)
    app.router.add_post("/v1/completions", served.answer)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    served.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    try:
        yield served
    finally:
        await runner.cleanup()
