"""Replicas that start, stop and are scaled by the law; gateways made of the policy as in production."""

from __future__ import annotations

import pytest

from contract.errors import InvalidArgument
from tests.simulator.test_run import POOL, simulated


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
