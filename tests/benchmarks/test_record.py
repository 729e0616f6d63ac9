from dataclasses import asdict

from benchmarks.record import Record
from contract.generation import Timings


def test_a_record_survives_json():
    answered = Record(3, 1.0, 1.1, [(1.2, 2), (1.3, 3)], [0.01] * 5, 1.4, 7, 5, "stop", timings=Timings(1, 2, 3, 4))
    assert Record.from_json(asdict(answered)) == answered
    failed = Record(4, 1.0, error="Overloaded: full", retry_after=True)
    assert Record.from_json(asdict(failed)) == failed


def test_latencies_count_from_the_intended_instant_and_the_send():
    record = Record(0, intended_s=1.0, sent_s=3.0, messages=[(3.5, 2), (4.0, 1)], ended_s=4.0, finish_reason="length")
    assert (record.ttft_s, record.ttft_from_send_s, record.latency_s) == (2.5, 0.5, 3.0)
    assert record.ok and record.tokens == 3 and record.gaps == [(0.5, 1)]


def test_a_failed_or_cancelled_request_is_not_ok():
    assert not Record(0, 0.0, finish_reason="length", error="EngineFailed: x").ok
    assert not Record(0, 0.0, finish_reason="length", cancelled=True).ok
    assert not Record(0, 0.0, finish_reason="cancelled").ok
    assert Record(0, 0.0, error="Overloaded: queue: full").error_type == "Overloaded"
    assert Record(0, 0.0).ttft_s is None and Record(0, 0.0).ttft_from_send_s is None
