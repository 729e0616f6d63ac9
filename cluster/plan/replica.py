"""One replica under a load, step by step: its queue, its batch and its KV cache, with the step model's seconds.

Requests wait for a slot and for KV blocks of prompt and answer; each step gives every decoding sequence a token and
reads prompts, first come first served, up to max_num_tokens. No randomness: the requests are given.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from contract.errors import InvalidArgument
from contract.step_model import StepModel

BLOCK_TOKENS = 32  # of a prompt, read at least by a step that reads any


@dataclass(frozen=True)
class Replica:
    """A kind of replica.

    slots: sequences at once. chunk_tokens: of one step. kv_tokens: of the KV cache.
    slower: a step that reads prompts beside streams may take so many times one that does not, and longer by the number
        of prompts for each stream (decision 0034); 0 if steps are filled up to chunk_tokens.
    short_tokens: prompts up to this length are read whole all the same.
    """

    step: StepModel
    slots: int
    chunk_tokens: int
    kv_tokens: int
    slower: float = 0.0
    short_tokens: int = 0

    def whole(self, decoding: int) -> int:
        """Return the prompt tokens that a step beside streams has places for."""
        return max(BLOCK_TOKENS, self.chunk_tokens - decoding)

    def room(self, decoding: int, context_tokens: int, prompts: int) -> int:
        """Return the tokens of long prompts that a step may read."""
        room = self.whole(decoding)
        if not (self.slower and decoding and prompts):
            return room
        plain_s = self.step.seconds(decoding, context_tokens, 0)
        token_s = (self.step.seconds(decoding, context_tokens, room) - plain_s) / room
        longer_s = (self.slower - 1 + prompts / decoding) * plain_s
        return room if token_s * room <= longer_s else max(BLOCK_TOKENS, int(longer_s / token_s))


@dataclass(slots=True)
class Request:
    """A request; first_s and end_s are filled in: when its first and its last token came."""

    at_s: float
    input_tokens: int
    output_tokens: int
    first_s: float = 0.0
    end_s: float = 0.0


@dataclass
class Forecast:
    """What a load does to a replica. TTFT, ITL and e2e: 95th percentiles in seconds; itl of tokens, not of requests.

    requests, tokens_per_s: in the window, output tokens. sequences: mean of those in the batch. busy: part of the time.
    full_slots, full_kv: part of the steps in which requests waited for a slot, or for KV blocks.
    stable: whether the requests end at the pace at which they come.
    """

    requests: int
    requests_per_s: float
    tokens_per_s: float
    ttft_p50_s: float
    ttft_p95_s: float
    itl_mean_s: float
    itl_p95_s: float
    e2e_mean_s: float
    e2e_p95_s: float
    sequences: float
    busy: float
    full_slots: float
    full_kv: float
    stable: bool


@dataclass
class _Run:
    steps: list[tuple[float, int]] = field(default_factory=list)  # seconds, tokens of decoding
    done: list[Request] = field(default_factory=list)
    sequence_seconds: float = 0.0
    full_slots: int = 0
    full_kv: int = 0


def serve(
    replica: Replica, requests: Iterable[Request], after: Callable[[Request], Request | None] = lambda done: None
) -> _Run:
    """Run all requests, in the order of their instants; return them with their instants. Those that do not fit the KV
    cache by themselves are left out. after: returns the request that follows one, for closed loops."""
    coming = sorted(requests, key=lambda request: request.at_s, reverse=True)
    waiting: deque[Request] = deque()
    reading: deque[list] = deque()  # [request, tokens left]
    ends: list[tuple[int, int, Request]] = []  # decoding: (number of its last step, tie-breaker, request)
    run, now_s, step, context, held, order = _Run(), 0.0, 0, 0, 0, 0
    seconds = replica.step.seconds
    while coming or waiting or reading or ends:
        while coming and coming[-1].at_s <= now_s:
            waiting.append(coming.pop())
        while waiting and len(reading) + len(ends) < replica.slots:
            need = waiting[0].input_tokens + waiting[0].output_tokens
            if held + need > replica.kv_tokens:
                if not reading and not ends:  # it never fits
                    waiting.popleft()
                    continue
                run.full_kv += 1
                break
            held += need
            reading.append([waiting[0], waiting.popleft().input_tokens])
        else:
            run.full_slots += bool(waiting)
        if not reading and not ends:
            if coming:
                now_s = max(now_s, coming[-1].at_s)
            continue
        decoding = len(ends)
        room, prefill, begun = replica.room(decoding, context, len(reading)), 0, []
        while reading:
            limit = replica.whole(decoding) if reading[0][0].input_tokens <= replica.short_tokens else room
            if prefill >= limit:
                break
            part = min(reading[0][1], limit - prefill)
            prefill, reading[0][1] = prefill + part, reading[0][1] - part
            if reading[0][1] == 0:
                begun.append(reading.popleft()[0])
        took_s = seconds(decoding, context, prefill)
        now_s, step = now_s + took_s, step + 1
        run.sequence_seconds += took_s * (decoding + len(reading) + len(begun))
        if decoding:
            run.steps.append((took_s, decoding))
        context += decoding
        for request in begun:
            request.first_s = now_s
            context += request.input_tokens
            order += 1
            heapq.heappush(ends, (step + request.output_tokens - 1, order, request))
        while ends and ends[0][0] <= step:
            request = heapq.heappop(ends)[2]
            request.end_s = now_s
            size = request.input_tokens + request.output_tokens
            held, context = held - size, context - size + 1
            run.done.append(request)
            if (follower := after(request)) is not None:
                coming.append(follower)
                coming.sort(key=lambda request: request.at_s, reverse=True)
    return run


def forecast(replica: Replica, requests: Sequence[Request], warmup: int = 0) -> Forecast:
    """Return the figures of an open load, without its first ``warmup`` requests."""
    return figures(replica, serve(replica, requests), requests[warmup].at_s, requests[-1].at_s)


def closed_loop(
    replica: Replica, draws: Iterable[tuple[int, int]], concurrency: int, seconds: float, warmup_s: float
) -> Forecast:
    """Return the figures of so many clients that ask again at once. draws: prompt and answer tokens of each request."""
    lengths = iter(draws)
    request_s = replica.step.request_s
    first = [Request(0.0, *next(lengths)) for _ in range(concurrency)]

    def after(done: Request) -> Request | None:
        return Request(done.end_s + request_s, *next(lengths)) if done.end_s < seconds else None

    return figures(replica, serve(replica, first, after), warmup_s, seconds)


def figures(replica: Replica, run: _Run, from_s: float, to_s: float) -> Forecast:
    """Return the figures of the requests that came from ``from_s`` to ``to_s``."""
    mine = sorted((one for one in run.done if from_s <= one.at_s <= to_s), key=lambda one: one.at_s)
    if not mine:
        raise InvalidArgument("requests", f"must be some between {from_s:g} and {to_s:g} s, got none")
    waited_s = np.array([one.first_s - one.at_s for one in mine])
    took_s = np.array([one.end_s - one.at_s for one in mine]) + replica.step.request_s
    ttft_p50_s, ttft_p95_s = np.percentile(waited_s + replica.step.request_s, [50, 95])
    steps, counts = np.array(run.steps or [(0.0, 1)]).T
    gaps_s = np.repeat(steps, counts.astype(int))
    window_s, last_s = max(to_s - from_s, 1e-9), max(one.end_s for one in run.done)
    quarter = -(-len(mine) // 4)
    return Forecast(
        requests=len(mine),
        requests_per_s=sum(from_s <= one.end_s <= to_s for one in run.done) / window_s,
        tokens_per_s=sum(_inside(one, from_s, to_s) for one in run.done) / window_s,
        ttft_p50_s=float(ttft_p50_s),
        ttft_p95_s=float(ttft_p95_s),
        itl_mean_s=float(gaps_s.mean()),
        itl_p95_s=float(np.percentile(gaps_s, 95)),
        e2e_mean_s=float(took_s.mean()),
        e2e_p95_s=float(np.percentile(took_s, 95)),
        sequences=run.sequence_seconds / last_s,
        busy=min(1.0, float(steps.sum()) / last_s),
        full_slots=run.full_slots / len(steps),
        full_kv=run.full_kv / len(steps),
        # A queue that grows keeps the last requests waiting longer than the first ones.
        stable=bool(waited_s[-quarter:].mean() - waited_s[:quarter].mean() <= 0.1 * window_s),
    )


def _inside(request: Request, from_s: float, to_s: float) -> float:
    """Return the tokens that came within the window, as if they came evenly."""
    span_s = request.end_s - request.first_s
    if span_s <= 0:
        return request.output_tokens * (from_s <= request.first_s <= to_s)
    return request.output_tokens * max(0.0, min(request.end_s, to_s) - max(request.first_s, from_s)) / span_s
