"""The planner's sums."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import arrivals, lengths
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


@given(
    st.lists(st.integers(0, 130), min_size=24, max_size=24),
    st.sampled_from([0.0, 2.0, 3.5]),
    st.floats(0.1, 3),
    st.sampled_from([0.0, 0.5, 1.5, 4.0]),
    st.floats(0, 1),
)
@settings(max_examples=60)
def test_no_other_number_of_reserved_replicas_costs_less(replicas, on_demand, reserved, spot, share):
    price = Price(on_demand=on_demand, reserved=reserved, spot=spot, spot_share=share)

    def day(kept):
        """The definition: each replica of each hour at the least price that is to be had."""
        total = 24.0 * kept * reserved
        for count in replicas:
            beyond = max(0, count - kept)
            taken = int(beyond * share) if on_demand else beyond
            if not on_demand and beyond > (int(count * share) if spot else 0):
                return float("inf")
            taken = taken if spot and (spot < on_demand or not on_demand) else 0
            total += taken * spot + (beyond - taken) * on_demand
        return total

    found = cost_of(price, replicas, 1.0, 1.0)
    assert found.day == pytest.approx(min(day(kept) for kept in range(max(replicas) + 1)))
    assert found.day == pytest.approx(day(found.reserved))


def test_many_replicas_are_priced():
    found = cost_of(Price(on_demand=2, reserved=1, spot=0.5, spot_share=0.3), [*range(79_000_000, 79_000_024)], 1, 1)
    assert found.reserved == 79_000_008  # each of the eight saves in 16 hours or more what it costs in 24


def test_without_on_demand_ones_the_rest_is_reserved():
    replicas = [10] * 12 + [20] * 12
    assert cost_of(Price(reserved=2.0), replicas, 1, 1).reserved == 20
    both = cost_of(Price(reserved=2.0, spot=1.0, spot_share=0.25), replicas, 1, 1)
    assert (both.reserved, both.on_demand_hours, both.spot_hours) == (15, 0, 12 * 5)
    assert cost_of(Price(spot=1.0, spot_share=1.0), replicas, 1, 1).spot_hours == 360


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
    with pytest.raises(InvalidArgument, match="pools.main.classes.0: must be requests of at most 8192 tokens, 95% of"):
        one = table()["pools"]["main"]["classes"][0] | {"input": 9000}
        operating_point(REPLICA, load(classes=[one]), Slo(), "pools.main")
    short = dataclasses.replace(REPLICA, max_seq_len=64)
    with pytest.raises(InvalidArgument, match="pools.main.classes.0: must be requests of at most 64 tokens, 95% of"):
        operating_point(short, load(), Slo(), "pools.main")


def test_requests_that_are_too_long_are_told_and_not_paid_for(few, monkeypatch):
    one = table()["pools"]["main"]["classes"][0] | {"input": {"p50": 200, "p95": 250, "most": 9000}, "output": 5}
    monkeypatch.setattr(planner, "kind_of", lambda pool, place: dataclasses.replace(REPLICA, max_seq_len=265))
    [found] = planner.plan(of_table(table(classes=[one])), Path("a.toml"))
    assert found.longest == 265 and 0.01 < found.refused < planner.MOST_REFUSED and found.input_tokens < 260
    tokens = 86_400 * 20 * (1 - found.refused) * (found.input_tokens + found.output_tokens)
    assert found.cost.per_1000_tokens == pytest.approx(1000 * found.cost.day / tokens)


def test_so_many_requests_are_simulated_at_most(few, monkeypatch):
    monkeypatch.setattr(planner, "ROUNDS", 10)
    monkeypatch.setattr(planner, "MOST_REQUESTS", 50)
    counts, requests = [], planner._Load.requests
    monkeypatch.setattr(
        planner._Load, "requests", lambda load, rate, count: counts.append(count) or requests(load, rate, count)
    )
    operating_point(REPLICA, load(), Slo(), "pools.main")
    assert max(counts) == 50


def checks(classes):
    """Return the plan of classes, and the options of each of its commands of the bench, by name."""
    [found] = planner.plan(of_table(table(classes=classes)), Path("a.toml"))
    runs = [shlex.split(run) for run in found.check.removesuffix(" & wait").split(" & ")]
    return found, [dict(zip(run[4::2], run[5::2], strict=True)) for run in runs]


def test_the_check_of_an_estimate_sends_the_mix_of_its_classes(few):
    one = table()["pools"]["main"]["classes"][0]
    mix = [one | {"requests_per_s": 0}, one | {"requests_per_s": 3}, one | {"requests_per_s": 1, "input": 50}]
    found, runs = checks(mix)
    rates = [arrivals.parse(run["--arrivals"]).rate_per_s for run in runs]
    assert rates == pytest.approx([0.75 * found.rate, 0.25 * found.rate], rel=0.01)
    assert [lengths.parse(run["--input"], "input").most for run in runs] == [200, 50]
    assert len({run["--seed"] for run in runs}) == len({run["--out"] for run in runs}) == 2
    assert found.check.endswith(" & wait")
    found, [run] = checks([one | {"output": {"p50": 1, "p95": 1e6, "most": 60}}])
    assert "--out" not in run and lengths.parse(run["--output"], "output").sigma == pytest.approx(8.4, rel=0.01)


def test_the_check_of_an_engine_is_quoted():
    pool = POOL.model_copy(update={"engine": "engines/demo"})
    command = planner._check("a b", pool, Path("my plan.toml"), 1.0, load())
    assert shlex.split(command)[3:] == ["plan", "my plan.toml", "--check=a b"]


def test_more_tokens_cost_more_where_lengths_are_fixed(few):
    one = table()["pools"]["main"]["classes"][0] | {"requests_per_s": 4000.0, "input": 1000, "output": 400}
    [found] = planner.plan(of_table(table(classes=[one], slo={})), Path("a.toml"))
    assert found.sensitivity["output"][0] < -5 and found.sensitivity["output"][1] > 5


def test_the_highest_price_that_is_allowed_is_planned(few):
    [found] = planner.plan(of_table(table(price={"on_demand": 1e9})), Path("a.toml"))
    assert found.sensitivity["price"] == pytest.approx((-20, 20))


@pytest.fixture
def few(monkeypatch):
    """Simulate few requests."""
    monkeypatch.setattr(planner, "REQUESTS", 40)
    monkeypatch.setattr(planner, "ROUNDS", 0)
    monkeypatch.setattr(planner, "SEARCH", 2)


def test_a_plan_holds_together(few):
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
    for name in ("a" * 5000, "a\0b"):
        with pytest.raises(InvalidArgument, match="pools.main.engine: must be a calibrated engine"):
            planner.plan(of_table(table(estimate=None, engine=name)), Path("a.toml"))
