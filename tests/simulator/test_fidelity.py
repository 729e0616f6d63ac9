"""What is known of the error of forecasts."""

from __future__ import annotations

import json

import pytest

from benchmarks.record import Record
from contract.errors import InvalidArgument, Unavailable
from simulator import fidelity
from simulator.scenario import of


def test_what_was_compared_is_told_by_pool(tmp_path, monkeypatch):
    (tmp_path / "known.json").write_text(json.dumps({"demo": {"ttft_p95_error": 0.1}}))
    monkeypatch.setattr(fidelity, "KNOWN", tmp_path / "known.json")
    pools = {name: {"step": {"step_s": 0.1}} for name in "ab"}
    scenario = of({"duration_s": 1.0, "pools": pools, "personas": {"p": {"users": 1}}})
    measured = {**scenario.pools, "a": scenario.pools["a"].model_copy(update={"engine": "demo"})}
    scenario = scenario.model_copy(update={"pools": measured})
    assert fidelity.known(scenario) == {"a": {"ttft_p95_error": 0.1}, "b": {}}


def test_what_was_found_is_kept_unless_others_used_the_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(fidelity, "KNOWN", tmp_path / "known.json")
    fidelity.keep("demo", {"ttft_p95_error": 0.1, "others": 0.01, "steps_take": 1.1})
    fidelity.keep("big", {"ttft_p95_error": 0.2, "others": 0.0, "steps_take": 0.9})
    with pytest.raises(Unavailable, match="other processes used 60% of the machine"):
        fidelity.keep("demo", {"ttft_p95_error": 0.9, "others": 0.6, "steps_take": 1.0})
    with pytest.raises(Unavailable, match="steps take 1.30 times .* calibrate again"):
        fidelity.keep("demo", {"ttft_p95_error": 0.9, "others": 0.0, "steps_take": 1.3})
    known = json.loads((tmp_path / "known.json").read_text())
    assert {name: found["ttft_p95_error"] for name, found in known.items()} == {"demo": 0.1, "big": 0.2}


def test_an_engine_that_was_not_measured_is_named():
    with pytest.raises(InvalidArgument, match="fidelity: engine: must be measured or given: .*no-engine"):
        fidelity.compare("no-engine", 1.0, "64", "64", 0)


@pytest.mark.parametrize(
    ("seconds", "tokens", "problem"),
    [(-1.0, "64", "seconds: must be from 1 to 3600, got -1"), (float("nan"), "64", "seconds: "), (1.0, "x", "input: ")],
)
def test_what_is_wrong_with_the_loads_is_told_before_anything_starts(seconds, tokens, problem):
    with pytest.raises(InvalidArgument, match=problem):
        fidelity.compare("no-engine", seconds, tokens, "64", 0)


def _records(*ttft_s: float) -> list[Record]:
    return [Record(0, 0.0, messages=[(one, 1)], ended_s=2 * one, finish_reason="stop") for one in ttft_s]


def test_the_error_is_that_of_all_replays_and_chance_is_how_much_they_differ():
    load = fidelity._Compared(_records(1.0, 2.0, 3.0), [_records(1.0, 2.0, 3.0), _records(3.0, 6.0, 9.0)])
    assert load.error("ttft_p50") == pytest.approx(0.5)  # of 1, 2, 3, 3, 6, 9
    assert load.error("latency_mean") == pytest.approx(1.0)  # of 2, 4, 6 and of 2, 4, 6, 6, 12, 18
    assert load.chance("ttft_p50") == pytest.approx(2.0 / 3.0)  # medians 2 and 6
    alike = fidelity._Compared(_records(1.0), [_records(1.0), _records(1.0)])
    assert (alike.error("latency_p95"), alike.chance("latency_mean")) == (0.0, 0.0)


def test_a_load_is_all_its_turns_and_shows_the_error_of_each():
    turns = [
        fidelity._Compared(_records(1.0), [_records(1.1), _records(1.1)], (1.0, 0.5)),
        fidelity._Compared(_records(2.0), [_records(1.0), _records(1.0)], (0.0, 0.5)),
        fidelity._Compared([], [[], []]),  # no request came
    ]
    load = fidelity._together(turns)
    assert [record.ttft_s for record in load.real] == [1.0, 2.0]
    assert [[record.ttft_s for record in replay] for replay in load.replays] == [[1.1, 1.0]] * 2
    first, *_ = load.rows("25%", turns)
    assert first[0] == "25%, 2 requests: ttft p50" and first[4] == "+10%, -50%"
    assert load.drafted_row("25%", turns) == ("25%", "50%", "50%", "100% / 50%, 0% / 50%")
