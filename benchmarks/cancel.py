"""How soon a cancelled request's place is free, under load, seen in two ways.

By the next in line: the engine is full, one more request waits, a running one is cancelled, and the waiting one's own
first_scheduled_time_ns says when the engine gave it the place. It is an instant on CLOCK_MONOTONIC, which is the
client's clock too on one machine, so the figure is exact to the engine's step.

By the gauges: all streams of a load are cancelled together and the metrics are read until no request holds a slot. The
engine shows its gauges every 100 ms while it works, so a single figure may be 100 ms (and a scrape) too long.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks import exposition, figures, machine, report
from benchmarks.figures import Spread
from benchmarks.measurement import Where
from benchmarks.prompts import Prompts
from clients import NO_RETRY, AsyncClient
from clients.wire.token_stream import TokenStream
from contract.errors import EngineFailed, TridentError

GAUGE_RESOLUTION_S = 0.1
SCRAPE_EVERY_S = 0.01
PROMPT = "the people of the great old world"
PATIENCE_S = 30.0
_SLOTS = "nv_trt_llm_request_metrics"


class Crowd:
    """Streams that keep the engine busy; any of them can be left."""

    def __init__(self, client: AsyncClient, max_tokens: int) -> None:
        self._client, self._max_tokens = client, max_tokens
        self.running: dict[TokenStream, asyncio.Task] = {}
        self.done = 0

    async def join(self) -> tuple[TokenStream, asyncio.Event]:
        """One more; the event is set with its first token."""
        stream = self._client.generate(
            PROMPT, max_tokens=self._max_tokens, temperature=0.0, ignore_eos=True, timings=True
        )
        first = asyncio.Event()
        self.running[stream] = asyncio.create_task(self._read(stream, first))
        return stream, first

    async def fill(self, count: int) -> None:
        """``count`` streams, all of them generating."""
        events = [(await self.join())[1] for _ in range(count)]
        await asyncio.wait_for(asyncio.gather(*(event.wait() for event in events)), PATIENCE_S)

    def leave(self, stream: TokenStream) -> float:
        """Cancels; returns the instant."""
        at_s = time.monotonic()
        stream.cancel()
        return at_s

    async def empty(self) -> None:
        for stream in list(self.running):
            stream.cancel()
        await asyncio.gather(*self.running.values(), return_exceptions=True)
        self.running.clear()

    async def _read(self, stream: TokenStream, first: asyncio.Event) -> None:
        with contextlib.suppress(TridentError):
            async for _ in stream:
                first.set()
        self.running.pop(stream, None)
        self.done += 1


async def by_next_in_line(where: Where, slots: int, samples: int, max_tokens: int) -> list[float]:
    """Seconds from a cancel to the instant the freed slot was given to the request that waited for it."""
    out: list[float] = []
    async with AsyncClient(where.url, retry=NO_RETRY) as client:
        crowd = Crowd(client, max_tokens)
        try:
            while len(out) < samples:
                await crowd.fill(slots - len(crowd.running))
                # Short, so that its timings are known soon; it leaves its slot by itself.
                waiting = client.generate(PROMPT, max_tokens=1, temperature=0.0, ignore_eos=True, timings=True)
                answer = asyncio.create_task(waiting.complete())
                await asyncio.sleep(0.05)
                if answer.done() or len(crowd.running) < slots:
                    answer.cancel()
                    await asyncio.gather(answer, return_exceptions=True)
                    continue  # somebody finished by himself and let it in: says nothing about cancels
                done = crowd.done
                left_s = crowd.leave(next(iter(crowd.running)))
                completion = await asyncio.wait_for(answer, PATIENCE_S)
                # Of those that went meanwhile one is the cancelled one; if another ended too, whose place was it?
                if completion.timings is None:
                    raise EngineFailed("the server sent no timings; is it Trident's CPU engine?")
                scheduled_s = completion.timings.first_scheduled_ns / 1e9
                if scheduled_s > left_s and crowd.done - done <= 1:
                    out.append(scheduled_s - left_s)
        finally:
            await crowd.empty()
    return out


async def by_gauges(where: Where, streams: int, samples: int, max_tokens: int) -> list[float]:
    """Seconds from cancelling every stream to the gauges saying that no request holds a slot."""
    out: list[float] = []
    async with AsyncClient(where.url, retry=NO_RETRY) as client:
        for _ in range(samples):
            crowd = Crowd(client, max_tokens)
            await crowd.fill(streams)
            await _until(where, lambda scheduled: scheduled >= 1)
            at_s = time.monotonic()
            await crowd.empty()
            await _until(where, lambda scheduled: scheduled == 0)
            out.append(time.monotonic() - at_s)
    return out


async def _until(where: Where, holds) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        page = await asyncio.to_thread(exposition.fetch, where.metrics_url)
        if holds(page.value(_SLOTS, request_type="scheduled")):
            return
        await asyncio.sleep(SCRAPE_EVERY_S)
    raise EngineFailed(f"the engine's slots did not change within {PATIENCE_S:g} s")


def capacity(where: Where, max_tokens: int) -> int:
    """How many such streams the engine runs at once: its slots, or fewer if the KV cache ends first."""
    page = exposition.fetch(where.metrics_url)
    name = "nv_trt_llm_kv_cache_block_metrics"
    slots = round(page.value(_SLOTS, request_type="max"))
    blocks = page.value(name, kv_cache_block_type="max")
    per_block = page.value(name, kv_cache_block_type="tokens_per")
    if not (slots and blocks and per_block):
        raise EngineFailed(f"{where.metrics_url} does not say how many slots and KV blocks there are")
    prompt_tokens = Prompts.for_engine(where.engine_folder).count(PROMPT)
    return min(slots, int(blocks // -(-(prompt_tokens + max_tokens) // per_block)))


def run(where: Where, streams: Sequence[int], samples: int, max_tokens: int, out: Path) -> int:
    """Measures, prints, writes cancel.json."""
    full = capacity(where, max_tokens)
    conditions = machine.described()
    rows: list[tuple[str, int, Spread]] = []
    found = asyncio.run(by_next_in_line(where, full, samples, max_tokens))
    rows.append(("to the next in line", full, figures.spread(found)))
    for count in streams:
        seen = asyncio.run(by_gauges(where, min(count, full), max(3, samples // 5), max_tokens))
        rows.append(("to the gauges", min(count, full), figures.spread(seen)))
    cells = [(what, at, s.count, report.ms(s.p50), report.ms(s.p99), report.ms(s.max)) for what, at, s in rows]
    print(report.on(conditions))
    print(report.table(cells, ("cancel to free, ms", "streams", "samples", "p50", "p99", "max")))
    print(f"  the gauges are up to {GAUGE_RESOLUTION_S * 1e3:g} ms old; the next in line is exact to an engine step")
    out.mkdir(parents=True, exist_ok=True)
    table = [{"what": what, "streams": at} | asdict(found) for what, at, found in rows]
    (out / "cancel.json").write_text(json.dumps({"conditions": conditions, "figures": table}) + "\n")
    print(f"  written: {out / 'cancel.json'}")
    return 0
