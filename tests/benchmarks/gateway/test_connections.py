import pytest

from benchmarks.gateway import connections, contenders


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_slow_streams_lose_no_token(tmp_path, protocol):
    with contenders.scripted("replica", tmp_path) as replica, contenders.gateway(replica, tmp_path) as gateway:
        found = connections.measure(gateway, protocol, 20, rate_per_s=200, gap_s=0.4)
    assert (found.ok, found.lost, found.errors) == (20, 0, {}) and 1 <= found.in_flight <= 20
    assert found.peak_rss_mib > 0 and f"{protocol}: 20 streams" in connections.described(found)
