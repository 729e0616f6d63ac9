"""Planted bugs in the production code: the simulator finds each of them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from clients.wire.response_reader import ResponseReader
from cluster.scaling import law
from gateway.admission import concurrency
from gateway.admission.budget_store import MemoryStore
from gateway.admission.budgets import Bucket
from gateway.admission.pool_slots import Claim, PoolSlots
from gateway.choices import Choices
from gateway.continuation import Continuation
from gateway.telemetry.metrics import Metrics
from simulator import fleet
from simulator.replica import Call
from tests.simulator.test_run import CHAT, POOL, simulated

KEYS = """
salt = "9f3c0d5e2a71b8446c1fd0a3e97b5a28"
[orgs.acme]
tokens_per_minute = 1200
burst_tokens = 800
"""


def skipping(real, number: int):
    """``real``, but for its n-th call, which does nothing."""
    calls = iter(range(1_000_000))
    return lambda *arguments: None if next(calls) == number else real(*arguments)


def test_a_leaked_permit_is_found(monkeypatch):
    monkeypatch.setattr(PoolSlots, "_take_back", skipping(PoolSlots._take_back, 5))
    assert "slots or queue of the pool 'main' were not given back" in simulated().violations


def test_a_leaked_permit_is_found_while_the_run_goes_on(monkeypatch):
    monkeypatch.setattr(PoolSlots, "_take_back", skipping(PoolSlots._take_back, 5))
    rare = CHAT | {"until_s": 5.0}
    assert simulated(personas={"chat": rare}).violations["more slots were held than requests were under way"] > 5


def test_a_permit_that_leaks_when_its_caller_leaves_is_found(monkeypatch, tmp_path: Path):
    (tmp_path / "gateway.toml").write_text(KEYS.replace("1200", "60000").replace("800", "10000"))
    people = {"chat": CHAT | {"key": "acme/web/site", "leave": 0.3}}
    table = {"gateway": {"policy": "gateway.toml"}, "pools": {"main": POOL | {"send_s": 0.1}}, "personas": people}
    honest = simulated(folder=tmp_path, **table)
    left = [record for record in honest.everyone if record.cancelled]
    assert not honest.violations and len(left) > 5 and all(record.messages for record in left)

    real = Choices._ended
    kept = lambda self, index: None if self.generations[index].error is not None else real(self, index)  # noqa: E731
    monkeypatch.setattr(Choices, "_ended", kept)
    found = simulated(folder=tmp_path, **table).violations
    assert {"reserved budget was not settled", "places under the caps were not given back"} < found.keys()


def test_an_engine_that_works_on_when_its_caller_has_left_is_found(monkeypatch):
    people = {"chat": CHAT | {"leave": 0.3, "output": "100"}}
    assert not simulated(pools={"main": POOL | {"send_s": 0.1}}, personas=people).violations
    monkeypatch.setattr(Call, "cancel", lambda call: False)
    found = simulated(pools={"main": POOL | {"send_s": 0.1}}, personas=people).violations
    assert found["engines worked on more requests than were under way"] > 2


@pytest.mark.parametrize("change", [lambda ids: ids[1:], lambda ids: ids + ids[-1:]], ids=["lost", "doubled"])
def test_a_lost_or_doubled_token_is_found(monkeypatch, change):
    real, calls = ResponseReader.read, iter(range(1_000_000))

    def read(reader, data):
        delta = real(reader, data)
        return dataclasses.replace(delta, token_ids=change(delta.token_ids)) if next(calls) == 30 else delta

    monkeypatch.setattr(ResponseReader, "read", read)
    assert sum(simulated().violations.values()) >= 1


def test_a_token_that_comes_twice_after_a_replicas_death_is_found(monkeypatch):
    real = Continuation.ids
    monkeypatch.setattr(Continuation, "ids", lambda state, request: real(state, request)[:-1])
    fault = {"kind": "kill", "pool": "main", "replica": 0, "at_s": 5.0}
    long = CHAT | {"output": "200"}
    result = simulated(pools={"main": POOL | {"replicas": 2}}, personas={"chat": long}, faults=[fault])
    assert result.violations["a token was lost or came twice"] >= 1


def test_a_request_without_an_end_is_found(monkeypatch):
    monkeypatch.setattr(Claim, "_given", skipping(Claim._given, 5))
    assert "a request was lost: it never ended" in simulated().violations


def test_an_ignored_floor_is_found(monkeypatch):
    real = law.decide
    no_floor = lambda rules, *rest: real(rules.model_copy(update={"min_replicas": 0}), *rest)  # noqa: E731
    monkeypatch.setattr(fleet, "decide", no_floor)
    scaling = {"pools": {"main": {"min_replicas": 3, "down_cooldown_s": 5.0}}}
    result = simulated(scaling=scaling, pools={"main": POOL | {"replicas": 3}}, duration_s=60.0)
    assert result.violations["the law wanted fewer replicas of 'main' than min_replicas"] >= 1


@pytest.mark.parametrize(
    ("policy", "violation"),
    [
        (KEYS, "the budget of acme was exceeded"),
        (
            KEYS.replace("tokens", "requests").replace("1200", "60").replace("800", "5"),
            "the budget of acme was exceeded, in requests",
        ),
    ],
    ids=("tokens", "requests"),
)
def test_an_ignored_budget_is_found(monkeypatch, tmp_path: Path, policy: str, violation: str):
    (tmp_path / "gateway.toml").write_text(policy)
    table = {"gateway": {"policy": "gateway.toml"}, "personas": {"chat": CHAT | {"key": "acme/web/site"}}}
    honest = simulated(folder=tmp_path, **table)
    assert honest.counts["refused: budget"] > 0 and not honest.violations

    real = MemoryStore.try_reserve
    granted = lambda *arguments: dataclasses.replace(real(*arguments), granted=True)  # noqa: E731
    monkeypatch.setattr(MemoryStore, "try_reserve", granted)
    assert simulated(folder=tmp_path, **table).violations[violation] >= 1


def test_an_ignored_cap_is_found(monkeypatch, tmp_path: Path):
    (tmp_path / "gateway.toml").write_text(KEYS.partition("tokens")[0] + "max_in_flight = 2")
    people = {"chat": CHAT | {"key": "acme/web/site", "leave": 0.3}}
    table = {"gateway": {"policy": "gateway.toml"}, "personas": people}
    honest = simulated(folder=tmp_path, **table)
    assert honest.counts["refused: concurrency"] > 0 and not honest.violations

    monkeypatch.setattr(concurrency, "caps", lambda *_: {})
    assert simulated(folder=tmp_path, **table).violations["acme had more requests under way than max_in_flight"] >= 1


def doubling(real, number: int):
    """``real``, a settlement whose n-th call charges twice the tokens."""
    calls = iter(range(1_000_000))
    return lambda self, name, used, *more: real(self, name, used * (2 if next(calls) == number else 1), *more)


@pytest.mark.parametrize("owner", [MemoryStore, Bucket])
def test_a_double_charge_is_found(monkeypatch, tmp_path: Path, owner: type):
    (tmp_path / "gateway.toml").write_text(KEYS.replace("1200", "60000").replace("800", "10000"))
    monkeypatch.setattr(owner, "settle", doubling(owner.settle, 9))
    table = {"gateway": {"policy": "gateway.toml"}, "personas": {"chat": CHAT | {"key": "acme/web/site"}}}
    found = simulated(folder=tmp_path, **table).violations
    assert found == {"acme was charged other than it was answered, in tokens": 1}


def test_tokens_that_the_metrics_count_twice_are_found(monkeypatch):
    real = Metrics.used
    monkeypatch.setattr(Metrics, "used", lambda self, *a, **more: [real(self, *a, **more) for _ in range(2)])
    assert "the gateways' metrics count other tokens than were answered" in simulated().violations


def test_budget_that_is_never_settled_is_found(monkeypatch, tmp_path: Path):
    (tmp_path / "gateway.toml").write_text(KEYS)
    monkeypatch.setattr(MemoryStore, "settle", skipping(MemoryStore.settle, 0))
    table = {"gateway": {"policy": "gateway.toml"}, "personas": {"chat": CHAT | {"key": "acme/web/site"}}}
    assert simulated(folder=tmp_path, **table).violations["reserved budget was not settled"] == 1
