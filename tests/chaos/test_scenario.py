"""Scenarios: the same of the same seed, and written scripts."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chaos import scenario
from chaos.faults import KINDS
from contract.errors import InvalidArgument


@given(st.integers(0, 2**40), st.sampled_from([12.0, 25.0, 60.0]))
@settings(max_examples=25)
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


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("at 3 kill.gpu replica-1", "kind must be one of kill.tritonserver"),
        ("at 3 kill.engine replica-3", "target must be one of replica-1, replica-2"),
        ("at 3 stop.engine replica-1", "needs `for SECONDS`"),
        ("at 3 kill.engine replica-1 for 2", "takes no `for`"),
        ("at soon kill.engine replica-1", "could not convert"),
        ("at 3 stop.engine replica-1 during 2", "needs `for SECONDS`"),
        ("speed 3", "line 1: must be seed N"),
        ("at 99 kill.engine replica-1", "within the duration of 25 s"),
        ("rate 0", "0.1 to 100 requests"),
        ("duration nan", "1 to 600 seconds"),
        ("duration 900", "got 900 and 5"),
        ("seed nan", "line 1: must be seed N"),
        ("seed 1.5", "line 1: must be seed N"),
        ("at 3 stop.redis redis for 0", "must be above 0"),
        ("at 3 stop.redis redis for -1", "must be above 0"),
    ],
)
def test_a_wrong_line_is_named(line: str, problem: str):
    with pytest.raises(InvalidArgument) as raised:
        scenario.parse(line)
    assert problem in str(raised.value)


def test_faults_are_in_the_order_of_their_moments(tmp_path):
    path = tmp_path / "two.chaos"
    path.write_text("# two\nduration 9\nat 5 kill.redis redis # away\n\nat 3 stop.engine replica-1 for 2\n")
    assert [fault.at_s for fault in scenario.read(path).faults] == [3, 5]
    with pytest.raises(InvalidArgument, match="SCENARIO: must be a file that can be read"):
        scenario.read(tmp_path / "none")
    path.write_bytes(b"\xff")
    with pytest.raises(InvalidArgument, match="SCENARIO: must be text in UTF-8"):
        scenario.read(path)
