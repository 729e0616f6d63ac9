"""Metrics that are computed at a scrape, from callables."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from gateway.admission.fair_queue import Entry
from gateway.admission.pool_slots import PoolSlots
from gateway.admission.sharing import Capacity
from gateway.config.policy import AdmissionRules, Prices
from gateway.telemetry.state_metrics import PoolState, ReplicaSeconds, StateMetrics


def registry(**more: object) -> CollectorRegistry:
    found = CollectorRegistry()
    values = {
        "replicas": lambda: (),
        "upstreams": lambda: (),
        "pools": lambda: (),
        "body_bytes": lambda: 7,
        "counted": lambda: 3,
        "degraded": lambda: {"overflow": 3},
        "replica_seconds": lambda: 7200.0,
        "tokens": lambda: 4000,
        "prices": lambda: None,
    }
    found.register(StateMetrics(**{**values, **more}))
    return found


def test_values_are_read_at_the_scrape():
    degraded = {"overflow": 1}
    found = registry(degraded=lambda: degraded)
    degraded["overflow"] = 2
    assert found.get_sample_value("trident_gateway_degraded_total", {"stage": "overflow"}) == 2
    assert found.get_sample_value("trident_gateway_body_bytes") == 7
    assert found.get_sample_value("trident_gateway_counted_requests") == 3
    assert found.get_sample_value("trident_gateway_replica_seconds_total") == 7200


def test_cost_is_reported_only_with_a_price():
    assert registry().get_sample_value("trident_gateway_cost_total", {"currency": "EUR"}) is None
    priced = registry(prices=lambda: Prices(replica_hour=2.0, currency="EUR"))
    assert priced.get_sample_value("trident_gateway_cost_total", {"currency": "EUR"}) == 4.0
    assert priced.get_sample_value("trident_gateway_cost_per_1000_tokens", {"currency": "EUR"}) == 1.0


def test_a_pool_without_a_healthy_replica_has_no_slots():
    slots = PoolSlots(lambda: 0.0, lambda: Capacity(4, 5), AdmissionRules())
    slots.queue.push(Entry("acme", 100.0, priority=2), 0.0)
    found = registry(pools=lambda: [PoolState("main", slots, [])])
    assert found.get_sample_value("trident_gateway_pool_ready", {"pool": "main"}) == 0
    assert found.get_sample_value("trident_gateway_pool_slots", {"pool": "main"}) == 0
    assert found.get_sample_value("trident_gateway_pool_queued_tokens", {"pool": "main"}) == 100
    assert found.get_sample_value("trident_gateway_queue_depth", {"pool": "main", "priority": "2"}) == 1


def test_replicas_that_start_are_told_and_an_unknown_time_is_not_zero():
    for starting, count, seconds in (((), 0, 0), ((4.0, 9.5), 2, 9.5), ((4.0, None), 2, None)):
        slots = PoolSlots(lambda: 0.0, lambda: Capacity(4, 5), AdmissionRules())
        found = registry(pools=lambda: [PoolState("main", slots, [], starting)])  # noqa: B023
        assert found.get_sample_value("trident_gateway_pool_starting", {"pool": "main"}) == count
        assert found.get_sample_value("trident_gateway_pool_starting_seconds", {"pool": "main"}) == seconds


async def test_the_backlog_is_told_by_class_and_state_and_what_came_of_it():
    slots = PoolSlots(lambda: 0.0, lambda: Capacity(1, 1), AdmissionRules(short_reserve=0.0))
    first, second = Entry("acme", 100.0, priority=2, slots=2), Entry("acme", 30.0, priority=0)
    claims = [slots.claim(entry, 10.0) for entry in (first, second)]
    found = registry(pools=lambda: [PoolState("main", slots, [])])

    def tokens(priority: str, state: str) -> float | None:
        labels = {"pool": "main", "priority": priority, "state": state}
        return found.get_sample_value("trident_gateway_pool_backlog_tokens", labels)

    assert (tokens("2", "running"), tokens("2", "queued"), tokens("0", "queued")) == (50, 50, 30)
    slots.worked(25.0, 100.0)
    claims[0].close(60)
    assert (tokens("2", "running"), tokens("2", "queued"), tokens("0", "running")) == (0, 0, 30)
    claims[1].close(30)
    assert slots.idle
    assert found.get_sample_value("trident_gateway_pool_arrived_tokens_total", {"pool": "main"}) == 130
    assert found.get_sample_value("trident_gateway_pool_token_cost", {"pool": "main"}) == 0.25
    assert found.get_sample_value("trident_gateway_pool_drain_tokens_per_second", {"pool": "main"}) >= 0


def test_replica_seconds_integrate_the_number_of_healthy_replicas(clock):
    healthy = 2
    seconds = ReplicaSeconds(lambda: healthy, clock)
    seconds.check(clock())
    clock.advance(10)
    healthy = 0
    seconds.check(clock())
    clock.advance(100)
    assert seconds.total() == pytest.approx(20)
