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
    """Streams over both protocols without a pause, of greedy text that must be the same whoever makes it.

    tokens: of each stream. pause_s: between two streams of a task.
    ended: streams that ended in full, with the text of the first. failed: how others ended.
    """

    def __init__(self, tokens: int = TOKENS) -> None:
        self.tokens, self.pause_s = tokens, 0.0
        self.ended, self.failed, self.text = 0, [], ""

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
                reason, text = await stream()
            except Exception as error:
                reason, text = repr(error), ""
            self.text = self.text or text
            if reason == "length" and text == self.text:
                self.ended += 1
            else:
                self.failed.append(reason if reason != "length" else f"{text!r} instead of {self.text!r}")
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(stop.wait(), self.pause_s)

    async def _over_http(self, http: aiohttp.ClientSession) -> tuple[str, str]:
        body = {
            "model": "demo", "prompt": PROMPT, "max_tokens": self.tokens, "stream": True, "ignore_eos": True,
            "temperature": 0,
        }  # fmt: skip
        reason, text = "no end", ""
        async with http.post("/v1/completions", json=body) as answer:
            if answer.status != 200:
                return await answer.text(), ""
            async for line in answer.content:
                event = json.loads(line[6:]) if line.startswith(b"data: {") else {}
                if "error" in event:
                    return str(line), ""
                for choice in event.get("choices", ()):
                    reason = choice["finish_reason"] or reason
                    text += choice["text"]
        return reason, text

    async def _over_grpc(self, grpc: AsyncClient) -> tuple[str, str]:
        completion = await grpc.generate(PROMPT, max_tokens=self.tokens, ignore_eos=True, temperature=0).complete()
        assert completion.usage.output_tokens == self.tokens
        return completion.finish_reason.value, completion.text
