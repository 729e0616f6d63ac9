from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clients.replica_set.replica import Health, HealthPolicy
from contract.errors import InvalidArgument


def states(observations: str, policy: HealthPolicy | None = None) -> str:
    """``observations`` as a string of + and -, the health after each likewise."""
    health, shown = Health(), ""
    for one in observations:
        health = health.after(one == "+", policy or HealthPolicy())
        shown += "+" if health.healthy else "-"
    return shown


@pytest.mark.parametrize(
    ("observed", "healthy"),
    [
        ("+---", "+++-"),  # three failures in a row take it out
        ("+--+--+", "+++++++"),  # fewer never do
        ("+---+-++", "+++----+"),  # one success is not recovery, and must not be forgotten either
        ("-+-++", "----+"),  # a replica that was down when found recovers like any other
        ("+", "+"),
        ("-", "-"),
    ],
)
def test_three_failures_take_a_replica_out_and_two_successes_bring_it_back(observed: str, healthy: str) -> None:
    assert states(observed) == healthy


@given(st.text("+-", min_size=1, max_size=60), st.integers(1, 5), st.integers(1, 5))
def test_health_changes_only_after_its_threshold_of_equal_observations(observed: str, fail: int, recover: int) -> None:
    shown = states(observed, HealthPolicy(fail_after=fail, recover_after=recover))
    for at in range(1, len(observed)):
        needed = recover if shown[at] == "+" else fail
        if shown[at] != shown[at - 1]:
            assert observed[at - needed + 1 : at + 1] == shown[at] * needed
        elif needed_to_leave := (fail if shown[at] == "+" else recover):
            other = "-" if shown[at] == "+" else "+"
            assert not observed[: at + 1].endswith(other * needed_to_leave)


@pytest.mark.parametrize("field", ["fail_after", "recover_after", "interval_s", "timeout_s"])
def test_a_threshold_of_nothing_is_refused(field: str) -> None:
    with pytest.raises(InvalidArgument, match=f"health.{field}: must be .*, got 0"):
        HealthPolicy(**{field: 0})
