"""Streams to a gateway over both protocols, which count how they end."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

import aiohttp

from clients import AsyncClient
from clients.wire.retries import NO_RETRY

PROMPT, TOKENS = "The cat", 120


class Load:
    """Streams over both protocols without a pause. ended: streams that ended in full. failed: how others ended."""

    def __init__(self) -> None:
        self.ended, self.failed = 0, []

    @contextlib.asynccontextmanager
    async def running(self, http_port: int, grpc_port: int, streams: int = 4) -> AsyncIterator[None]:
        stop = asyncio.Event()
        async with (
            aiohttp.ClientSession(f"http://127.0.0.1:{http_port}") as http,
            AsyncClient(f"127.0.0.1:{grpc_port}", retry=NO_RETRY) as grpc,
        ):
            kinds = [lambda: self._over_http(http), lambda: self._over_grpc(grpc)]
            tasks = [asyncio.create_task(self._repeat(kind, stop)) for kind in kinds * streams]
            try:
                yield
            finally:
                stop.set()
                await asyncio.gather(*tasks)

    async def _repeat(self, stream, stop: asyncio.Event) -> None:
        while not stop.is_set():
            try:
                reason = await stream()
            except Exception as error:
                reason = repr(error)
            if reason == "length":
                self.ended += 1
            else:
                self.failed.append(reason)

    async def _over_http(self, http: aiohttp.ClientSession) -> str:
        body = {"model": "demo", "prompt": PROMPT, "max_tokens": TOKENS, "stream": True, "ignore_eos": True}
        reason = "no end"
        async with http.post("/v1/completions", json=body) as answer:
            async for line in answer.content:
                event = json.loads(line[6:]) if line.startswith(b"data: {") else {}
                if "error" in event or answer.status != 200:
                    return str(line)
                for choice in event.get("choices", ()):
                    reason = choice["finish_reason"] or reason
        return reason

    async def _over_grpc(self, grpc: AsyncClient) -> str:
        completion = await grpc.generate(PROMPT, max_tokens=TOKENS, ignore_eos=True).complete()
        assert completion.usage.output_tokens == TOKENS
        return completion.finish_reason.value
