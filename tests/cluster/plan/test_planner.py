"""The planner's sums."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.plan import planner
from cluster.plan.planner import cost_of, operating_point, replicas_by_hour
from cluster.plan.scenario import Price, Slo, of_table
from contract.errors import InvalidArgument
from tests.cluster.plan.scenarios import REPLICA, table

POOL = of_table(table()).pools["main"]
counts = st.lists(st.integers(0, 40), min_size=24, max_size=24)


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(planner, "REQUESTS", 200)
    monkeypatch.setattr(planner, "ROUNDS", 4)


def load(**pool):
    return planner.load_of(of_table(table(**pool)).pools["main"], 0)[0]


@settings(max_examples=30)
@given(counts, st.floats(0.1, 3), st.floats(0.1, 3), st.floats(0, 3), st.floats(0, 1))
def test_reserved_replicas_are_those_that_pay(replicas, on_demand, reserved, spot, share):
    price = Price(on_demand=on_demand, reserved=reserved, spot=spot, spot_share=share)
    found = cost_of(price, replicas, 1000.0, 500.0)
    plain = cost_of(Price(on_demand=on_demand), replicas, 1000.0, 500.0)
    assert found.day <= plain.day + 1e-6 and plain.day == pytest.approx(on_demand * sum(replicas))
    served = [max(0, count - found.reserved) for count in replicas]
    assert found.on_demand_hours + found.spot_hours == sum(served)
    assert found.spot_hours <= share * sum(served) + 1e-9
    assert (
        found.month == pytest.approx(found.day / 24 * 730) and found.per_1000_output_tokens == 2 * found.per_1000_tokens
    )


@settings(max_examples=30)
@given(st.lists(st.floats(0, 1e4), min_size=24, max_size=24), st.floats(0.01, 100), st.floats(0.01, 10))
def test_replicas_carry_each_hour_with_the_headroom_and_one_less_does_not(rates, rate, more):
    found = replicas_by_hour(POOL, rates, rate)
    for per_s, count in zip(rates, found, strict=True):
        assert count * rate >= per_s * 1.3 * (1 - 1e-6) and count >= 1
        assert count == 1 or (count - 1) * rate < per_s * 1.3
    grown = replicas_by_hour(POOL, [per_s * (1 + more) for per_s in rates], rate)
    assert all(after >= before for before, after in zip(found, grown, strict=True))


def test_the_operating_point_keeps_the_objectives_and_a_little_more_does_not():
    mix, slo = load(), Slo(ttft_s=0.3, itl_s=0.05)
    rate, found, binds = operating_point(REPLICA, mix, slo, "pools.main")
    assert found.ttft_p95_s <= 0.3 and found.itl_p95_s <= 0.05 and found.stable and binds in planner.WHAT_MOVES
    more = planner.forecast(REPLICA, mix.requests(1.2 * rate, 264), 66)
    assert more.ttft_p95_s > 0.3 or more.itl_p95_s > 0.05 or not more.stable
    strict, _, _ = operating_point(REPLICA, mix, Slo(ttft_s=0.08, itl_s=0.05), "pools.main")
    assert strict <= rate


@pytest.mark.parametrize(
    ("slo", "change", "binds"),
    [
        (Slo(itl_s=0.03), {}, {"itl_s"}),
        (Slo(), {"slots": 2}, {"slots"}),
        (Slo(), {"slots": 64, "kv_tokens": 1200}, {"kv"}),
    ],
)
def test_what_binds_is_named(slo, change, binds):
    _, _, found = operating_point(dataclasses.replace(REPLICA, **change), load(), slo, "pools.main")
    assert found in binds


def test_an_objective_that_a_request_alone_misses_is_refused_by_name():
    with pytest.raises(
        InvalidArgument, match=r"pools.main.slo.ttft_s: must be at least 0.0\d+, which requests alone take"
    ):
        operating_point(REPLICA, load(), Slo(ttft_s=0.01), "pools.main")
    with pytest.raises(InvalidArgument, match="pools.main.classes: must be requests of at most 8192 tokens, got"):
        one = table()["pools"]["main"]["classes"][0] | {"input": 9000}
        operating_point(REPLICA, load(classes=[one]), Slo(), "pools.main")
    short = dataclasses.replace(REPLICA, max_seq_len=64)
    with pytest.raises(InvalidArgument, match="pools.main.classes: must be requests of at most 64 tokens, got"):
        operating_point(short, load(), Slo(), "pools.main")


def test_a_plan_holds_together(monkeypatch):
    monkeypatch.setattr(planner, "REQUESTS", 40)
    monkeypatch.setattr(planner, "ROUNDS", 0)
    monkeypatch.setattr(planner, "SEARCH", 2)
    [found] = planner.plan(of_table(table()), Path("a.toml"))
    assert found.source == "roofline" and sum(found.shares.values()) == pytest.approx(1)
    assert len(found.replicas) == 24 and min(found.replicas) >= 1
    assert found.little == pytest.approx(20 * found.forecast.e2e_mean_s)
    assert found.cost.month == pytest.approx(730 * 2.0 * found.replicas[0])
    assert found.sensitivity["price"] == pytest.approx((-20, 20))
    assert all(None not in changes for changes in found.sensitivity.values())


def test_an_engine_that_was_not_calibrated_is_named(tmp_path: Path):
    given = of_table(table(estimate=None, engine=str(tmp_path)))
    with pytest.raises(InvalidArgument, match="pools.main.engine: must be a calibrated engine: .*half-built"):
        planner.plan(given, Path("a.toml"))
