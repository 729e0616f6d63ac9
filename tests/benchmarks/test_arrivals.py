import json
import random
import statistics
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import arrivals
from benchmarks.arrivals import Arrival, Bursty, Phases, Poisson, Ramp, Trace
from contract.errors import InvalidArgument

PROCESSES = [Poisson(50), Bursty(50, 5), Ramp(20, 80), Phases(((25, 100), (75, 100)))]


def instants(process, seed=0, duration_s=200.0):
    return [arrival.at_s for arrival in process.instants(random.Random(seed), duration_s)]


@pytest.mark.parametrize("process", PROCESSES, ids=str)
@given(seed=st.integers(0, 2**32), duration_s=st.floats(0.01, 5))
def test_instants_are_in_order_within_the_duration_and_the_same_for_the_same_seed(process, seed, duration_s):
    once = instants(process, seed, duration_s)
    assert once == sorted(once) and all(0 <= at_s < duration_s for at_s in once)
    assert once == instants(process, seed, duration_s)


@pytest.mark.parametrize("process", PROCESSES, ids=str)
def test_the_mean_rate_is_the_one_asked_for(process):
    # 10,000 expected; bursts of 5 have nine times Poisson's variance: a deviation of 300.
    assert process.expected(200.0) == 10_000
    assert abs(len(instants(process)) - 10_000) < 1_500
    assert instants(process) != instants(process, seed=1)


def test_poisson_gaps_have_the_deviation_of_an_exponential():
    at = instants(Poisson(50))
    gaps = [later - earlier for earlier, later in zip(at, at[1:], strict=False)]
    assert abs(statistics.stdev(gaps) / statistics.mean(gaps) - 1) < 0.05


def counts_per_second(process):
    at = instants(process)
    return [sum(second <= at_s < second + 1 for at_s in at) for second in range(200)]


def test_bursts_make_the_number_of_requests_vary_as_they_should():
    def dispersion(process):
        counts = counts_per_second(process)
        return statistics.variance(counts) / statistics.mean(counts)

    assert 0.7 < dispersion(Poisson(50)) < 1.4
    assert 6 < dispersion(Bursty(50, 5)) < 13  # 2 · 5 - 1


def test_the_requests_of_a_burst_come_at_the_same_instant():
    at = instants(Bursty(50, 5))
    assert abs(len(at) / len(set(at)) - 5) < 0.5


@pytest.mark.slow
def test_phases_have_their_own_rates_one_after_the_other():
    counts = counts_per_second(Phases(((10, 100), (500, 100))))
    assert 8 < statistics.mean(counts[:100]) < 12 and 480 < statistics.mean(counts[100:]) < 520


def test_a_ramp_climbs():
    counts = counts_per_second(Ramp(20, 80))
    assert 20 * 0.8 < statistics.mean(counts[:20]) < 30 and 70 < statistics.mean(counts[-20:]) < 90


def test_a_ramp_may_begin_or_end_at_nothing_but_not_both():
    up, down = arrivals.parse("ramp:0,40"), arrivals.parse("ramp:40,0")
    for ramp in (up, down):
        instants = [arrival.at_s for arrival in ramp.instants(random.Random(1), 50.0)]
        assert 850 < len(instants) < 1150  # 1,000 expected, deviation 32
    assert down.last_per_s == up.first_per_s == 0
    with pytest.raises(InvalidArgument, match="^arrivals: must have a ramp with one end above 0, got 'ramp:0,0'"):
        arrivals.parse("ramp:0,0")


def test_a_ramp_that_falls_to_nothing_ends():
    at = instants(Ramp(50, 1e-9), duration_s=10)
    assert 200 < len(at) < 300 and at[-1] < 10


def test_a_level_ramp_is_poisson():
    assert instants(Ramp(50, 50)) == pytest.approx(instants(Poisson(50)))


def test_a_trace_is_replayed_in_order_and_faster_if_asked(tmp_path: Path):
    file = tmp_path / "trace.jsonl"
    rows = [{"at_s": 4, "input_tokens": 7}, {"at_s": 1.0, "output_tokens": 9}]
    file.write_text("\n".join(json.dumps(row) for row in rows))
    assert arrivals.read_trace(file).rows == (Arrival(1.0, None, 9), Arrival(4.0, 7, None))
    assert instants(arrivals.parse(f"trace:{file},2"), duration_s=1.9) == [0.5]
    csv = tmp_path / "trace.csv"
    csv.write_text("at_s,input_tokens\n0.5,12\n2,\n")
    assert arrivals.parse(f"trace:{csv}") == Trace((Arrival(0.5, 12), Arrival(2.0)))


@pytest.mark.parametrize("text", ["", "poisson", "bursty:5", "ramp:1", "uniform:3"])
def test_what_is_no_process_is_refused_with_what_is_allowed(text):
    with pytest.raises(InvalidArgument, match=r"^arrivals: must be poisson:RATE"):
        arrivals.parse(text)


def test_a_burst_has_one_request_at_least():
    with pytest.raises(InvalidArgument, match="^arrivals: must have a burst size of 1 at least, got 'bursty:5,0.5'"):
        arrivals.parse("bursty:5,0.5")


@pytest.mark.parametrize("text", ["poisson:0", "poisson:-1", "poisson:nan", "poisson:1e12", "bursty:1,1e12"])
def test_numbers_out_of_range_are_refused_with_the_range(text):
    with pytest.raises(InvalidArgument, match=r"^arrivals: must be .* above 0 and up to 1e\+06, got"):
        arrivals.parse(text)


@pytest.mark.parametrize(
    "line",
    [
        '{"at": 1}',
        "not json",
        '{"at_s": -1}',
        '{"at_s": 1, "input_tokens": 0}',
        "7",
        '{"at_s": 1, "input_tokens": 3.7}',
        '{"at_s": 1, "input_tokens": 1e400}',
        '{"at_s": 1' + "0" * 400 + "}",
        "[" * 100_000,
    ],
    ids=lambda line: line[:40],
)
def test_a_line_that_is_no_request_is_refused_by_its_number(tmp_path: Path, line):
    file = tmp_path / "trace.jsonl"
    file.write_text('{"at_s": 0}\n' + line)
    with pytest.raises(InvalidArgument, match=r"^arrivals: must have one request per line .*") as caught:
        arrivals.read_trace(file)
    assert f", got {file}, request 2: " in caught.value.problem


def test_traces_that_are_missing_or_empty_are_refused(tmp_path: Path):
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(InvalidArgument, match="arrivals: must have one request at least, got .*empty.jsonl"):
        arrivals.parse(f"trace:{tmp_path}/empty.jsonl")
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidArgument, match="arrivals: must name a file of UTF-8 text, got .*bytes.jsonl: "):
        arrivals.parse(f"trace:{tmp_path}/bytes.jsonl")
    with pytest.raises(InvalidArgument, match="can be read, got .*No such file"):
        arrivals.parse("trace:/nowhere.jsonl")
