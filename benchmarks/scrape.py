"""Scrape Prometheus metrics, and read and subtract their histograms."""

from __future__ import annotations

import math
import threading
import urllib.request
from dataclasses import dataclass

from contract import prometheus
from contract.errors import Unavailable
from contract.prometheus import Metrics


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


class Sampler:
    """A context manager that calls ``sample`` again and again from a thread of its own."""

    def __init__(self, every_s: float) -> None:
        self._every_s, self._stop = every_s, threading.Event()
        self._thread = threading.Thread(target=self._repeat, name="sampler", daemon=True)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._stop.set()
        self._thread.join(5)

    def sample(self) -> None:
        raise NotImplementedError

    def _repeat(self) -> None:
        while not self._stop.wait(self._every_s):
            self.sample()


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
