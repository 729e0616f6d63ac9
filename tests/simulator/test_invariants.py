"""Planted bugs in the production code: the simulator finds each of them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import grpc
import pytest

from clients.wire.response_reader import ResponseReader
from cluster.scaling import law
from contract.generation import FinishReason
from gateway.admission import budget_store, concurrency, fair_admission
from gateway.admission.budget_store import MemoryStore
from gateway.admission.budgets import Bucket
from gateway.admission.concurrency import Concurrency
from gateway.admission.fair_admission import FairAdmission, Permit
from gateway.admission.fair_queue import FairQueue
from gateway.admission.pool_slots import Claim, PoolSlots
from gateway.choices import Choices
from gateway.continuation import Continuation
from gateway.generation import Generation
from gateway.routing.circuit_breaker import Breaker, BreakerState
from gateway.routing.replicas import Replicas
from gateway.telemetry.metrics import Metrics
from simulator import fleet
from simulator.replica import Call
from simulator.run import Result
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
    kept = lambda self, ended: 0 if ended.error is not None else real(self, ended)  # noqa: E731
    monkeypatch.setattr(Choices, "_ended", kept)
    found = simulated(folder=tmp_path, **table).violations
    assert {"reserved budget was not settled", "places under the caps were not given back"} < found.keys()


def test_an_engine_that_works_on_when_its_caller_has_left_is_found(monkeypatch):
    people = {"chat": CHAT | {"leave": 0.3, "output": "100"}}
    assert not simulated(pools={"main": POOL | {"send_s": 0.1}}, personas=people).violations
    monkeypatch.setattr(Call, "cancel", lambda call: False)
    found = simulated(pools={"main": POOL | {"send_s": 0.1}}, personas=people).violations
    assert found["engines worked on more requests than were under way"] > 2


@pytest.mark.parametrize(
    ("change", "violation"),
    [
        (lambda ids: {"token_ids": ids[:1] + ids[-2:0:-1] + ids[-1:]}, "a token was lost or came twice"),
        (lambda ids: {"token_ids": ids[:1] + ids[:1] + ids[2:]}, "a token was lost or came twice"),
        (lambda _: {"usage": None}, "an answer had no end, or none with a usage"),
        (lambda _: {"finish_reason": FinishReason.STOP}, "an answer ended for another reason than the engine's"),
    ],
    ids=["in another order", "lost and doubled", "no usage", "other reason"],
)
def test_a_wrong_last_message_is_found(monkeypatch, change, violation):
    real = ResponseReader.read

    def read(reader, data):
        delta = real(reader, data)
        last = delta is not None and delta.finish_reason and len(delta.token_ids) > 3
        return dataclasses.replace(delta, **change(delta.token_ids)) if last else delta

    monkeypatch.setattr(ResponseReader, "read", read)
    assert violation in simulated().violations


def test_an_answer_that_stops_without_an_end_is_found(monkeypatch):
    real = Generation.__anext__

    async def stopping(self):
        if self.tokens >= 10:
            raise StopAsyncIteration
        return await real(self)

    monkeypatch.setattr(Generation, "__anext__", stopping)
    assert "an answer had no end, or none with a usage" in simulated().violations


def test_a_usage_with_other_prompt_tokens_is_found(monkeypatch):
    real = Generation._shown_end

    def shown(self, delta):
        delta = real(self, delta)
        return dataclasses.replace(delta, usage=dataclasses.replace(delta.usage, input_tokens=1))

    monkeypatch.setattr(Generation, "_shown_end", shown)
    assert "the usage told other tokens than came" in simulated().violations


def test_messages_of_another_stream_are_found(monkeypatch):
    real = Call._arrive

    def arrive(self, message):
        alike = (one for one in self._replica.calls if one._sequence.sent == self._sequence.sent and not one._ended)
        real(next((one for one in alike if hasattr(one.prompt, "base") and not message[1]), self), message)

    monkeypatch.setattr(Call, "_arrive", arrive)
    busy = CHAT | {"arrivals": "poisson:20", "output": "60"}
    found = simulated(pools={"main": POOL | {"send_s": 0.1, "step": {"step_s": 0.05}}}, personas={"chat": busy})
    assert "a token was lost or came twice" in found.violations


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


def test_an_answer_that_goes_on_from_other_ids_is_found(monkeypatch):
    real = Continuation.ids
    monkeypatch.setattr(Continuation, "ids", lambda state, request: real(state, request)[::-1])
    fault = {"kind": "kill", "pool": "main", "replica": 0, "at_s": 5.0}
    long = CHAT | {"output": "200"}
    result = simulated(pools={"main": POOL | {"replicas": 2}}, personas={"chat": long}, faults=[fault])
    assert result.violations["a token was lost or came twice"] >= 1


def test_a_breaker_that_never_ends_its_trial_is_found(monkeypatch):
    submit, after = Call._submit, Breaker.after

    def failing(call):
        if 1005 < call._loop.time() < 1008 and call._replica.host.endswith(".1") and hasattr(call.prompt, "base"):
            call.fail(grpc.StatusCode.INTERNAL, "engine failed")
        else:
            submit(call)

    monkeypatch.setattr(Call, "_submit", failing)
    pools, gateway = {"main": POOL | {"replicas": 2}}, {"settings": {"breaker_open_s": "1", "breaker_failures": "2"}}
    assert not simulated(pools=pools, gateway=gateway).violations

    half_open = BreakerState.HALF_OPEN
    ended = lambda one, *given: one if one.state is half_open else after(one, *given)  # noqa: E731
    monkeypatch.setattr(Breaker, "after", ended)
    monkeypatch.setattr(Breaker, "began", lambda one, *_: one)
    found = simulated(pools=pools, gateway=gateway).violations
    assert found == {"a breaker waits for a trial and none is under way": 1}


def test_requests_to_a_replica_that_has_withdrawn_are_found(monkeypatch):
    table = {
        "pools": {"main": POOL | {"replicas": 4}},
        "duration_s": 60.0,
        "personas": {"chat": CHAT | {"output": "300"}},
    }
    table["scaling"] = {"pools": {"main": {"min_replicas": 1, "down_cooldown_s": 5.0}}}
    honest = simulated(**table)
    assert honest.decisions and not honest.violations
    monkeypatch.setattr(Replicas, "_left", lambda *_: None)
    assert "a request was sent to a replica that had withdrawn" in simulated(**table).violations


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


PAIR = """
salt = "9f3c0d5e2a71b8446c1fd0a3e97b5a28"
[orgs.acme]
LIMIT = 3
[orgs.beta]
LIMIT = 60
"""


@pytest.mark.slow  # a simulated minute of each
@pytest.mark.parametrize(
    ("limit", "plant", "violation"),
    [
        (
            "max_in_flight",
            lambda real: lambda *given: {"all": max(filter(None, real(*given).values()))},
            "a request was refused under caps that had room",
        ),
        (
            "requests_per_minute",
            lambda real: lambda *given: tuple(dataclasses.replace(one, rate_per_s=1e-9) for one in real(*given)),
            "a request was refused within its budgets",
        ),
        (
            "requests_per_minute",
            lambda real: lambda *given: tuple(dataclasses.replace(one, bucket="requests:all") for one in real(*given)),
            "a request took from the budget of another level",
        ),
    ],
    ids=["cap of all", "never refilled", "budget of all"],
)
def test_a_limit_that_is_too_strict_is_found(monkeypatch, tmp_path: Path, limit, plant, violation):
    (tmp_path / "gateway.toml").write_text(PAIR.replace("LIMIT", limit))
    people = {org: CHAT | {"key": f"{org}/web/site", "output": "100"} for org in ("acme", "beta")}
    table = {"gateway": {"policy": "gateway.toml"}, "personas": people, "duration_s": 60.0}
    honest = simulated(folder=tmp_path, **table)
    assert sum(honest.counts[f"refused: {one}"] for one in ("budget", "concurrency")) > 5 and not honest.violations

    owner, name = (concurrency, "caps") if limit == "max_in_flight" else (budget_store, "demands")
    monkeypatch.setattr(owner, name, plant(getattr(owner, name)))
    assert violation in simulated(folder=tmp_path, **table).violations


CLASSES = """
salt = "9f3c0d5e2a71b8446c1fd0a3e97b5a28"
[admission]
max_wait_s = 5.0
max_waiting_per_tenant = 20
[classes.bulk]
priority = 5
max_tokens = 20
[orgs.acme]
tokens_per_day = 3000
[orgs.beta]
tokens_per_minute = 3000
burst_tokens = 1000
[orgs.beta.teams.web]
class = "bulk"
[models.small]
pools = ["main"]
[models.large]
pools = ["big"]
"""


def classes(folder: Path) -> Result:
    """Run people of two organisations and of none, under all limits of CLASSES."""
    (folder / "gateway.toml").write_text(CLASSES)
    chat, pool = CHAT | {"model": "small", "output": "60"}, POOL | {"slots": 4}
    people = {"a": chat | {"key": "acme/web/site"}, "b": chat | {"key": "beta/web/site"}, "c": chat | {"key": "c/c/c"}}
    people["c"] |= {"arrivals": "poisson:8", "from_s": 5.0}
    pools = {"main": pool, "big": pool}
    return simulated(folder=folder, gateway={"policy": "gateway.toml"}, personas=people, pools=pools, duration_s=25.0)


def test_promises_of_admission_hold(tmp_path: Path):
    honest = classes(tmp_path)
    assert {"refused: quota", "refused: budget", "refused: deadline", "refused: queue"} <= honest.counts.keys()
    assert not honest.violations


@pytest.mark.slow  # a simulated minute of each
@pytest.mark.parametrize(
    ("owner", "name", "plant", "violation"),
    [
        (
            budget_store,
            "demands",
            lambda real: lambda *given: tuple(one for one in real(*given) if not one.left_s),
            "the budget of acme was exceeded",
        ),
        (
            fair_admission,
            "applying",
            lambda real: lambda levels, *scope: real([one for one in levels if "/" in one.name], *scope),
            "a request took nothing from a budget of its levels",
        ),
        (Bucket, "_add_refill", lambda real: lambda *_: None, "a request was refused within its budgets"),
        (FairQueue, "expire", lambda real: lambda *_: [], "a request waited longer than max_wait_s"),
        (FairQueue, "check_room", lambda real: lambda *_: None, "more requests waited than may"),
        (
            FairAdmission,
            "_capped",
            lambda real: lambda _, requests, tenant: (requests, {}),
            "an answer had more tokens than its caller or its class allows",
        ),
        (
            fair_admission,
            "shortened",
            lambda real: lambda request, most: dataclasses.replace(request, max_tokens=most - 1),
            "an answer was made shorter and its caller was not told",
        ),
        (
            Replicas,
            "_pool_of",
            lambda real: lambda *_: "big",
            "a request was sent to a pool that does not serve its model",
        ),
    ],
    ids="quota level refill wait queue class shorter pool".split(),
)
def test_a_broken_promise_of_admission_is_found(monkeypatch, tmp_path: Path, owner, name, plant, violation):
    if violation.endswith("was not told"):
        monkeypatch.setattr(fair_admission, "_shorter_note", lambda *_: {})
    monkeypatch.setattr(owner, name, plant(getattr(owner, name)))
    assert violation in classes(tmp_path).violations


@pytest.mark.slow  # minutes of a fleet that grows and shrinks, 3 s for each law
@pytest.mark.parametrize(
    ("rules", "violation"),
    [
        ({"up_cooldown_s": 0.0}, "the law added replicas of 'main' faster than step_up and up_cooldown_s"),
        ({"step_up": 8}, "the law added replicas of 'main' faster than step_up and up_cooldown_s"),
        ({"down_cooldown_s": 0.0}, "the law removed replicas of 'main' faster than step_down and down_cooldown_s"),
        ({}, "the law removed replicas of 'main' while the load was not known"),
    ],
    ids="up step down unknown".split(),
)
def test_a_law_that_moves_too_fast_or_blindly_is_found(monkeypatch, rules, violation):
    long = CHAT | {"arrivals": "poisson:3", "output": "60"}
    people = {"chat": long, "crowd": long | {"arrivals": "poisson:20", "from_s": 20.0, "until_s": 60.0}}
    scaling = {"pools": {"main": {"max_replicas": 8, "up_cooldown_s": 20.0, "down_cooldown_s": 30.0, "step_up": 1}}}
    outage = {"kind": "metrics_outage", "pool": "main", "at_s": 90.0, "for_s": 60.0}
    table = {"pools": {"main": POOL | {"slots": 6, "start_s": 10.0}}, "personas": people, "scaling": scaling}
    table |= {"faults": [outage], "duration_s": 220.0}
    honest = simulated(**table)
    assert len(honest.decisions) > 4 and not honest.violations

    real, nothing = law.decide, law.Load(arrived_per_s=0.0)

    def decide(given, load, *rest):
        known = load if rules or (load is not None and load.complete) else nothing
        return real(given.model_copy(update=rules), known, *rest)

    monkeypatch.setattr(fleet, "decide", decide)
    assert violation in simulated(**table).violations


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


def test_usage_that_is_recorded_twice_is_found(monkeypatch, tmp_path: Path):
    (tmp_path / "gateway.toml").write_text(KEYS.partition("tokens")[0] + "tokens_per_day = 100000")
    table = {"gateway": {"policy": "gateway.toml"}, "personas": {"chat": CHAT | {"key": "acme/web/site"}}}
    assert not simulated(folder=tmp_path, **table).violations
    real = Permit.settle

    def twice(permit, usage):
        if permit.open:
            permit.admission.on_charged(permit.charge.record(permit.reserved_s, permit.tenant.levels, usage))
        real(permit, usage)

    monkeypatch.setattr(Permit, "settle", twice)
    found = simulated(folder=tmp_path, **table).violations
    assert found == {"the usage records tell other tokens or money than were answered": 1}


def test_a_part_that_is_not_kept_for_each_pool_is_found(monkeypatch, tmp_path: Path):
    models = '[models.small]\npools = ["main"]\n[models.large]\npools = ["big"]\n'
    (tmp_path / "gateway.toml").write_text(models)
    people = {"flood": CHAT | {"model": "small", "arrivals": "poisson:20"}, "chat": CHAT | {"model": "large"}}
    pools = {"main": POOL | {"slots": 1}, "big": POOL}
    gateway = {"policy": "gateway.toml", "settings": {"max_in_flight": "40"}}
    table = {"gateway": gateway, "pools": pools, "personas": people, "folder": tmp_path}
    honest = simulated(**table)
    assert honest.counts["refused: concurrency"] > 5 and not honest.violations
    monkeypatch.setattr(Concurrency, "_kept", 0)
    assert "a request was refused in the part of the limit that is kept for its pool" in simulated(**table).violations


def test_budget_that_is_never_settled_is_found(monkeypatch, tmp_path: Path):
    (tmp_path / "gateway.toml").write_text(KEYS)
    monkeypatch.setattr(MemoryStore, "settle", skipping(MemoryStore.settle, 0))
    table = {"gateway": {"policy": "gateway.toml"}, "personas": {"chat": CHAT | {"key": "acme/web/site"}}}
    assert simulated(folder=tmp_path, **table).violations["reserved budget was not settled"] == 1


TURNS = """
salt = "9f3c0d5e2a71b8446c1fd0a3e97b5a28"
[admission]
max_wait_s = 5.0
aging_s = 3.0
max_in_flight_of_class = { 5 = 12 }
[classes.bulk]
priority = 5
share = 0.5
[orgs.b.teams.web]
weight = 3.0
[orgs.c.teams.web]
class = "bulk"
"""


def turns(folder: Path, orgs: str) -> Result:
    """Run people of these organisations, who want more slots than there are."""
    (folder / "gateway.toml").write_text(TURNS)
    busy = CHAT | {"arrivals": f"poisson:{12 / len(orgs)}", "output": "60"}
    people = {org: busy | {"key": f"{org}/web/site"} for org in orgs}
    gateway = {"policy": "gateway.toml", "settings": {"max_in_flight": "50"}}
    pool = {"slots": 10, "send_s": 0.5, "step": {"step_s": 0.05}}
    return simulated(folder=folder, gateway=gateway, personas=people, pools={"main": pool}, duration_s=60.0)


@pytest.mark.slow  # a simulated minute of each
@pytest.mark.parametrize(
    ("orgs", "owner", "name", "plant", "violation"),
    [
        (
            "abc",
            concurrency,
            "caps",
            lambda real: lambda *_: {},
            "class 5 at main had more requests under way than max_in_flight",
        ),
        (
            "abc",
            Concurrency,
            "_most",
            lambda real: lambda caps, pool: real(caps, pool) + 1000,
            "all had more requests under way than max_in_flight",
        ),
        (
            "abc",
            PoolSlots,
            "_limits",
            lambda real: lambda slots: real(slots)._replace(limit=100, open=100),
            "more slots were given than are there",
        ),
        (
            "a",
            PoolSlots,
            "_limits",
            lambda real: lambda slots: real(slots)._replace(share=100),
            "a tenant got more slots than tenant_share",
        ),
        ("c", PoolSlots, "_share", lambda real: lambda *_: 100, "a class got more slots than its share"),
        ("ab", PoolSlots, "_reserve", lambda real: lambda *_: 0, "a slot kept for short requests was taken"),
        (
            "abc",
            FairQueue,
            "_by_urgency",
            lambda real: lambda queue, now_s: real(queue, now_s)[::-1],
            "a slot went to a less urgent class than one that waited",
        ),
        (
            "ab",
            FairQueue,
            "_turn",
            lambda real: lambda _, heads: heads[min(heads)],
            "a tenant got turns beyond its share while another one waited",
        ),
        ("ab", FairQueue, "expire", lambda real: lambda *_: [], "a request got a slot after its deadline"),
    ],
    ids="class gateway slots tenant share short order fair deadline".split(),
)
def test_a_slot_for_the_wrong_request_is_found(monkeypatch, tmp_path: Path, orgs, owner, name, plant, violation):
    assert not turns(tmp_path, orgs).violations
    monkeypatch.setattr(owner, name, plant(getattr(owner, name)))
    assert violation in turns(tmp_path, orgs).violations
