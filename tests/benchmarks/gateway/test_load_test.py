import math
import os
import subprocess

import pytest

from benchmarks.driver import Extent, LoadResult
from benchmarks.gateway import contenders, load_test
from benchmarks.gateway.load_test import LoadTest
from benchmarks.gateway.script import Pace
from benchmarks.lengths import Fixed
from benchmarks.record import Record
from benchmarks.workload import Workload

PACE = Pace(0.05, 0.01)
WORKLOAD = Workload(3, None, output_tokens=Fixed(5))


def record(sent_s=0.0, messages=(), **more):
    return Record(0, sent_s, sent_s, list(messages), ended_s=sent_s + 1.0, **more)


def test_latencies_are_of_requests_after_the_warm_up_and_errors_of_all():
    early = record(0.5, [(0.6, 1)], transit_s=[0.001])
    late = record(2.0, [(2.1, 2), (2.4, 3)], transit_s=[0.002] * 5)
    refused, failed = record(3.0, error="Overloaded: full"), record(3.0, error="EngineFailed: it broke")
    found = LoadTest(LoadResult([early, late, refused, failed], 0.0, []), 1.0, cpu_s=0.6)
    assert found.tokens == 6 and found.us_per_token == pytest.approx(1e5) and found.wall_s == 4.0
    assert found.ttft_ms == pytest.approx([100.0]) and found.transit_ms == pytest.approx([2.0] * 5)
    assert sorted(found.gaps_ms) == pytest.approx([0.0, 0.0, 0.0, 300.0])
    assert found.errors == {"Overloaded": 1, "EngineFailed": 1}


def test_the_cpu_of_a_contender_that_ended_is_not_known():
    with subprocess.Popen(["sleep", "60"]) as child:
        with load_test.watching(contenders.Contender("crashed", {}, child.pid), (), used := {}):
            child.kill()
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert math.isnan(used["cpu_s"]) and math.isnan(used["busiest_s"]) and not used["alive"]


@pytest.mark.slow
def test_every_token_is_recorded_over_both_protocols_and_from_both_sources(tmp_path):
    extent = Extent(None, 0.0, 3)
    with contenders.scripted("replica", tmp_path) as replica, contenders.gateway(replica, tmp_path) as gateway:
        for protocol, url in (("grpc", replica), *gateway.urls.items()):
            load = load_test.load(protocol, url, PACE, WORKLOAD, extent)
            found = load_test.run(load, gateway, ("trident_gateway_in_flight",))
            assert all(record.ok for record in found.records) and found.tokens == 15, protocol
            assert min(found.ttft_ms) >= 50 and found.rss_before_bytes > 0 and found.cpu_s >= 0 and found.alive
        unknown = load_test.load("http", gateway.urls["http"], PACE, WORKLOAD, extent, model="none")
        assert load_test.run(unknown, gateway).errors == {"NotFound": 3}
    with contenders.scripted("openai", tmp_path) as upstream:
        found = load_test.run(load_test.load("http", upstream, PACE, WORKLOAD, extent), None)
        assert found.tokens == 15 and found.us_per_token == 0.0
