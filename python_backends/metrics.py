"""Metric families of Triton's metrics endpoint, created once and updated by one thread.

Every update through Triton's Python API is a call to the server process (~10 µs), so hot paths only append to a queue,
and ``flush`` makes the calls a few times a second.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from contract import manifest as manifests
from contract.errors import BY_NAME

# OpenTelemetry's bucket advice for gen_ai.server.* (seconds).
TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
TPOT_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)
COALESCING_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1)
DURATION_BUCKETS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)

PHASES = "trident_time_to_first_token_phase_seconds"
PHASES_HELP = "Time to first token by phase: tokenize, queue, prefill, first_decode, detokenize."

_MAX_PENDING = 20_000  # observations kept between two flushes; beyond that the oldest are dropped


class Metrics:
    """The metrics of one model."""

    def __init__(self, family: Callable[[str, str, str], Any]) -> None:
        """family: return a Triton metric family; takes name, description and kind, see triton_io.metric_family."""
        self._family = cache(family)
        self._metrics: dict[tuple[Any, ...], Any] = {}
        self._gauges: dict[tuple[Any, ...], float] = {}
        self._pending: deque[tuple[str, Any, float]] = deque(maxlen=_MAX_PENDING)

    def counter(self, name: str, description: str, **labels: str) -> Callable[..., None]:
        """Return a function that adds a value, 1 by default, to the counter."""
        metric = self._metric(name, description, "counter", labels)

        def add(value: float = 1.0) -> None:
            self._pending.append(("increment", metric, value))

        return add

    def histogram(
        self, name: str, description: str, buckets: Sequence[float], **labels: str
    ) -> Callable[[float], None]:
        """Return a function that observes a value."""
        metric = self._metric(name, description, "histogram", labels, buckets)
        return lambda value: self._pending.append(("observe", metric, value))

    def gauge(self, name: str, description: str, **labels: str) -> Callable[[float], None]:
        """Return a function that sets the gauge; an unchanged value costs no call."""
        key = (name, *sorted(labels.items()))
        metric = self._metric(name, description, "gauge", labels)

        def set_value(value: float) -> None:
            if self._gauges.get(key) != value:
                self._gauges[key] = value
                self._pending.append(("set", metric, value))

        return set_value

    def errors(self, **labels: str) -> Callable[[Exception], None]:
        """Return a function that counts a request that was refused or failed, by its error."""
        name, what = "trident_errors_total", "Requests refused or failed, by error"
        counts = {kind: self.counter(name, what, **labels, error_type=kind) for kind in BY_NAME}
        return lambda error: counts[type(error).__name__]()

    def show_engine(self, engine_dir: Path, manifest: manifests.EngineManifest) -> None:
        """Set the gauge that names the engine. Caches in front of the server use the digest in their keys."""
        labels = {"engine": manifest.name, "kind": manifest.kind}
        labels["manifest_sha256"] = manifests.sha256_file(engine_dir / manifests.FILE_NAME)
        self.gauge("trident_engine_info", "1; the labels name the engine that is served", **labels)(1)

    def flush(self) -> None:
        """Send everything pending to Triton, a counter's values as their sum. One thread only. Gauges come last: a page
        that was read meanwhile and says that nothing runs has counted what ran."""
        try:
            self._send_pending()
        except Exception:
            self._gauges.clear()  # which of them were sent is unknown, so the next values all are
            raise

    def _send_pending(self) -> None:
        sums: dict[Any, float] = {}
        gauges: dict[Any, float] = {}
        for _ in range(len(self._pending)):
            action, metric, value = self._pending.popleft()
            if action == "increment":
                sums[metric] = sums.get(metric, 0.0) + value
            elif action == "set":
                gauges[metric] = value
            else:
                metric.observe(value)
        for metric, value in sums.items():
            if value:
                metric.increment(value)
        for metric, value in gauges.items():
            metric.set(value)

    def _metric(
        self, name: str, description: str, kind: str, labels: dict[str, str], buckets: Sequence[float] | None = None
    ) -> Any:
        key = (name, *sorted(labels.items()))
        if key not in self._metrics:
            extra = {"buckets": [float(bucket) for bucket in buckets]} if buckets else {}
            self._metrics[key] = self._family(name, description, kind).Metric(labels=labels, **extra)
        return self._metrics[key]


class AdapterMetrics:
    """Count the requests of each adapter, and say which adapters there are. Any thread may call it."""

    def __init__(self, metrics: Metrics, adapters: Sequence[str], **labels: str) -> None:
        name, what = "trident_adapter_requests_total", "Accepted requests by LoRA adapter"
        self._totals = {adapter: metrics.counter(name, what, **labels, adapter=adapter) for adapter in adapters}
        name, what = "trident_adapter_sends_total", "Requests that took their adapter's weights to the engine"
        self._sends = {
            (adapter, cause): metrics.counter(name, what, **labels, adapter=adapter, cause=cause)
            for adapter in adapters
            for cause in ("first", "again")
        }
        if adapters:  # in the form that endpoint pickers of the Gateway API inference extension read
            what = "LoRA adapters that are loaded, always all of them; the value is the time since when"
            every = {"running_lora_adapters": ",".join(adapters), "waiting_lora_adapters": ""}
            metrics.gauge("vllm:lora_requests_info", what, max_lora=str(len(adapters)), **every)(time.time())

    def accepted(self, adapter: str, send_cause: str = "") -> None:
        """Count an accepted request. send_cause: first or again if it takes the weights along."""
        self._totals[adapter](1)
        if send_cause:
            self._sends[adapter, send_cause](1)
