"""Measure how soon a cancelled request's slot is free, under load.

The engine is full, one more request waits, a running one is cancelled, and the waiting one's first_scheduled_time_ns,
which is of the client's clock too on one machine, tells when it got the slot: exact to an engine step.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import figures, machine, report, scrape
from benchmarks.measurement import ServerUnderTest
from benchmarks.prompts import Prompts
from clients import NO_RETRY, AsyncClient
from clients.wire.token_stream import TokenStream
from contract.errors import EngineFailed, InvalidArgument, TridentError

PROMPT = "the people of the great old world"
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "timings": True}
TIMEOUT_S = 30.0
_BLOCKS = "nv_trt_llm_kv_cache_block_metrics"


class RunningStreams:
    """Streams that keep the engine busy; each of them can be cancelled."""

    def __init__(self, client: AsyncClient, max_tokens: int) -> None:
        self._client, self._max_tokens = client, max_tokens
        self.running: dict[TokenStream, asyncio.Task] = {}
        self.done = 0
        self._error: TridentError | None = None  # of a stream that ended before its first token

    async def fill(self, count: int) -> None:
        """Start ``count`` streams and wait until all of them generate. Raises TridentError: one of them was refused."""
        events = [asyncio.Event() for _ in range(count)]
        for first in events:
            stream = self._client.generate(PROMPT, max_tokens=self._max_tokens, **GREEDY)
            self.running[stream] = asyncio.create_task(self._read(stream, first))
        await asyncio.wait_for(asyncio.gather(*(event.wait() for event in events)), TIMEOUT_S)
        if self._error is not None:
            raise self._error

    async def cancel_all(self) -> None:
        for stream in list(self.running):
            stream.cancel()
        await asyncio.gather(*self.running.values(), return_exceptions=True)
        self.running.clear()

    async def _read(self, stream: TokenStream, first: asyncio.Event) -> None:
        try:
            async for _ in stream:
                first.set()
        except TridentError as error:
            if not first.is_set():
                self._error = error
        first.set()
        self.running.pop(stream, None)
        self.done += 1


async def by_next_request(server: ServerUnderTest, slots: int, samples: int, max_tokens: int) -> list[float]:
    """Return seconds from each cancel to the instant at which the waiting request got the slot."""
    out: list[float] = []
    async with AsyncClient(server.url, retry=NO_RETRY) as client:
        streams = RunningStreams(client, max_tokens)
        try:
            while len(out) < samples:
                await streams.fill(slots - len(streams.running))
                # One token, so that its timings are known soon.
                answer = asyncio.create_task(client.generate(PROMPT, max_tokens=1, **GREEDY).complete())
                await asyncio.sleep(0.05)
                if answer.done() or len(streams.running) < slots:
                    answer.cancel()
                    await asyncio.gather(answer, return_exceptions=True)
                    continue  # another stream ended and freed the slot
                done = streams.done
                cancelled_s = time.monotonic()
                next(iter(streams.running)).cancel()
                completion = await asyncio.wait_for(answer, TIMEOUT_S)
                # If another stream ended besides the cancelled one, the slot may have been its.
                if completion.timings is None:
                    raise EngineFailed("the server sent no timings; only Trident's CPU engine does")
                scheduled_s = completion.timings.first_scheduled_ns / 1e9
                if scheduled_s > cancelled_s and streams.done - done <= 1:
                    out.append(scheduled_s - cancelled_s)
        finally:
            await streams.cancel_all()
    return out


def capacity(server: ServerUnderTest, max_tokens: int) -> int:
    """Return how many such streams the engine runs at once, limited by its slots or its KV cache. Raises
    InvalidArgument: not even one."""
    if server.metrics_url is None:
        raise InvalidArgument("metrics_url", "must be given: the engine's slots and KV blocks are read there")
    metrics = scrape.fetch(server.metrics_url)
    slots = round(metrics.value("nv_trt_llm_request_metrics", request_type="max"))
    kinds = ("max", "tokens_per")
    blocks, per_block = (metrics.value(_BLOCKS, kv_cache_block_type=kind) for kind in kinds)
    if not (slots and blocks and per_block):
        raise EngineFailed(f"{server.metrics_url}: no gauges of slots and KV blocks")
    prompt_tokens = Prompts.for_engine(server.engine_folder).count(PROMPT)
    most = int(blocks * per_block) - prompt_tokens
    if max_tokens > most:
        raise InvalidArgument("max_tokens", f"must be at most {most}, as many as the KV cache holds, got {max_tokens}")
    return min(slots, int(blocks // -(-(prompt_tokens + max_tokens) // per_block)))


def run(server: ServerUnderTest, samples: int, max_tokens: int, out: Path) -> int:
    """Measure, print, write cancel.json."""
    full, conditions = capacity(server, max_tokens), machine.described()
    found = figures.spread(asyncio.run(by_next_request(server, full, samples, max_tokens)))
    cells = [(full, found.count, report.ms(found.p50), report.ms(found.p99), report.ms(found.max))]
    print(report.on(conditions))
    print(report.table(cells, ("cancel to the slot's next request, ms; streams", "samples", "p50", "p99", "max")))
    named = {f"cancel to the next request, ms: {name}": [1e3 * getattr(found, name)] for name in ("p50", "p99")}
    table = {"conditions": conditions, "figures": {"streams": full} | asdict(found)}
    return report.write_json(table | {"compared": figures.compared(figures.LOWER, named)}, out, "cancel")
