"""A server's own metrics of a run: histograms and counters before and after, gauges meanwhile."""

from __future__ import annotations

import math
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from contract import prometheus
from contract.errors import Unavailable
from contract.prometheus import Metrics

PHASES = ("tokenize", "queue", "prefill", "first_decode", "detokenize")
COALESCING_WAIT = "trident_coalescing_wait_seconds"
LATENCIES = {
    "ttft": "gen_ai_server_time_to_first_token_seconds",
    "itl": "trident_inter_token_latency_seconds",
    "coalescing wait": COALESCING_WAIT,
    "tpot": "gen_ai_server_time_per_output_token_seconds",
    "latency": "gen_ai_server_request_duration_seconds",
}
_PHASE = "trident_time_to_first_token_phase_seconds"
_REQUESTS = "trident_requests_total"
GAUGES = {
    "running": ("nv_trt_llm_request_metrics", {"request_type": "scheduled"}),
    "waiting": ("nv_trt_llm_request_metrics", {"request_type": "waiting"}),
    "kv_usage": ("nv_trt_llm_kv_cache_block_metrics", {"kv_cache_block_type": "fraction"}),
}
SETTLE_S, SETTLE_TIMEOUT_S = 0.15, 3.0  # the engine publishes its gauges every 100 ms
WATCH_EVERY_S = 0.5
Gauges = list[tuple[float, dict[str, float]]]  # instants on the monotonic clock, and {gauge: value}


@dataclass(frozen=True)
class Histogram:
    """A cumulative histogram: upper bounds (the last is infinite) and how many values did not exceed each."""

    bounds: tuple[float, ...]
    cumulative: tuple[float, ...]
    sum: float

    @property
    def count(self) -> float:
        return self.cumulative[-1] if self.cumulative else 0.0

    @property
    def mean(self) -> float:
        return self.sum / self.count if self.count else math.nan

    def quantile(self, fraction: float) -> float:
        """Interpolate linearly within the bucket; the last finite bound if it is above. nan without values."""
        if not self.count:
            return math.nan
        rank, below, low = fraction * self.count, 0.0, 0.0
        for bound, reached in zip(self.bounds, self.cumulative, strict=True):
            if reached >= rank and reached > below:
                return low if math.isinf(bound) else low + (bound - low) * (rank - below) / (reached - below)
            below, low = reached, bound
        return low

    def __sub__(self, earlier: Histogram) -> Histogram:
        """Return what was added since; all of it where the server was restarted meanwhile."""
        if not earlier.count or earlier.count > self.count:
            return self
        before = earlier.cumulative
        cumulative = tuple(now - then for now, then in zip(self.cumulative, before, strict=True))
        return Histogram(self.bounds, cumulative, self.sum - earlier.sum)


def histogram(metrics: Metrics, name: str, **labels: str) -> Histogram:
    """Return the sum of the matching histograms; empty if there is none."""
    reached: dict[float, float] = {}
    for found, value in metrics.matching(f"{name}_bucket", **labels):
        bound = float(found["le"])
        reached[bound] = reached.get(bound, 0.0) + value
    bounds = tuple(sorted(reached))
    return Histogram(bounds, tuple(reached[bound] for bound in bounds), metrics.value(f"{name}_sum", **labels))


@contextmanager
def sampling(every_s: float, sample: Callable[[], None]) -> Iterator[None]:
    """Call ``sample`` again and again, from a thread of its own."""
    stop = threading.Event()

    def repeat() -> None:
        while not stop.wait(every_s):
            sample()

    thread = threading.Thread(target=repeat, name="sampler", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(5)


def fetch(url: str, timeout_s: float = 5.0) -> Metrics:
    """Scrape a server's metrics. Raises Unavailable."""
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as response:
            return prometheus.parse(response.read().decode())
    except (OSError, ValueError) as exc:
        raise Unavailable(f"no metrics at {url}: {exc}") from exc


def drafted(metrics_url: str) -> tuple[float, float]:
    """Return the steps of sequences that were drafted for, and the draft tokens that they accepted, since the engine
    started. Raises Unavailable."""
    metrics = fetch(metrics_url)
    steps, accepted = (f"trident_speculative_{name}_total" for name in ("steps", "accepted_tokens"))
    return metrics.value(steps), metrics.value(accepted)


@dataclass(frozen=True)
class HistogramFigures:
    """A histogram in seconds; quantiles are interpolated within the server's buckets."""

    count: int
    mean_s: float
    p50_s: float
    p95_s: float
    p99_s: float

    @classmethod
    def of(cls, found: Histogram) -> HistogramFigures:
        return cls(round(found.count), found.mean, *(found.quantile(q) for q in (0.5, 0.95, 0.99)))


@dataclass(frozen=True)
class ServerSide:
    """Differences over the run.

    requests, cancellations, errors: counts by finish reason, reason, error type.
    latencies, phases: by the names of LATENCIES and PHASES.
    """

    requests: dict[str, int]
    input_tokens: int
    output_tokens: int
    cached_tokens: int
    cancellations: dict[str, int]
    errors: dict[str, int]
    latencies: dict[str, HistogramFigures]
    phases: dict[str, HistogramFigures]
    gauges: Gauges = field(default_factory=list)

    @property
    def bottleneck(self) -> str:
        """The phase with the largest mean part of the time to first token; "" without data."""
        spent = {name: found.mean_s for name, found in self.phases.items() if found.count}
        return max(spent, key=lambda name: spent[name]) if spent else ""


def difference(before: Metrics, after: Metrics, gauges: Gauges | None = None) -> ServerSide:
    def growth(name: str) -> int:
        return round(after.value(name) - before.value(name))

    def growth_by(name: str, label: str) -> dict[str, int]:
        then = before.by_label(name, label)
        now = {key: round(value - then.get(key, 0.0)) for key, value in after.by_label(name, label).items()}
        return {key: value for key, value in now.items() if value}

    def spent(name: str, **labels: str) -> HistogramFigures:
        return HistogramFigures.of(histogram(after, name, **labels) - histogram(before, name, **labels))

    return ServerSide(
        requests=growth_by(_REQUESTS, "finish_reason"),
        input_tokens=growth("trident_input_tokens_total"),
        output_tokens=growth("trident_output_tokens_total"),
        cached_tokens=growth("trident_cached_prompt_tokens_total"),
        cancellations=growth_by("trident_cancellations_total", "reason"),
        errors=growth_by("trident_errors_total", "error_type"),
        latencies={short: spent(name) for short, name in LATENCIES.items()},
        phases={phase: spent(_PHASE, phase=phase) for phase in PHASES},
        gauges=gauges or [],
    )


def settled(url: str) -> Metrics:
    """Scrape until the number of finished requests no longer grows; return the last scrape."""
    deadline_s = time.monotonic() + SETTLE_TIMEOUT_S
    metrics = fetch(url)
    while time.monotonic() < deadline_s:
        time.sleep(SETTLE_S)
        metrics, earlier = fetch(url), metrics
        active = metrics.value("nv_trt_llm_request_metrics", request_type="active")
        if metrics.value(_REQUESTS) == earlier.value(_REQUESTS) and active == 0:
            break
    return metrics


@contextmanager
def watched_gauges(url: str) -> Iterator[Gauges]:
    """Sample the gauges into the list that it yields."""
    samples: Gauges = []

    def sample() -> None:
        with suppress(Unavailable):
            metrics = fetch(url)
            now = {name: metrics.value(family, **labels) for name, (family, labels) in GAUGES.items()}
            samples.append((time.monotonic(), now))

    with sampling(WATCH_EVERY_S, sample):
        yield samples
