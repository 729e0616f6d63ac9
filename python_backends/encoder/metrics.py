"""The encoder's metrics: TensorRT-LLM's families, as far as they have a meaning here, and its batches."""

from __future__ import annotations

import time

from contract.errors import BY_NAME, TridentError
from python_backends.metrics import DURATION_BUCKETS, Metrics

_ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64)


class EncoderMetrics:
    """Updated and flushed by the thread that runs the model. slots: requests that it runs at once."""

    def __init__(self, metrics: Metrics, model: str, version: str, slots: int, engine: dict[str, str]) -> None:
        """engine: labels that describe the engine."""
        names = {"model": model, "version": version}
        self._metrics = metrics
        self._running = {
            state: metrics.gauge("nv_trt_llm_request_metrics", "Requests by state", **names, request_type=state)
            for state in ("active", "scheduled", "max", "waiting", "context")
        }
        self._steps = metrics.gauge(
            "nv_trt_llm_general_metrics", "Forward passes", **names, general_type="iteration_counter"
        )
        self._input_tokens = metrics.counter("trident_input_tokens_total", "Tokens of accepted inputs", **names)
        self._requests = metrics.counter("trident_requests_total", "Finished requests", **names, finish_reason="stop")
        self._rows = metrics.histogram("trident_encoder_batch_rows", "Texts of a forward pass", _ROW_BUCKETS, **names)
        self._padded = metrics.counter("trident_encoder_padded_tokens_total", "Tokens computed, with padding", **names)
        self._seconds = metrics.histogram(
            "gen_ai_server_request_duration_seconds", "Time of a batch of requests", DURATION_BUCKETS, **names
        )
        self._errors = {
            name: metrics.counter("trident_errors_total", "Requests refused or failed", **names, error_type=name)
            for name in BY_NAME
        }
        metrics.gauge("trident_engine_info", "The engine that is served", **engine)(1)
        self._running["max"](slots)
        self._passes = 0
        self.ended(time.monotonic())

    def began(self, requests: int) -> None:
        """Show a batch of requests that begins."""
        self._running["active"](requests)
        self._running["scheduled"](requests)
        self._metrics.flush()

    def passed(self, rows: int, tokens: int) -> None:
        """Count one forward pass. tokens: with padding."""
        self._passes += 1
        self._rows(rows)
        self._padded(tokens)

    def done(self, tokens: int) -> None:
        """Count a finished request of that many tokens."""
        self._requests(1)
        self._input_tokens(tokens)

    def refused(self, error: TridentError) -> None:
        self._errors[type(error).__name__](1)

    def ended(self, began_s: float) -> None:
        """Show that nothing runs, and send everything pending."""
        for state in ("active", "scheduled", "waiting", "context"):
            self._running[state](0)
        if self._passes:
            self._seconds(time.monotonic() - began_s)
        self._steps(self._passes)
        self._metrics.flush()
