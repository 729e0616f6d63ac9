"""Show a ready server at work: one answer or completion as it is written, then proof of in-flight batching.

Every stage is cut to the speed that the first one measured, so the tour takes seconds on any engine.
"""

from __future__ import annotations

import asyncio
import math
import os
import sys
import time
import urllib.request

from clients.async_client import AsyncClient
from clients.terminal import ms
from clients.wire.latency import Stopwatch
from contract import prometheus
from contract.generation import FinishReason, TokenDelta

PROMPT = "def fibonacci(n):"
DEFAULT_METRICS_URL = "http://127.0.0.1:8002/metrics"
STREAMS = 8

# Sequences in the engine: per step where it reports that, else those that it has scheduled.
_SEQUENCE_GAUGES = (
    ("nv_trt_llm_inflight_batcher_metrics", {"inflight_batcher_specific_metric": "generation_requests"}),
    ("nv_trt_llm_request_metrics", {"request_type": "scheduled"}),
)
_STAGE_S = 1.0
_ANSWER_TOKENS, _COMPLETION_TOKENS = 192, 96
# On a busy machine no sample of the metrics may fall into a short run, so it is repeated with twice the tokens.
_ATTEMPTS = 3


async def tour(client: AsyncClient, question: str | None = None) -> int:
    """Print the tour; return 0 if in-flight batching was seen, else 1. question: None to complete code instead."""
    await client.health()  # opens the connection, which is no part of the first token's time
    pace = await _completion(client, question)
    length = max(48, min(512, int(pace * _STAGE_S)))
    joined = await _joining(client, length)
    together = await _together(client, max(24, length // 3))
    return 0 if joined and together else 1


async def _completion(client: AsyncClient, question: str | None) -> float:
    """Streams one greedy answer or completion to the terminal; returns its tokens per second."""
    watch, last = Stopwatch(), TokenDelta()
    limit = _ANSWER_TOKENS if question else _COMPLETION_TOKENS
    chat = [{"role": "user", "content": question}] if question else None
    if question:
        print(f"An answer from {client.url}, token by token:\n\n> {question}\n", flush=True)
    else:
        print(f"A completion from {client.url}, token by token:\n\n{PROMPT}", end="", flush=True)
    prompt = None if question else PROMPT
    async for last in client.generate(prompt, messages=chat, max_tokens=limit, temperature=0.0):
        watch.observe(last)
        sys.stdout.write(last.text)
        sys.stdout.flush()
    reasons: dict[FinishReason | None, str] = {FinishReason.STOP: "the model ended it"}
    reasons[FinishReason.LENGTH] = f"cut at {limit} tokens"
    ended = reasons.get(last.finish_reason, str(last.finish_reason))
    print(f"\n\n  time to first token   {ms(watch.ttft_s)}")
    print(f"  inter-token latency   p50 {ms(watch.inter_token_s(0.5))}, p99 {ms(watch.inter_token_s(0.99))}")
    print(f"  tokens/s              {watch.tokens_per_s or 0.0:.0f}  ({watch.tokens} tokens, {ended})\n", flush=True)
    return watch.tokens_per_s or 50.0


async def _joining(client: AsyncClient, length: int) -> bool:
    """Sends a second request while a long one is being written; True if it was answered before that one ended."""
    sent_s = sent_at = first_tokens = 0.0
    joiner: asyncio.Task[Stopwatch] | None = None
    async for delta in client.generate("import os\n", max_tokens=length, temperature=0.0, ignore_eos=True):
        first_tokens += len(delta.token_ids)
        if joiner is None and first_tokens >= length // 4:
            sent_at, sent_s = first_tokens, time.perf_counter()
            joiner = asyncio.create_task(_read(client, "class Stack:", 8))
    ended_s = time.perf_counter()
    if joiner is None:
        print("  in-flight batching: not shown; the first generation gave no tokens to join")
        return False
    began_s = (await joiner).first_s or math.inf
    order = "before" if began_s < ended_s else "AFTER"
    print(
        f"In-flight batching: a request sent while another was at token {sent_at:.0f} of {length} got its first token "
        f"{ms(began_s - sent_s)} later,\n  {ms(abs(ended_s - began_s))} {order} the other ended.",
        flush=True,
    )
    return began_s < ended_s


async def _together(client: AsyncClient, length: int) -> bool:
    """The same work alone and eight at a time; True if the engine carried several sequences at once."""
    alone = await _pace(client, range(1), length)
    for attempt in range(_ATTEMPTS):
        watcher = asyncio.create_task(_most_sequences())
        together = await _pace(client, range(1, STREAMS + 1), length << attempt)
        watcher.cancel()
        most, problem = await watcher
        if problem or most > 1:
            break
    times = f"({together / alone:.1f} times)"
    print(f"  1 stream {alone:.0f} tokens/s, {STREAMS} streams {together:.0f} tokens/s in all {times}.")
    if problem:
        print(f"  Sequences per engine step: unknown, {problem}", flush=True)
        return together > alone
    print(f"  Sequences in one engine step, read from {_metrics_url()}: {most:.0f}", flush=True)
    return most > 1


async def _read(client: AsyncClient, prompt: str, length: int) -> Stopwatch:
    """Runs one generation of fixed length."""
    watch = Stopwatch()
    async for delta in client.generate(prompt, max_tokens=length, temperature=0.0, ignore_eos=True):
        watch.observe(delta)
    return watch


async def _pace(client: AsyncClient, numbers: range, length: int) -> float:
    """Tokens per second of all streams together, each with a prompt of its own."""
    began_s = time.perf_counter()
    watches = await asyncio.gather(*(_read(client, f"def step_{n}(x):", length) for n in numbers))
    return sum(watch.tokens for watch in watches) / (time.perf_counter() - began_s)


def _metrics_url() -> str:
    return os.environ.get("TRIDENT_METRICS_URL") or DEFAULT_METRICS_URL


async def _most_sequences() -> tuple[float, str]:
    """Poll the metrics until cancelled; return the largest number of sequences, and why it is unknown or ""."""
    found: list[float] = []
    try:
        while True:
            metrics = prometheus.parse(await asyncio.to_thread(_fetch, _metrics_url()), ("nv_trt_llm_",))
            values = [value for name, labels in _SEQUENCE_GAUGES for _, value in metrics.matching(name, **labels)]
            found += values[:1]
            await asyncio.sleep(0.02)
    except asyncio.CancelledError:
        problem = "" if found else f"{_metrics_url()} names none of the engine's gauges"
    except (OSError, ValueError) as exc:
        problem = f"{_metrics_url()} cannot be read: {exc}"
    return max(found, default=0.0), problem


def _fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=2) as response:
        return response.read().decode()
