import random
import time

from benchmarks.gateway import script
from benchmarks.gateway.script import Pace, PacedPrompts
from benchmarks.record import Record
from clients.wire import infer_request
from clients.wire.request import build


def test_a_pace_is_found_anywhere_in_a_request():
    pace = Pace(0.25, 0.02, 0.004)
    prompt = PacedPrompts(pace).text(random.Random(1), 7)
    assert script.pace_of(infer_request.generation(build(prompt), "ensemble")) == pace
    assert script.pace_of(b'{"prompt": "hello"}') == Pace()


def test_tokens_are_due_in_order_and_never_before_the_first():
    due = Pace(0.1, 0.01, 0.05).instants(50, 100.0, random.Random(1))
    assert due[0] == 100.1 and due == sorted(due) and len(due) == 50


def test_stamps_have_one_size_however_long_the_machine_has_run(monkeypatch):
    for now_ns in (1, 10**16 - 1, 10**16, 10**18):  # 10**16 ns are 116 days
        monkeypatch.setattr(time, "monotonic_ns", lambda now_ns=now_ns: now_ns)
        record, stamp = Record(0, 0.0), script.stamp()
        assert len(stamp) == script.STAMP_SIZE and script.record_tokens(stamp, record) == script.STAMP_SIZE
        assert record.tokens == 1 and record.transit_s == [0.0]


def test_a_token_that_arrives_is_recorded_with_its_transit_time():
    record, before_ns = Record(0, 0.0), time.monotonic_ns()
    stamp = script.stamp()
    assert len(stamp) == script.STAMP_SIZE
    assert (
        script.record_tokens(b"data: " + stamp + b" " + script.stamp() + b"@12", record)
        == 6 + 2 * script.STAMP_SIZE + 1
    )
    assert script.record_tokens(b": keep-alive", record) == 0
    assert record.tokens == 2 and len(record.messages) == 1
    assert all(0 <= seconds <= (time.monotonic_ns() - before_ns) / 1e9 for seconds in record.transit_s)
