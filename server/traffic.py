"""How much is going on inside a server, read from its metrics page."""

from __future__ import annotations

import re
from dataclasses import dataclass

SAMPLE = re.compile(
    r"^(nv_inference_request_\w+|nv_inference_pending_request_count|nv_trt_llm_\w+_metrics|trident_open_streams)"
    r"\{(.*)\} (\S+)$",
    re.MULTILINE,
)
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
ANSWERS = ("nv_inference_request_success", "nv_inference_request_failure")
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
    answered = beside = 0.0
    live = steps = None
    for name, text, value in SAMPLE.findall(metrics):
        labels = dict(LABEL.findall(text))
        if name in ANSWERS and labels.get("model") == last_model:
            answered += float(value)
        elif name == "nv_trt_llm_request_metrics" and labels.get("request_type") in LIVE:
            live = (live or 0.0) + float(value)
        elif name in BESIDE_ENGINE:
            beside += float(value)
        elif name == "nv_trt_llm_general_metrics" and labels.get("general_type") == "iteration_counter":
            steps = float(value)
    return Traffic(answered, live, beside, steps)


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
