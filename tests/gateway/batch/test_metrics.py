"""The metrics of batches exist from the start and tell a stall."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from gateway.batch.metrics import BatchMetrics


def test_every_series_is_there_at_zero_and_the_stall_is_read_at_the_scrape() -> None:
    registry, stalled = CollectorRegistry(), [0.0]
    metrics = BatchMetrics(registry, lambda: stalled[0])
    for outcome in ("completed", "failed", "retried", "preempted"):
        assert registry.get_sample_value("trident_gateway_batch_lines_total", {"outcome": outcome}) == 0
    for status in ("validating", "in_progress", "finalizing", "cancelling"):
        assert registry.get_sample_value("trident_gateway_batches", {"status": status}) == 0
    stalled[0] = 7.5
    assert registry.get_sample_value("trident_gateway_batch_stalled_seconds") == 7.5
    metrics.lines.labels("completed").inc()
    assert registry.get_sample_value("trident_gateway_batch_lines_total", {"outcome": "completed"}) == 1
