"""NVIDIA's perf_analyzer at the real server, streaming and unary, at a concurrency and at a request rate."""

from __future__ import annotations

import pytest

from benchmarks import agreement, other_clients
from contract.errors import NotFound


@pytest.fixture(scope="module")
def installed() -> None:
    try:
        other_clients.libraries()
    except NotFound as error:
        pytest.skip(str(error))


def test_it_measures_every_load_in_both_ways(installed, replica, tmp_path, capsys):
    firsts_ms = []
    for unary in (False, True):
        out = tmp_path / str(unary)
        assert agreement.run(["perf_analyzer"], "demo", replica.grpc_url, [2], [10.0], 12, 1, unary, out) == 0
        for load in ("2-at-once", "10-a-second"):
            found = other_clients.read_csv(out / "perf_analyzer" / f"{load}-0")
            requests_per_s, responses_per_s = found["requests/s"], found["responses/s"]
            firsts_ms += [found["TTFT p50, ms"]] if "TTFT p50, ms" in found else []  # it loses some profiles
            assert requests_per_s > 0
            # Streaming brings many responses a request, unary one and the empty last one that some servers add.
            assert responses_per_s < 3 * requests_per_s if unary else responses_per_s > 5 * requests_per_s
    assert firsts_ms and min(firsts_ms) > 0
    assert "skipped:" not in capsys.readouterr().out
