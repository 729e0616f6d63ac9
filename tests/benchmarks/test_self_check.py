import dataclasses

import pytest

from benchmarks import self_check
from benchmarks.driver import GeneratorUse
from benchmarks.machine import HostLoad
from benchmarks.record import Record
from benchmarks.scrape import HistogramFigures, ServerSide
from contract.generation import Timings

TTFT_S = 0.1
ALONE = HostLoad(0.9, 0.01, 0.0)
CALM = GeneratorUse(cpu_s=1.0, wall_s=10.0, lags_s=[0.001] * 100)


def honest_records(count=20, more_s=0.005):
    """Requests of 4 tokens; the server reports TTFT_S, the client measures ``more_s`` more."""
    return [
        Record(
            n,
            n * 1.0,
            n * 1.0,
            [(n + TTFT_S + more_s, 1), (n + 0.2, 3)],
            ended_s=n + 0.21,
            input_tokens=10,
            usage_tokens=4,
            finish_reason="length",
            timings=Timings(n * 10**9, n * 10**9, n * 10**9 + round(TTFT_S * 1e9), n * 10**9 + 2 * 10**8),
        )
        for n in range(count)
    ]


def server(records, **changes):
    ttft = HistogramFigures(len(records), TTFT_S, TTFT_S, TTFT_S, TTFT_S)
    tokens = {"input_tokens": 10 * len(records), "output_tokens": 4 * len(records)} | changes
    return ServerSide(
        {"length": len(records)},
        cached_tokens=0,
        cancellations={},
        errors={},
        latencies={"ttft": ttft},
        phases={},
        **tokens,
    )


def failed(records, found_server, generator=CALM, host_load=ALONE, open_loop=True):
    found = self_check.checks(records, found_server, [generator], host_load, open_loop)
    return {check.name for check in found if check.ok is False}, self_check.verdict(found)


def test_an_honest_run_is_sound():
    records = honest_records()
    assert failed(records, server(records)) == (set(), "sound")


def test_the_only_message_of_an_answer_is_compared_with_the_last_token():
    whole = [dataclasses.replace(record, messages=[(record.intended_s + 0.205, 4)]) for record in honest_records()]
    assert self_check.ttft_per_request(whole).ok
    late = [dataclasses.replace(record, messages=[(record.intended_s + 0.405, 4)]) for record in whole]
    assert self_check.ttft_per_request(late).ok is False


def test_a_run_without_a_single_answer_is_not_sound():
    records = [Record(n, float(n), float(n), ended_s=n + 0.1, error="Unavailable: gone") for n in range(3)]
    assert "answers" in failed(records, None)[0]
    assert "answers" not in failed([*honest_records(1), *records], None)[0]


@pytest.mark.parametrize("more_s", [-0.05, 0.2], ids=["less than the server's", "far more"])
def test_a_server_ttft_that_contradicts_the_clients_is_detected(more_s):
    records = honest_records(more_s=more_s)
    names, verdict = failed(records, server(records))
    assert names == {"TTFT, request by request", "TTFT, server's histogram"} and verdict.startswith("doubtful: TTFT")


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"output_tokens": 79}, "output tokens"),
        ({"output_tokens": 9999}, "output tokens"),
        ({"input_tokens": 199}, "input tokens"),
    ],
)
def test_a_different_token_count_is_detected(changes, name):
    records = honest_records()
    assert failed(records, server(records, **changes))[0] == {name}


def test_a_usage_that_differs_from_the_tokens_is_detected():
    records = honest_records()
    records[3].usage_tokens = 5
    assert failed(records, server(records))[0] == {"usage"}


def test_tokens_of_liveness_probes_are_tolerated():
    records = honest_records()
    assert failed(records, server(records, output_tokens=4 * 20 + 5))[0] == set()


def test_cancelled_requests_may_have_generated_more_than_arrived():
    records = honest_records()
    records[0] = dataclasses.replace(
        records[0], cancelled=True, finish_reason="", usage_tokens=None, input_tokens=0, timings=None
    )
    assert failed(records, server(records, output_tokens=9000))[0] == set()
    assert failed(records, server(records, output_tokens=70))[0] == {"output tokens"}


def test_a_saturated_generator_is_detected():
    records = honest_records()
    busy = GeneratorUse(cpu_s=9.5, wall_s=10.0, lags_s=[0.001] * 100)
    assert failed(records, server(records), busy)[0] == {"load generator: CPU"}
    found = self_check.checks(records, None, [CALM, busy], ALONE, False)
    assert self_check.saturated(found) and not self_check.saturated(
        self_check.checks(records, None, [CALM], ALONE, False)
    )


def test_a_late_event_loop_is_detected():
    records = honest_records()
    late = GeneratorUse(cpu_s=1.0, wall_s=10.0, lags_s=[0.001] * 97 + [0.1] * 3)
    assert failed(records, server(records), late)[0] == {"load generator: event loop"}


def test_late_sends_are_detected_in_an_open_loop():
    records = honest_records()
    for record in records:
        record.intended_s -= 0.1
    assert failed(records, server(records))[0] == {"load generator: punctuality"}
    assert failed(records, server(records), open_loop=False)[0] == set()


def test_load_of_other_processes_is_detected():
    records = honest_records()
    assert failed(records, server(records), host_load=HostLoad(0.5, 0.3, 0.0))[0] == {"machine load"}
    assert failed(records, server(records), host_load=HostLoad(0.5, 0.0, 0.3))[0] == {"machine load"}


def test_a_check_without_data_is_reported():
    records = [dataclasses.replace(record, timings=None, usage_tokens=None) for record in honest_records()]
    names, verdict = failed(records, None)
    assert names == set() and verdict.startswith("sound as far as it was checked (not checked: TTFT")
