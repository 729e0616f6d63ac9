from benchmarks.gateway import burst
from benchmarks.record import Record


def record(at_s, ttft_s, error=""):
    messages = [] if error else [(at_s + ttft_s, 1)]
    return Record(0, at_s, at_s, messages, ended_s=at_s + ttft_s, finish_reason="" if error else "length", error=error)


def test_recovery_is_counted_from_the_bursts_end_to_the_last_bad_window():
    good = [record(10 + n / 10, 0.05) for n in range(100)]
    assert burst.recovered_s(good, 50.0, 10.0, 20.0) == 0.0
    refused = record(11.2, 0.0, "Overloaded: full")
    assert burst.recovered_s([*good, refused], 50.0, 10.0, 20.0) == 1.5
    slow = [record(10 + n / 10, 0.5) for n in range(100)]
    assert burst.recovered_s(slow, 50.0, 10.0, 20.0) == float("inf")
