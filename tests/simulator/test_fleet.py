"""Replicas that start, stop and are scaled by the law; gateways made of the policy as in production."""

from __future__ import annotations

from statistics import mean

import pytest

from contract.errors import InvalidArgument
from tests.simulator.test_run import CHAT, POOL, simulated


@pytest.mark.slow
def test_the_law_starts_replicas_that_serve_when_they_are_ready():
    busy = {"arrivals": "poisson:12", "output": "60"}
    scaling = {"pools": {"main": {"max_replicas": 4, "start_s": 10.0}}}
    pool = POOL | {"slots": 8, "start_s": 10.0}
    result = simulated(scaling=scaling, pools={"main": pool}, personas={"busy": busy}, duration_s=60.0)
    wanted = [count for _, _, count, _ in result.decisions]
    assert max(wanted) >= 2 and not result.violations
    first = next(sample.at_s for sample in result.samples if sample.wanted > 1)
    ready = next(sample.at_s for sample in result.samples if sample.ready > 1)
    assert 9 <= ready - first <= 12
    assert all(sample.ready <= sample.present for sample in result.samples)


def test_a_scale_in_ends_no_stream():
    scaling = {"pools": {"main": {"min_replicas": 1, "down_cooldown_s": 5.0}}}
    result = simulated(scaling=scaling, pools={"main": POOL | {"replicas": 3}}, duration_s=60.0)
    assert result.decisions[-1][2] == 1 and all(record.ok for record in result.everyone)
    assert not result.counts and not result.violations


def test_an_outage_of_the_metrics_holds_the_number():
    scaling = {"pools": {"main": {"min_replicas": 0, "down_cooldown_s": 30.0}}}
    outage = {"kind": "metrics_outage", "pool": "main", "at_s": 4.0, "for_s": 60.0}
    result = simulated(scaling=scaling, pools={"main": POOL | {"replicas": 3}}, faults=[outage], duration_s=60.0)
    assert {count for _, _, count, _ in result.decisions} == {3} and all(record.ok for record in result.everyone)


def test_outages_of_the_metrics_that_overlap_end_with_the_last():
    scaling = {"pools": {"main": {"min_replicas": 0, "down_cooldown_s": 30.0}}}
    outage = {"kind": "metrics_outage", "pool": "main", "at_s": 4.0, "for_s": 60.0}
    outages = [outage, outage | {"at_s": 5.0, "for_s": 2.0}]
    result = simulated(scaling=scaling, pools={"main": POOL | {"replicas": 3}}, faults=outages, duration_s=60.0)
    assert {count for _, _, count, _ in result.decisions} == {3} and all(record.ok for record in result.everyone)


def ready(start_s: float, *faults: tuple[str, float, float]) -> dict[int, int]:
    """Return how many of two replicas are ready at each second, if these faults (kind, at_s, for_s) hit the first."""
    table = [{"kind": kind, "pool": "main", "replica": 0, "at_s": at_s, "for_s": for_s} for kind, at_s, for_s in faults]
    people = {"few": CHAT | {"arrivals": "poisson:0.2"}}
    pool = POOL | {"replicas": 2, "start_s": start_s}
    result = simulated(pools={"main": pool}, personas=people, faults=table, duration_s=25.0)
    return {round(sample.at_s): sample.ready for sample in result.samples}


def test_a_dead_replica_does_not_hang():
    found = ready(2.0, ("kill", 3.5, 10.0), ("hang", 5.5, 1.0))
    assert {found[at] for at in range(4, 15)} == {1} and {found[at] for at in range(17, 25)} == {2}
    assert ready(2.0, ("hang", 3.5, 10.0), ("kill", 5.5, 1.0)) == ready(2.0, ("hang", 3.5, 2.0), ("kill", 5.5, 1.0))


@pytest.mark.parametrize("kind", ["kill", "hang"])
def test_a_replica_is_back_when_the_last_of_its_faults_has_ended(kind: str):
    found = ready(0.0, (kind, 3.5, 10.0), (kind, 5.5, 2.0), (kind, 12.5, 4.0))
    assert {found[at] for at in range(4, 16)} == {1} and {found[at] for at in range(18, 25)} == {2}


def test_a_hang_makes_no_start_shorter():
    found = ready(10.0, ("kill", 3.5, 1.0), ("hang", 6.5, 3.0))
    assert {found[at] for at in range(4, 17)} == {1} and {found[at] for at in range(19, 25)} == {2}


def test_a_replica_that_is_killed_while_it_is_slow_is_as_fast_as_before_when_both_are_over():
    slow = {"kind": "slow", "pool": "main", "at_s": 2.0, "for_s": 6.0}
    kill = {"kind": "kill", "pool": "main", "at_s": 4.0, "for_s": 0.5}
    found = []
    for faults in ([], [slow, kill]):
        result = simulated(pools={"main": POOL | {"start_s": 1.0}}, faults=faults, duration_s=20.0)
        late = [record for record in result.everyone if record.ok and record.intended_s > result.window[0] + 12]
        found.append(mean(record.ttft_s for record in late if record.ttft_s is not None))
    assert found[1] == pytest.approx(found[0], rel=0.2)


@pytest.mark.parametrize(
    "policy, problem",
    [
        ('[overflow.far]\nurl = "https://llm.example/v1"\nmodel = "m"', "overflow: must be pools in a simulation"),
        ('[pools.other]\nreplicas = "10.0.0.9:8001"', "pools: must be of main, got main, other"),
        ("[admission]\nmax_wait = 3", "admission.max_wait"),
    ],
)
def test_a_policy_that_cannot_be_simulated_is_refused(tmp_path, policy, problem):
    (tmp_path / "gateway.toml").write_text(policy)
    with pytest.raises(InvalidArgument, match=problem):
        simulated(folder=tmp_path, gateway={"policy": "gateway.toml"})


def test_settings_are_the_gateways():
    with pytest.raises(InvalidArgument, match="TRIDENT_GATEWAY_MAX_IN_FLIGHT"):
        simulated(gateway={"settings": {"max_in_flight": "many"}})
    with pytest.raises(InvalidArgument, match="gateway.settings.max_inflight: must be one of .*max_in_flight"):
        simulated(gateway={"settings": {"max_inflight": "3"}})
    with pytest.raises(InvalidArgument, match="gateway.policy: must be a file that can be read, got none.toml"):
        simulated(gateway={"policy": "none.toml"})
