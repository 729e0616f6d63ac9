"""Load of a server, read from a scrape of its metrics."""

from __future__ import annotations

from dataclasses import dataclass

from contract import prometheus

RESPONSES = ("nv_inference_request_success", "nv_inference_request_failure")
REQUESTS = "nv_trt_llm_request_metrics"
# Values of request_type in TensorRT-LLM's gauge, which both engines export: requests that run and that wait.
IN_ENGINE = ("active", "waiting", "scheduled", "context")
# Those that the last step made tokens of, in the same table.
LAST_STEP, GENERATING = "nv_trt_llm_inflight_batcher_metrics", "generation_requests"
# Requests in a model's queue, and streams whose last text is still in a detokenizer.
OUTSIDE_ENGINE = ("nv_inference_pending_request_count", "trident_open_streams")


@dataclass(frozen=True)
class ServerMetrics:
    """One scrape.

    responses: successes and failures of the ensembles' last models so far; grows while any stream advances, and with
        the engine's probes of silent streams.
    in_engine: requests inside the engine by its gauges; None if it exports none.
    outside_engine: requests in the queues of the ensemble's models, and streams still in a detokenizer.
    steps: engine steps so far; None if it does not count them.
    generating: sequences that the last engine step made tokens of; None if it does not tell.
    """

    responses: float
    in_engine: float | None
    outside_engine: float = 0.0
    steps: float | None = None
    generating: float | None = None


def parse(text: str, *last: str) -> ServerMetrics:
    """Parse Prometheus ``text``. last: names of the ensembles' last steps."""
    found = prometheus.parse(text, (*RESPONSES, *OUTSIDE_ENGINE, "nv_trt_llm_"))
    in_engine = [value for labels, value in found.matching(REQUESTS) if labels.get("request_type") in IN_ENGINE]
    steps = [value for _, value in found.matching("nv_trt_llm_general_metrics", general_type="iteration_counter")]
    generating = [value for _, value in found.matching(LAST_STEP, inflight_batcher_specific_metric=GENERATING)]
    return ServerMetrics(
        sum(found.value(name, model=model) for name in RESPONSES for model in last),
        sum(in_engine) if in_engine else None,
        sum(found.value(name) for name in OUTSIDE_ENGINE),
        steps[-1] if steps else None,
        generating[-1] if generating else None,
    )


class IdleDetector:
    """Tells from successive scrapes whether a server that admits no requests has none left.

    idle_s: seconds without requests and without a new response that count as idle; more than the engine's gauges lag
        (100 ms in both engines).
    """

    def __init__(self, idle_s: float) -> None:
        self._idle_s = idle_s
        self._since_s = 0.0
        self._last: ServerMetrics | None = None

    def is_idle(self, metrics: ServerMetrics, now_s: float) -> bool:
        """Add a scrape made at ``now_s`` of any monotonic clock."""
        if metrics != self._last:
            self._last, self._since_s = metrics, now_s
        return metrics.in_engine == 0 and metrics.outside_engine == 0 and now_s - self._since_s >= self._idle_s
