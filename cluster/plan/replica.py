"""One replica under a load: the model of its engine, and the figures of the requests."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from cluster.plan.engine import Engine, Replica
from cluster.plan.engine import Sequence as Running
from contract.errors import InvalidArgument


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

    requests, tokens_per_s: in the window, output tokens. sequences: mean of those in the batch. busy: part of the time;
        both in the window: the batch fills before it and empties after it.
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
    """steps: seconds between two tokens of a sequence, and tokens. lacked: steps in which requests waited for it.
    busy, batch: from when to when the engine made steps, and each sequence was in the batch."""

    steps: list[tuple[float, int]] = field(default_factory=list)
    lacked: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("slots", "kv", ""), 0))
    done: list[Request] = field(default_factory=list)
    busy: list[tuple[float, float]] = field(default_factory=list)
    batch: list[tuple[float, float]] = field(default_factory=list)


def serve(
    replica: Replica, requests: Iterable[Request], after: Callable[[Request], Request | None] = lambda done: None
) -> _Run:
    """Run all requests in order, without those that the engine would refuse as too long. after: returns the request
    that follows one that ended or was refused."""
    coming = sorted(requests, key=lambda request: request.at_s, reverse=True)
    run = _Run()

    def stepped(step_s: float, steps: int, decoding: int, tokens: float, lacked: str) -> None:
        run.lacked[lacked] += steps
        run.busy.append((engine.due_s - steps * step_s, engine.due_s))
        if decoding:
            run.steps.append((step_s * decoding / tokens, round(tokens * steps)))

    engine = Engine(replica, stepped=stepped)

    def follow(request: Request) -> None:
        if (follower := after(request)) is not None:
            coming.append(follower)
            coming.sort(key=lambda request: request.at_s, reverse=True)

    def submit(request: Request) -> None:
        def told(sequence: Running, tokens: int, end: bool) -> None:
            request.first_s, request.end_s = sequence.first_s, sequence.last_s
            if end:
                run.batch.append((sequence.scheduled_s, sequence.last_s))
                run.done.append(request)
                follow(request)

        engine.submit(Running(request.input_tokens, request.output_tokens, request.output_tokens, told), request.at_s)

    while coming or engine.due_s < math.inf:
        if not coming or coming[-1].at_s > engine.due_s:
            engine.finish()
        elif (request := coming.pop()).input_tokens + request.output_tokens <= replica.longest:
            submit(request)
        else:
            request.end_s = request.at_s
            follow(request)
    return run


def forecast(replica: Replica, requests: list[Request], warmup: int = 0) -> Forecast:
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
    steps = np.array(run.steps or [(0.0, 1)])
    steps_s, tokens = steps[steps[:, 0].argsort()].T
    # As of np.repeat(steps_s, tokens), which takes gigabytes where answers are long.
    place = 0.95 * (tokens.sum() - 1)
    lower_s, upper_s = steps_s[np.searchsorted(tokens.cumsum(), [math.floor(place), math.ceil(place)], "right")]
    window_s = max(to_s - from_s, 1e-9)
    quarter = -(-len(mine) // 4)
    return Forecast(
        requests=len(mine),
        requests_per_s=sum(from_s <= one.end_s <= to_s for one in run.done) / window_s,
        tokens_per_s=sum(_inside(one, from_s, to_s) for one in run.done) / window_s,
        ttft_p50_s=float(ttft_p50_s),
        ttft_p95_s=float(ttft_p95_s),
        itl_mean_s=float(np.average(steps_s, weights=tokens)),
        itl_p95_s=float(lower_s + (place - math.floor(place)) * (upper_s - lower_s)),
        e2e_mean_s=float(took_s.mean()),
        e2e_p95_s=float(np.percentile(took_s, 95)),
        sequences=_seconds(run.batch, from_s, to_s) / window_s,
        busy=min(1.0, _seconds(run.busy, from_s, to_s) / window_s),
        full_slots=run.lacked["slots"] / sum(run.lacked.values()),
        full_kv=run.lacked["kv"] / sum(run.lacked.values()),
        # A queue that grows keeps the last requests waiting longer than the first ones: 3 % too many by 0.02 of it.
        stable=bool(waited_s[-quarter:].mean() - waited_s[:quarter].mean() <= 0.02 * window_s),
    )


def _seconds(spans: list[tuple[float, float]], from_s: float, to_s: float) -> float:
    """Return the seconds of all spans within the window."""
    began_s, ended_s = np.array(spans or [(from_s, from_s)]).clip(from_s, to_s).T
    return float((ended_s - began_s).sum())


def _inside(request: Request, from_s: float, to_s: float) -> float:
    """Return the tokens that came within the window, as if they came evenly."""
    span_s = request.end_s - request.first_s
    if span_s <= 0:
        return request.output_tokens * (from_s <= request.first_s <= to_s)
    return request.output_tokens * max(0.0, min(request.end_s, to_s) - max(request.first_s, from_s)) / span_s
