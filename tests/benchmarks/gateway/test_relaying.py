import pytest

from benchmarks.driver import LoadResult
from benchmarks.gateway import relaying
from benchmarks.gateway.load_test import LoadTest
from benchmarks.gateway.relaying import Relayed
from benchmarks.record import Record


def test_a_latency_is_added_to_that_of_the_direct_path_under_the_same_load():
    rows = [Relayed("direct", "", 16, True, ttft_ms=[1.0, 2.0, 3.0]), Relayed("direct", "", 64, True, ttft_ms=[9.0])]
    rows.append(Relayed("gateway", "direct", 16, True, ttft_ms=[2.0, 4.0, 6.0]))
    assert relaying.added_ms(rows, rows[-1], "ttft_ms", "p50") == 2.0


def test_rounds_are_added_up_without_the_scripts_own_delay():
    row = Relayed("gateway", "direct", 16, True)
    record = Record(0, 0.0, 0.0, [(0.03, 2)], [0.001] * 2, ended_s=0.5)
    refused = Record(1, 0.0, 0.0, ended_s=0.1, error="Overloaded: full")
    for _ in range(2):
        row.add(LoadTest(LoadResult([record, refused], 0.0, []), cpu_s=0.001))
    assert row.tokens == 4 and row.us_per_token == pytest.approx(500) and row.errors == {"Overloaded": 2}
    assert row.ttft_ms == pytest.approx([10.0, 10.0]) and row.to_json()["transit_ms"]["p50"] == pytest.approx(1.0)


def test_the_table_has_a_row_for_every_load():
    rows = [Relayed("direct", "", 16, True, ttft_ms=[1.0]), Relayed("gateway", "direct", 16, True, ttft_ms=[3.5])]
    lines = relaying.described(rows).splitlines()
    assert len(lines) == 4 and "+2.50" in lines[-1]
