"""One metrics page of the pages of several workers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector, CollectorRegistry

_PREFIX = "trident_gateway_"
# What all workers see alike; everything else is added up.
_SAME = tuple(
    f"{_PREFIX}{name}"
    for name in (
        "replica_healthy",
        "breaker_state",
        "replica_waiting",
        "replica_kv_usage_ratio",
        "replica_slots",
        "replica_tokens_per_second",
        "pool_",
        "quality_drift",
        "queue_depth",
        "replica_seconds",
        "cost_total",
        "release_",
        "budget_used_ratio",
    )
)
_EACH = tuple(f"{_PREFIX}pool_{name}_total" for name in ("calls", "refusals", "tokens"))
_PER_TOKEN = f"{_PREFIX}cost_per_1000_tokens"


class WorkerMetrics(Collector):
    """Add up pages. Counters of workers that have ended stay in the sum, or it would look like a restart."""

    def __init__(self) -> None:
        self._ended: list[Metric] = []
        self._latest: dict[int, list[Metric]] = {}
        self._up: dict[int, bool] = {}

    def read(self, worker: int, page: str | None) -> None:
        """Take over the latest page of a worker; None: it does not answer, and its page before stands."""
        self._up[worker] = page is not None
        if page is not None:
            self._latest[worker] = list(text_string_to_metric_families(page))

    def end(self, worker: int) -> None:
        """Keep the counters of a worker that has ended."""
        self._up[worker] = False
        families = [*self._ended, *self._latest.pop(worker, ())]
        self._ended = [family for family in _sum(families) if family.type in ("counter", "histogram")]

    def page(self) -> bytes:
        """Return the page of all workers."""
        registry = CollectorRegistry()
        registry.register(self)
        return generate_latest(registry)

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        up = GaugeMetricFamily(
            f"{_PREFIX}worker_up", "1 if the worker answers; else its figures are old.", labels=["worker"]
        )
        for worker, answers in sorted(self._up.items()):
            up.add_metric([str(worker)], answers)
        yield up
        yield from _sum([*self._ended, *(family for families in self._latest.values() for family in families)])


def _sum(families: Iterable[Metric]) -> Iterator[Metric]:
    """Yield each family once, with its samples added up."""
    merged: dict[str, tuple[Metric, dict]] = {}
    for family in families:
        _, samples = merged.setdefault(family.name, (Metric(family.name, family.documentation, family.type), {}))
        for sample in family.samples:
            key = sample.name, tuple(sample.labels.items())
            samples[key] = _together(sample.name, samples[key], sample.value) if key in samples else sample.value
    for metric, samples in merged.values():
        for (name, labels), value in samples.items():
            metric.add_sample(name, dict(labels), value)
        yield metric


def _together(name: str, one: float, other: float) -> float:
    if name == _PER_TOKEN:  # the same cost by the tokens of each
        return 1 / (1 / one + 1 / other) if one and other else one or other
    if name.startswith(_SAME) and not name.startswith(_EACH):
        return max(one, other)
    if name.endswith("_created"):
        return min(one, other)
    return one + other
