import pytest

from benchmarks.gateway import contenders, limits
from benchmarks.record import Record


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_slow_streams_lose_no_token(tmp_path, protocol):
    with contenders.scripted("replica", tmp_path) as replica, contenders.gateway(replica, tmp_path) as gateway:
        found = limits.connections(gateway, protocol, 20, rate_per_s=200, gap_s=0.4)
    assert (found["ok"], found["lost"], found["errors"]) == (20, 0, {}) and 1 <= found["in_flight"] <= 20
    assert found["peak_rss_mib"] > 0 and f"{protocol}: 20 streams" in limits.described_connections(found)


def test_a_burst_is_told_with_its_failures():
    of = dict.fromkeys(("per_s", "answered", "refused", "hinted", "ttft_before_ms", "ttft_in_burst_p99_ms"), 1.0)
    of |= dict.fromkeys(("refusal_p99_ms", "recovered_s", "rss_before_mib", "peak_rss_mib"), 2.0)
    told = limits.described_burst(of | {"protocol": "http", "errors": {"EngineFailed": 3}, "alive": False})
    assert "http: 1 requests/s for 5 s after 20/s" in told and "errors: 3 EngineFailed" in told
    assert told.endswith("peak 2; IT ENDED")


def record(at_s, ttft_s, error=""):
    messages = [] if error else [(at_s + ttft_s, 1)]
    return Record(0, at_s, at_s, messages, ended_s=at_s + ttft_s, finish_reason="" if error else "length", error=error)


def test_recovery_is_counted_from_the_bursts_end_to_the_last_bad_window():
    good = [record(10 + n / 10, 0.05) for n in range(100)]
    assert limits.recovered_s(good, 50.0, 10.0, 20.0) == 0.0
    refused = record(11.2, 0.0, "Overloaded: full")
    assert limits.recovered_s([*good, refused], 50.0, 10.0, 20.0) == 1.5
    slow = [record(10 + n / 10, 0.5) for n in range(100)]
    assert limits.recovered_s(slow, 50.0, 10.0, 20.0) == float("inf")
