"""The gateway's metrics count as prometheus_client's own do."""

from __future__ import annotations

import prometheus_client
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from gateway.telemetry import series

BOUNDS = (0.5, 1.0, 2.0)
AMOUNTS = st.lists(st.one_of(st.sampled_from(BOUNDS), st.floats(0, 10)), max_size=20)


@given(amounts=AMOUNTS)
def test_a_scrape_shows_what_the_librarys_own_metrics_would(amounts: list[float]) -> None:
    pages = []
    for kinds in (series, prometheus_client):
        registry = CollectorRegistry()
        counter = kinds.Counter("counted", "text", ("kind",), registry=registry).labels("a")
        gauge = kinds.Gauge("level", "text", registry=registry)
        histogram = kinds.Histogram("taken", "text", ("kind",), registry=registry, buckets=BOUNDS).labels("a")
        for amount in amounts:
            counter.inc(amount)
            counter.inc()
            gauge.inc(amount)
            gauge.dec()
            histogram.observe(amount)
        lines = generate_latest(registry).decode().splitlines()
        pages.append([line for line in lines if "_created" not in line])
    assert pages[0] == pages[1]
