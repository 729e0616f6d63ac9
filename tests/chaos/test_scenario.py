"""Scenarios: the same of the same seed, and written scripts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chaos import scenario
from chaos.scenario import KINDS
from contract import failpoint
from contract.errors import InvalidArgument


@given(st.integers(0, 2**40), st.sampled_from([12.0, 25.0, 60.0]))
def test_a_seed_is_one_scenario_and_its_script_is_the_same_one(seed: int, duration_s: float):
    drawn = scenario.draw(seed, duration_s)
    assert drawn == scenario.draw(seed, duration_s) == scenario.parse(str(drawn))
    assert all(fault.target in KINDS[fault.kind].targets and fault.end_s <= duration_s for fault in drawn.faults)
    less = scenario.possible(drawn, ("redis", "envoy"))
    assert less.faults == tuple(fault for fault in drawn.faults if not KINDS[fault.kind].needs)


def test_a_hundred_seeds_have_every_kind_and_pairs():
    drawn = [scenario.draw(seed) for seed in range(100)]
    assert {fault.kind for one in drawn for fault in one.faults} == KINDS.keys()
    gaps = [b.at_s - a.at_s for one in drawn for a, b in zip(one.faults, one.faults[1:], strict=False)]
    assert 0.2 < sum(gap <= 1 for gap in gaps) / len(gaps) < 0.6


def test_the_shortest_scenario_that_is_drawn_has_a_fault():
    assert all(scenario.draw(seed, scenario.SHORTEST_S).faults for seed in range(1000))


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("at 3 kill.gpu replica-1", "kind must be one of kill.tritonserver"),
        ("at 3 kill.engine replica-3", "target of kill.engine must be one of replica-1, replica-2"),
        ("at 3 stop.engine replica-1", "stop.engine must end in `for SECONDS`"),
        ("at 3 kill.engine replica-1 for 2", "kill.engine must have no `for SECONDS`"),
        ("at soon kill.engine replica-1", "at must be a number from 0 to 600"),
        ("at nan kill.engine replica-1", "at must be a number from 0 to 600"),
        ("at -1 kill.engine replica-1", "at must be a number from 0 to 600"),
        ("at 4 kill.engine", "must be seed N"),
        ("at", "must be seed N"),
        ("foo 1", "must be seed N"),
        ("seed", "must be seed N"),
        ("at 3 stop.engine replica-1 during 2", "stop.engine must end in `for SECONDS`"),
        ("at 99 kill.engine replica-1", "within the duration of 25 s"),
        ("at 24 stop.engine replica-1 for 2", "within the duration of 25 s"),
        ("rate 0", "rate must be a number from 0.1 to 100"),
        ("rate fast", "rate must be a number from 0.1 to 100"),
        ("duration nan", "duration must be a number from 1 to 600"),
        ("duration 900", "duration must be a number from 1 to 600"),
        ("seed nan", "seed must be a whole number"),
        ("seed 1.5", "seed must be a whole number"),
        ("at 3 stop.redis redis for 0", "for must be a number from 0.1 to 600"),
        ("at 3 stop.redis redis for -1", "for must be a number from 0.1 to 600"),
        ("at 3 stop.redis redis for long", "for must be a number from 0.1 to 600"),
    ],
)
def test_a_wrong_line_is_named(line: str, problem: str):
    with pytest.raises(InvalidArgument) as raised:
        scenario.parse(f"# first\n{line}\nduration 25")
    assert raised.value.field == "line 2"
    assert problem in raised.value.problem and raised.value.problem.endswith(f", got {line!r}")


def test_faults_are_in_the_order_of_their_moments(tmp_path):
    path = tmp_path / "two.chaos"
    path.write_text("# two\nduration 9\nat 5 kill.redis redis # away\n\nat 3 stop.engine replica-1 for 2\n")
    assert [fault.at_s for fault in scenario.read(path).faults] == [3, 5]
    with pytest.raises(InvalidArgument, match="SCENARIO: must be a file that can be read"):
        scenario.read(tmp_path / "none")
    path.write_text("seed 1\nfoo 1\n")
    with pytest.raises(InvalidArgument) as raised:
        scenario.read(path)
    assert raised.value.field == f"{path}: line 2"
    path.write_bytes(b"\xff")
    with pytest.raises(InvalidArgument, match="SCENARIO: must be text in UTF-8"):
        scenario.read(path)


def test_every_kind_has_what_it_is_done_with():
    for name, kind in KINDS.items():
        action, _, what = name.partition(".")
        assert kind.targets and action in ("kill", "stop", "envoy", "fail"), name
        assert (kind.for_s is None) == (action == "kill" or name == "envoy.reset"), name
        assert action != "fail" or what in failpoint.POINTS, name
        assert (action == "envoy") == (kind.needs == "envoy"), name
    assert {f"fail.{point}" for point in failpoint.POINTS} <= KINDS.keys()
