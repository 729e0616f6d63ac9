"""Whole runs of small scenarios: equal seeds, faults, releases, and what people meet."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from contract.errors import InvalidArgument
from simulator import report
from simulator.run import Result, check, run
from simulator.scenario import of

ROOT = Path(__file__).resolve().parents[2]
POOL = {"slots": 16, "step": {"step_s": 0.02, "sequence_s": 0.0005, "prefill_token_s": 0.0001}}
CHAT = {"arrivals": "poisson:4", "input": "lognormal:80,0.5", "output": "lognormal:30,0.5"}


def simulated(seed: int = 0, folder: Path = Path(), **table: object) -> Result:
    """Run a scenario of one pool and one persona, unless ``table`` says otherwise."""
    return run(
        of({"duration_s": 15.0, "pools": {"main": POOL}, "personas": {"chat": CHAT}, **table}, folder=folder), seed
    )


def test_every_request_is_answered_by_the_gateways_own_code():
    result = simulated()
    assert len(result.everyone) > 30 and all(record.ok for record in result.everyone)
    assert not result.violations and not result.counts
    assert result.replica_hours == {"main": pytest.approx(15 / 3600, abs=1.1 / 3600)}
    record = result.everyone[0]
    assert record.tokens == record.usage_tokens and record.ttft_s is not None and 0.02 < record.ttft_s < 0.2


def test_what_the_kv_cache_cannot_hold_is_refused_and_the_rest_is_answered():
    result = simulated(pools={"main": POOL | {"kv_tokens": 110}})
    refused = [record.error for record in result.everyone if not record.ok]
    assert 0 < len(refused) < len(result.everyone) and not result.violations
    assert all("max_tokens: must be at most" in error for error in refused)


def test_what_was_violated_before_a_failure_is_told(monkeypatch):
    async def failing(scenario, replicas, ledger, samples) -> None:
        ledger.broken("a token was lost or came twice")
        raise ValueError("no such pool")

    monkeypatch.setattr(sys.modules[run.__module__], "_watch", failing)
    with pytest.raises(RuntimeError, match=r"ValueError\('no such pool'\); violated until then: a token was lost"):
        simulated()


def test_equal_seeds_are_equal_whatever_the_process_and_others_are_not():
    told = [json.dumps(report.of(simulated(seed), {})) for seed in (1, 1, 2)]
    assert told[0] == told[1] != told[2]


@pytest.mark.slow
def test_equal_seeds_are_equal_in_another_process(tmp_path):
    for hashes in ("1", "2"):
        command = [sys.executable, "-m", "simulator", "run", "simulator/scenarios/faults.toml", "--seed", "3"]
        environment = {**os.environ, "PYTHONHASHSEED": hashes}
        out = tmp_path / hashes
        subprocess.run([*command, "--json", str(out)], cwd=ROOT, env=environment, check=True, capture_output=True)
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()


def test_a_killed_replicas_streams_go_on_elsewhere():
    fault = {"kind": "kill", "pool": "main", "replica": 0, "at_s": 5.0, "for_s": 1.0}
    long = CHAT | {"output": "200"}
    result = simulated(pools={"main": POOL | {"replicas": 2, "start_s": 2.0}}, personas={"chat": long}, faults=[fault])
    assert all(record.ok for record in result.everyone) and not result.violations
    assert result.counts["lost its replica: continued"] > 0
    ready = [sample.ready for sample in result.samples]
    assert min(ready) == 1 and ready[-1] == 2


def test_a_hung_replicas_requests_are_sent_elsewhere():
    fault = {"kind": "hang", "pool": "main", "replica": 0, "at_s": 5.0, "for_s": 60.0}
    settings = {"first_token_timeout_s": "3", "idle_timeout_s": "3"}
    result = simulated(
        pools={"main": POOL | {"replicas": 2}}, faults=[fault], gateway={"settings": settings}, duration_s=20.0
    )
    assert all(record.ok for record in result.everyone) and not result.violations
    assert result.counts["retried"] or result.counts["lost its replica: continued"]


def test_several_gateways_share_the_replicas():
    result = simulated(gateway={"count": 3})
    assert all(record.ok for record in result.everyone) and not result.violations


def test_a_network_and_a_slow_replica_take_time():
    plain, late = simulated(), simulated(personas={"chat": CHAT | {"network_s": 0.05}})
    slow = simulated(faults=[{"kind": "slow", "pool": "main", "at_s": 0.0, "for_s": 60.0, "factor": 3.0}])
    first, after, third = (sum(record.ttft_s or 0.0 for record in one.everyone) for one in (plain, late, slow))
    assert after == pytest.approx(first + 0.1 * len(plain.everyone), rel=0.1) and third > 2 * first


def test_a_closed_loop_sends_after_the_answer_only():
    result = simulated(personas={"chat": {"users": 3, "think_s": 1.0, "output": "50"}})
    for at in (3.0, 7.0, 11.0):
        under_way = [one for one in result.everyone if one.intended_s <= 1002 + at < one.ended_s]
        assert len(under_way) <= 3
    assert 6 < len(result.everyone) < 40


def test_refusals_retries_and_people_who_leave():
    crowd = {"arrivals": "poisson:20", "output": "100", "patience_s": 3.0, "retries": 1}
    settings = {"max_in_flight": "40"}
    result = simulated(personas={"crowd": crowd}, pools={"main": POOL | {"slots": 4}}, gateway={"settings": settings})
    assert not result.violations
    assert result.counts["refused: concurrency"] > 0 and any(record.cancelled for record in result.everyone)
    assert {record.error_type for record in result.everyone if record.error} == {"concurrency"}


RELEASE = """
[releases.next]
kind = "canary"
stable = "main"
candidate = "new"
[releases.next.rollback]
min_requests = 5
short_s = 10.0
long_s = 20.0
"""


def test_a_release_whose_candidate_is_slow_is_rolled_back(tmp_path):
    (tmp_path / "gateway.toml").write_text(RELEASE)
    slow = POOL | {"step": {"step_s": 0.2}}
    change = {"at_s": 15.0, "release": "next", "action": "shift", "set": {"to": 50.0}}
    result = simulated(
        folder=tmp_path, pools={"main": POOL, "new": slow}, gateway={"policy": "gateway.toml"}, changes=[change],
        duration_s=60.0,
    )  # fmt: skip
    assert [one["state"] for one in result.releases] == ["rolled back"] and not result.violations


def test_a_change_that_cannot_be_made_when_it_is_due_is_told(tmp_path):
    (tmp_path / "gateway.toml").write_text(RELEASE)
    slow = POOL | {"step": {"step_s": 0.2}}
    changes = [
        {"at_s": 5.0, "release": "next", "action": "shift", "set": {"to": 100.0}},
        {"at_s": 55.0, "release": "next", "action": "finish"},
    ]
    gateway, pools = {"policy": "gateway.toml"}, {"main": POOL | {"replicas": 2}, "new": slow}
    result = simulated(folder=tmp_path, gateway=gateway, pools=pools, changes=changes, duration_s=60.0)
    assert result.releases[0]["rolled_back"] and result.refused.keys() == {1}
    assert "changes.1 was not made: releases.next: must have all requests" in report.text(report.of(result, {}))


def test_shadow_copies_may_end_after_the_run(tmp_path):
    pools = {"main": POOL, "new": POOL | {"step": {"step_s": 0.2}}}
    models = '[models.m]\npools = ["main"]\n'
    (tmp_path / "gateway.toml").write_text(models + '[shadow]\npool = "new"\nfraction = 1.0\n')
    assert not simulated(folder=tmp_path, gateway={"policy": "gateway.toml"}, pools=pools).violations


def test_a_release_that_is_finished_has_all_requests(tmp_path):
    (tmp_path / "gateway.toml").write_text(RELEASE)
    steps = [("shift", {"to": 100.0}), ("finish", {})]
    changes = [
        {"at_s": 3.0 + number, "release": "next", "action": action, "set": fields}
        for number, (action, fields) in enumerate(steps)
    ]
    people = {"chat": {**CHAT, "output": "40"}}
    result = simulated(
        folder=tmp_path, pools={"main": POOL, "new": POOL}, gateway={"policy": "gateway.toml"}, changes=changes,
        personas=people, duration_s=20.0,
    )  # fmt: skip
    late = [sample for sample in result.samples if sample.at_s > 10]
    assert not result.violations and not result.releases and all(record.ok for record in result.everyone)
    assert not any(one.running for one in late if one.pool == "main") and any(one.running for one in late)


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.csv"])
def test_a_trace_is_replayed(tmp_path, name):
    rows = [{"at_s": 1.0, "input_tokens": 50, "output_tokens": 5}, {"at_s": 2.5, "input_tokens": 9, "output_tokens": 7}]
    lines = map(json.dumps, rows)
    if name.endswith(".csv"):
        lines = (",".join(map(str, cells)) for cells in (rows[0], *(row.values() for row in rows)))
    (tmp_path / name).write_text("\n".join(lines))
    result = simulated(folder=tmp_path, personas={"all": {"arrivals": f"trace:{name}"}}, duration_s=5.0)
    found = [(record.intended_s - 1002.0, record.input_tokens, record.tokens) for record in result.everyone]
    assert found == [(1.0, 50, 5), (2.5, 9, 7)]


POLICY = (
    RELEASE
    + """
[classes.slow]
priority = 7
[models.small]
pools = ["main"]
[models.large]
pools = ["new"]
"""
)
SECOND = {"release": "second", "action": "start", "set": {"stable": "main", "candidate": "new"}}


@pytest.mark.parametrize(
    ("person", "change", "field", "problem"),
    [
        ({"model": "small", "class": "fast"}, {}, "personas.chat.class", "must be one of slow, got 'fast'"),
        ({"model": "huge"}, {}, "personas.chat.model", "must be one of small, large, got 'huge'"),
        ({}, {}, "personas.chat.model", "must be one of small, large, got ''"),
        ({"model": "small"}, {"release": "later"}, "changes.0", "later"),
        ({"model": "small"}, {"set": {"to": 200.0}}, "changes.0", "next.weight: must be less than or equal to 100"),
        ({"model": "small"}, {"set": {"ab": 1}}, "changes.0", "ab"),
        ({"model": "small"}, SECOND, "changes.0", "cannot be made: TMP/gateway.toml: releases.second.stable: must be"),
    ],
)
def test_what_the_policy_does_not_have_is_refused_before_anything_runs(tmp_path, person, change, field, problem):
    (tmp_path / "gateway.toml").write_text(POLICY)
    shift = {"at_s": 3.0, "release": "next", "action": "shift", "set": {"to": 50.0}}
    table = {"pools": {"main": POOL, "new": POOL}, "gateway": {"policy": "gateway.toml"}, "duration_s": 15.0}
    people = {"chat": CHAT | person}
    with pytest.raises(InvalidArgument) as caught:
        check(of(table | {"personas": people, "changes": [shift | change]}, folder=tmp_path))
    assert caught.value.field == field and problem.replace("TMP", str(tmp_path)) in caught.value.problem
