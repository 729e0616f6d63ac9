"""Planted bugs in routing: the simulator finds each of them."""

from __future__ import annotations

import dataclasses

import pytest

from clients.replica_set import picks
from gateway.generation import Generation
from gateway.routing import scoring
from gateway.routing.circuit_breaker import Breaker, BreakerState
from gateway.routing.replicas import Failover
from simulator.run import Result
from tests.simulator.test_run import simulated


async def never(*_) -> bool:
    return False


def faulty(timeout_s: str) -> Result:
    """Run conversations and prompts that begin alike while a replica dies, one fails and one hangs."""
    chat = {"arrivals": "poisson:2", "output": "lognormal:60,0.8"}
    people = {"talk": chat | {"sessions": 20}, "tool": chat | {"input": "500", "prefix_tokens": 400}}
    people["tool"] |= {"prefix_groups": 40}
    faults = [
        {"kind": kind, "pool": "main", "replica": number, "at_s": at_s, "for_s": for_s}
        for number, (kind, at_s, for_s) in enumerate((("kill", 20.0, 3.0), ("hang", 60.0, 60.0), ("fail", 35.0, 10.0)))
    ]
    pools = {"main": {"replicas": 3, "slots": 8, "send_s": 0.2, "step": {"step_s": 0.05}, "start_s": 5.0}}
    gateway = {"settings": {"slow_start_s": "5", "request_timeout_s": timeout_s}}
    return simulated(3, pools=pools, personas=people, gateway=gateway, faults=faults, duration_s=75.0)


def test_promises_of_routing_hold():
    assert not faulty("600").violations and not faulty("8").violations


@pytest.mark.slow  # a simulated minute of each
@pytest.mark.parametrize(
    ("owner", "name", "planted", "violation"),
    [
        (Failover, "wait_s", lambda *_, **__: None, "a request failed though another replica had room"),
        (Generation, "_continue", never, "a request failed though another replica had room"),
        (Generation, "_has_alternative", lambda _: False, "a request failed though another replica had room"),
        (Breaker, "after", lambda one, *_: one, "a request was sent to a replica whose breaker must be open"),
        (
            picks,
            "home",
            lambda key, loads: min(loads, key=lambda load: load.outstanding),
            "a request of a conversation was sent to another replica than those before",
        ),
        (
            scoring.Router,
            "_best",
            lambda _, loads, *rest: min(loads, key=lambda load: load.outstanding),
            "a request was sent elsewhere than where its beginning is cached",
        ),
        (
            Generation,
            "remaining_s",
            property(lambda one: 600.0),
            "a request was served after its deadline",
        ),
    ],
    ids="failover continuation silence breaker session prefix deadline".split(),
)
def test_a_broken_promise_of_routing_is_found(monkeypatch, owner, name, planted, violation):
    monkeypatch.setattr(owner, name, planted)
    assert violation in faulty("8" if name == "remaining_s" else "600").violations


def failing() -> Result:
    """Run requests while a replica fails for some pauses of its breaker, and again for a moment."""
    faults = [
        {"kind": "fail", "pool": "main", "replica": 0, "at_s": at_s, "for_s": for_s}
        for at_s, for_s in ((3, 4), (14, 0.3))
    ]
    pools = {"main": {"replicas": 2, "slots": 30, "step": {"step_s": 0.05, "prefill_token_s": 0.001}}}
    people = {"chat": {"arrivals": "poisson:20", "output": "8"}}
    gateway = {"settings": {"breaker_failures": "3", "breaker_open_s": "1"}}
    return simulated(3, pools=pools, personas=people, gateway=gateway, faults=faults, duration_s=18.0)


def test_a_breaker_keeps_its_promises():
    assert not failing().violations


@pytest.mark.parametrize(
    ("name", "planted", "violation"),
    [
        (
            "after",
            lambda real: lambda one, ok, *rest: Breaker(failures=one.failures) if ok else real(one, ok, *rest),
            "a breaker opened before so many failures in a row",
        ),
        (
            "after",
            lambda real: (
                lambda *given: dataclasses.replace(new := real(*given), until_s=new.until_s + 20 * new.pause_s)
            ),
            "a breaker stayed open after its pause",
        ),
        (
            "allows",
            lambda real: lambda one, now_s: real(one, now_s) or one.state is BreakerState.HALF_OPEN,
            "a request was sent to a replica beside the trial of its breaker",
        ),
    ],
    ids="early long trial".split(),
)
def test_a_broken_promise_of_a_breaker_is_found(monkeypatch, name, planted, violation):
    monkeypatch.setattr(Breaker, name, planted(getattr(Breaker, name)))
    assert violation in failing().violations
