"""How much is going on inside a server, read from its metrics page."""

from __future__ import annotations

from dataclasses import dataclass

from contract import prometheus

ANSWERS = ("nv_inference_request_success", "nv_inference_request_failure")
REQUESTS = "nv_trt_llm_request_metrics"
# TensorRT-LLM's gauge of the engine, in both engines: what runs and what waits.
LIVE = ("active", "waiting", "scheduled", "context")
# Requests in a model's queue, and streams whose last text the detokenizer has not made.
BESIDE_ENGINE = ("nv_inference_pending_request_count", "trident_open_streams")


@dataclass(frozen=True)
class Traffic:
    """answered: responses and failures of the model that answers last; grows while any stream moves, and with the
    engine's probes of silent ones.

    steps: of the engine so far, None if it does not count them.
    live: requests inside the engine by its own gauges, None if it has none.
    beside: requests in the queues of the ensemble's models, and streams still in the detokenizer.
    """

    answered: float
    live: float | None
    beside: float = 0.0
    steps: float | None = None


def read(metrics: str, last_model: str) -> Traffic:
    """``metrics``: the page in Prometheus text format. ``last_model``: the ensemble's last step."""
    found = prometheus.parse(metrics, (*ANSWERS, *BESIDE_ENGINE, "nv_trt_llm_"))
    live = [value for labels, value in found.matching(REQUESTS) if labels.get("request_type") in LIVE]
    steps = [value for _, value in found.matching("nv_trt_llm_general_metrics", general_type="iteration_counter")]
    return Traffic(
        sum(found.value(name, model=last_model) for name in ANSWERS),
        sum(live) if live else None,
        sum(found.value(name) for name in BESIDE_ENGINE),
        steps[-1] if steps else None,
    )


class Quiet:
    """Whether a server that admits nothing new has nothing left to do: call it with successive snapshots.

    True once the engine, the queues and the detokenizer were empty and no answer was given for ``for_s``. That must
    be longer than the engine's gauges lag (100 ms in both engines).
    """

    def __init__(self, for_s: float) -> None:
        self._for_s = for_s
        self._since_s = 0.0
        self._last: Traffic | None = None

    def __call__(self, now: Traffic, now_s: float) -> bool:
        """``now_s`` is any monotonic clock."""
        if now != self._last:
            self._last, self._since_s = now, now_s
        return now.live == 0 and now.beside == 0 and now_s - self._since_s >= self._for_s
