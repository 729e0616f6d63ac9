"""Show a ready server at work: one answer or completion as it is written, then proof of in-flight batching.

Every stage is cut to the speed that the first one measured, so the tour takes seconds on any engine.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
import urllib.request
from collections.abc import Awaitable
from dataclasses import dataclass

from clients.async_client import AsyncClient
from clients.terminal import ms
from clients.wire.latency import Stopwatch
from contract import prometheus
from contract.generation import FinishReason

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
    """Prints the tour; the exit code is 0 if in-flight batching was seen, 1 if not.

    question: asked through the model's chat template; without one, the model completes code.
    """
    await client.health()  # opens the connection, which is no part of the first token's time
    pace = await _completion(client, question)
    length = max(48, min(512, int(pace * _STAGE_S)))
    joined = await _joining(client, length)
    together = await _together(client, max(24, length // 3))
    return 0 if joined and together else 1


async def _completion(client: AsyncClient, question: str | None) -> float:
    """Streams one greedy answer or completion to the terminal; returns its tokens per second."""
    watch = Stopwatch()
    reason: FinishReason | None = None
    limit = _ANSWER_TOKENS if question else _COMPLETION_TOKENS
    if question:
        print(f"An answer from {client.url}, token by token:\n\n> {question}\n", flush=True)
        chat = [{"role": "user", "content": question}]
        stream = client.generate(messages=chat, max_tokens=limit, temperature=0.0)
    else:
        print(f"A completion from {client.url}, token by token:\n", flush=True)
        sys.stdout.write(PROMPT)
        stream = client.generate(PROMPT, max_tokens=limit, temperature=0.0)
    async for delta in stream:
        watch.observe(delta)
        reason = delta.finish_reason
        sys.stdout.write(delta.text)
        sys.stdout.flush()
    ended = {FinishReason.STOP: "the model ended it", FinishReason.LENGTH: f"cut at {limit} tokens"}.get(
        reason or FinishReason.ERROR, str(reason)
    )
    print(f"\n\n  time to first token   {ms(watch.ttft_s)}")
    print(f"  inter-token latency   p50 {ms(watch.inter_token_s(0.5))}, p99 {ms(watch.inter_token_s(0.99))}")
    print(f"  tokens/s              {watch.tokens_per_s or 0.0:.0f}  ({watch.tokens} tokens, {ended})\n", flush=True)
    return watch.tokens_per_s or 50.0


async def _joining(client: AsyncClient, length: int) -> bool:
    """Sends a second request while a long one is being written; True if it was answered before that one ended."""
    at_s: dict[str, float] = {}
    first_tokens = 0

    async def second() -> None:
        at_s["second sent"] = time.perf_counter()
        async for _ in client.generate("class Stack:", max_tokens=8, temperature=0.0, ignore_eos=True):
            at_s.setdefault("second began", time.perf_counter())

    joiner: asyncio.Task | None = None
    async for delta in client.generate("import os\n", max_tokens=length, temperature=0.0, ignore_eos=True):
        first_tokens += len(delta.token_ids)
        if joiner is None and first_tokens >= length // 4:
            sent_at, joiner = first_tokens, asyncio.create_task(second())
    ended_s = time.perf_counter()
    if joiner is None:
        print("  in-flight batching: not shown; the first generation gave no tokens to join")
        return False
    await joiner
    before_s = ended_s - at_s["second began"]
    waited_s = at_s["second began"] - at_s["second sent"]
    shown = f"a request sent while another was at token {sent_at} of {length} got its first token {ms(waited_s)} later,"
    print(
        f"In-flight batching: {shown}\n  {ms(abs(before_s))} {'before' if before_s > 0 else 'AFTER'} the other ended.",
        flush=True,
    )
    return before_s > 0


async def _together(client: AsyncClient, length: int) -> bool:
    """The same work alone and eight at a time; True if the engine carried several sequences at once."""
    alone = await _pace([_drain(client, 0, length)])
    for attempt in range(_ATTEMPTS):
        watcher = asyncio.create_task(_most_sequences())
        together = await _pace([_drain(client, n, length << attempt) for n in range(1, STREAMS + 1)])
        watcher.cancel()
        sequences = await watcher
        if sequences.problem or sequences.most > 1:
            break
    times = f"({together / alone:.1f} times)"
    print(f"  1 stream {alone:.0f} tokens/s, {STREAMS} streams {together:.0f} tokens/s in all {times}.")
    if sequences.problem:
        print(f"  Sequences per engine step: unknown, {sequences.problem}", flush=True)
        return together > alone
    print(f"  Sequences in one engine step, read from {sequences.url}: {sequences.most:.0f}", flush=True)
    return sequences.most > 1


async def _drain(client: AsyncClient, n: int, length: int) -> int:
    """Runs one fixed-length generation with a prompt of its own; returns its tokens."""
    tokens = 0
    async for delta in client.generate(f"def step_{n}(x):", max_tokens=length, temperature=0.0, ignore_eos=True):
        tokens += len(delta.token_ids)
    return tokens


async def _pace(streams: list[Awaitable[int]]) -> float:
    """Tokens per second of all streams together."""
    began_s = time.perf_counter()
    tokens = sum(await asyncio.gather(*streams))
    return tokens / (time.perf_counter() - began_s)


@dataclass
class _Sequences:
    url: str
    most: float = 0.0
    problem: str = ""


async def _most_sequences() -> _Sequences:
    """Poll the metrics until cancelled; return the largest number of sequences."""
    seen = _Sequences(os.environ.get("TRIDENT_METRICS_URL") or DEFAULT_METRICS_URL)
    found = False
    try:
        while True:
            metrics = prometheus.parse(await asyncio.to_thread(_fetch, seen.url), ("nv_trt_llm_",))
            values = [value for name, labels in _SEQUENCE_GAUGES for _, value in metrics.matching(name, **labels)]
            found = found or bool(values)
            seen.most = max([seen.most, *values[:1]])
            await asyncio.sleep(0.02)
    except asyncio.CancelledError:
        if not found:
            seen.problem = f"{seen.url} names none of the engine's gauges"
    except (OSError, ValueError) as exc:
        seen.problem = f"{seen.url} cannot be read: {exc}"
    return seen


def _fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=2) as response:
        return response.read().decode()
