"""NVIDIA's perf_analyzer at the real server, streaming and unary, at a concurrency and at a request rate."""

from __future__ import annotations

import pytest

from benchmarks import perf_analyzer
from benchmarks.measurement import ServerUnderTest
from contract.errors import NotFound


@pytest.fixture(scope="module")
def installed() -> None:
    try:
        perf_analyzer.variables(perf_analyzer.environment())
    except NotFound as error:
        pytest.skip(str(error))


def test_it_measures_every_load_in_both_ways(installed, replica, tmp_path, capsys):
    assert perf_analyzer.run(ServerUnderTest(replica.grpc_url), [2], [10.0], 12, tmp_path) == 0
    shown = capsys.readouterr().out
    for kind in perf_analyzer.KINDS:
        for load in ("concurrency-2", "rate-10"):
            (row,) = perf_analyzer.read(tmp_path / f"{kind}-{load}.csv", load)
            requests_per_s, responses_per_s = float(row[1]), float(row[2])
            assert requests_per_s > 0
            # Streaming brings many responses a request, unary one and the empty last one that some servers add.
            assert responses_per_s > 5 * requests_per_s if kind == "streaming" else responses_per_s < 3 * requests_per_s
    assert "failed:" not in shown
