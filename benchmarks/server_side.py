"""Read the server's own metrics of a run: histograms and counters before and after, gauges meanwhile."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, field

from benchmarks import scrape
from benchmarks.scrape import Histogram, Sampler
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
SETTLE_S = 0.15  # the engine publishes its gauges every 100 ms
SETTLE_TIMEOUT_S = 3.0
WATCH_EVERY_S = 0.5


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
    gauges: (instant on the monotonic clock, {gauge: value}).
    """

    requests: dict[str, int]
    input_tokens: int
    output_tokens: int
    cached_tokens: int
    cancellations: dict[str, int]
    errors: dict[str, int]
    latencies: dict[str, HistogramFigures]
    phases: dict[str, HistogramFigures]
    gauges: list[tuple[float, dict[str, float]]] = field(default_factory=list)

    @property
    def bottleneck(self) -> str:
        """The phase with the largest mean part of the time to first token; "" without data."""
        spent = {name: found.mean_s for name, found in self.phases.items() if found.count}
        return max(spent, key=lambda name: spent[name]) if spent else ""


def difference(
    before: Metrics, after: Metrics, gauges: list[tuple[float, dict[str, float]]] | None = None
) -> ServerSide:
    def growth(name: str) -> int:
        return round(after.value(name) - before.value(name))

    def growth_by(name: str, label: str) -> dict[str, int]:
        then = before.by_label(name, label)
        now = {key: round(value - then.get(key, 0.0)) for key, value in after.by_label(name, label).items()}
        return {key: value for key, value in now.items() if value}

    def spent(name: str, **labels: str) -> HistogramFigures:
        return HistogramFigures.of(scrape.histogram(after, name, **labels) - scrape.histogram(before, name, **labels))

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
    metrics = scrape.fetch(url)
    while time.monotonic() < deadline_s:
        time.sleep(SETTLE_S)
        metrics, earlier = scrape.fetch(url), metrics
        if metrics.value(_REQUESTS) == earlier.value(_REQUESTS) and _active(metrics) == 0:
            break
    return metrics


def _active(metrics: Metrics) -> float:
    return metrics.value("nv_trt_llm_request_metrics", request_type="active")


class GaugeWatch(Sampler):
    """Samples the gauges into ``samples``."""

    def __init__(self, url: str) -> None:
        super().__init__(WATCH_EVERY_S)
        self.samples: list[tuple[float, dict[str, float]]] = []
        self._url = url

    def sample(self) -> None:
        with suppress(Unavailable):
            metrics = scrape.fetch(self._url)
            now = {name: metrics.value(family, **labels) for name, (family, labels) in GAUGES.items()}
            self.samples.append((time.monotonic(), now))
