"""The planner's sums."""

from __future__ import annotations

import dataclasses
import json
import random
import shlex
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import arrivals, lengths
from cluster.plan import planner
from cluster.plan.engine import Replica
from cluster.plan.planner import cost_of, operating_point, replicas_by_hour
from cluster.plan.replica import closed_loop
from cluster.plan.scenario import Price, Slo, kind_of, of_table
from contract.errors import InvalidArgument
from contract.step_model import StepModel
from tests.cluster.plan.scenarios import REPLICA, table

POOL = of_table(table()).pools["main"]
PLAIN = StepModel(
    manifest_sha256="", machine="", source="measured", made="", step_s=0.01, sequence_s=0.001, prefill_token_s=0.0001
)
counts = st.lists(st.integers(0, 40), min_size=24, max_size=24)


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(planner, "REQUESTS", 200)
    monkeypatch.setattr(planner, "ROUNDS", 4)
    monkeypatch.setattr(planner, "DRAWN", 2000)
    for kept in (planner._means, planner._capacity):  # what was averaged over as many requests as usual, and over these
        kept.cache_clear()
    yield
    for kept in (planner._means, planner._capacity):
        kept.cache_clear()


def one_class(prompt, answer, requests_per_s=1.0):
    return {"name": "some", "requests_per_s": requests_per_s, "input": prompt, "output": answer}


def load(**pool):
    return planner.loads_of(of_table(table(**pool)).pools["main"], REPLICA, 0, "pools.main")[0]


@given(counts, st.floats(0.1, 3), st.floats(0.1, 3), st.floats(0, 3), st.floats(0, 1))
def test_reserved_replicas_are_those_that_pay(replicas, on_demand, reserved, spot, share):
    price = Price(on_demand=on_demand, reserved=reserved, spot=spot, spot_share=share)
    found = cost_of(price, replicas, 1000.0, 500.0)
    plain = cost_of(Price(on_demand=on_demand), replicas, 1000.0, 500.0)
    assert found.day <= plain.day + 1e-6 and plain.day == pytest.approx(on_demand * sum(replicas))
    served = [max(0, count - found.reserved) for count in replicas]
    assert found.on_demand_hours + found.spot_hours == sum(served)
    assert found.spot_hours <= share * sum(served) + 1e-7
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
def test_no_other_number_of_reserved_replicas_costs_less(replicas, on_demand, reserved, spot, share):
    price = Price(on_demand=on_demand, reserved=reserved, spot=spot, spot_share=share)

    def day(kept):
        """The definition: each replica of each hour at the least price that is to be had."""
        total = 24.0 * kept * reserved
        for count in replicas:
            beyond = max(0, count - kept)
            taken = int(beyond * share + 1e-9) if on_demand else beyond
            if not on_demand and beyond > (int(count * share + 1e-9) if spot else 0):
                return float("inf")
            taken = taken if spot and (spot < on_demand or not on_demand) else 0
            total += taken * spot + (beyond - taken) * on_demand
        return total

    found = cost_of(price, replicas, 1.0, 1.0)
    assert found.day == pytest.approx(min(day(kept) for kept in range(max(replicas) + 1)))
    assert found.day == pytest.approx(day(found.reserved))


def test_a_share_that_makes_whole_replicas_is_taken_in_full():
    """0.29 * 100 is 28.999999999999996."""
    found = cost_of(Price(on_demand=4.0, spot=1.0, spot_share=0.29), [100] * 24, 1, 1)
    assert (found.on_demand_hours, found.spot_hours) == (24 * 71, 24 * 29)


def test_many_replicas_are_priced():
    found = cost_of(Price(on_demand=2, reserved=1, spot=0.5, spot_share=0.3), [*range(79_000_000, 79_000_024)], 1, 1)
    assert found.reserved == 79_000_008  # each of the eight saves in 16 hours or more what it costs in 24


def test_without_on_demand_ones_the_rest_is_reserved():
    replicas = [10] * 12 + [20] * 12
    assert cost_of(Price(reserved=2.0), replicas, 1, 1).reserved == 20
    both = cost_of(Price(reserved=2.0, spot=1.0, spot_share=0.25), replicas, 1, 1)
    assert (both.reserved, both.on_demand_hours, both.spot_hours) == (15, 0, 12 * 5)
    assert cost_of(Price(spot=1.0, spot_share=1.0), replicas, 1, 1).spot_hours == 360


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


def test_the_objective_that_gives_way_first_binds():
    """A third more than the operating point misses the other one, too."""
    replica, mix = dataclasses.replace(REPLICA, slots=64, kv_tokens=10**6), load(classes=[one_class(*LONG)])
    count = planner._count(replica, mix)
    most = planner._capacity(replica, mix, count)
    at, above = (planner._simulated(replica, mix, part * most, count) for part in (0.5, 0.6))
    for slo, binds in (
        (Slo(itl_s=above.itl_p95_s, e2e_s=at.e2e_p95_s), "e2e_s"),
        (Slo(itl_s=at.itl_p95_s, e2e_s=above.e2e_p95_s), "itl_s"),
    ):
        rate, _, found = operating_point(replica, mix, slo, "")
        over = planner._simulated(replica, mix, 1.3 * rate, count)
        assert over.itl_p95_s > slo.itl_s and over.e2e_p95_s > slo.e2e_s and found == binds


def test_means_are_those_of_the_requests_of_a_trace(tmp_path: Path):
    """A fit to its median and 95th percentile would be 100 tokens."""
    rows = ({"at_s": n, "input_tokens": 100 if n % 25 else 5000, "output_tokens": 50} for n in range(100))
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, rows)))
    given = of_table(table(classes=[{"name": "some", "trace": "trace.jsonl"}]), tmp_path / "a.toml")
    mix = planner.loads_of(given.pools["main"], REPLICA, 0, "")[0]
    assert mix.means(REPLICA.longest, "") == pytest.approx((296, 50, 0), rel=0.15)
    lengths = [(one.input_tokens, one.output_tokens) for one in mix.requests(1.0, 1000)]
    assert set(lengths) == {(100, 50), (5000, 50)} and 15 < lengths.count((5000, 50)) < 70
    command = shlex.split(planner._bench(mix.classes[0], 2.5, 0))
    replayed = arrivals.parse(command[command.index("--arrivals") + 1])
    assert len(replayed.rows) == 100 and replayed.speed == pytest.approx(2.5)


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


LONG = {"p50": 200, "p95": 800, "most": 2000}, {"p50": 100, "p95": 400, "most": 1000}


@pytest.mark.slow  # thousands of requests: of fewer the operating point depends on which they are
@pytest.mark.parametrize(
    ("replica", "lengths"),
    [
        (Replica(PLAIN, 8, 8192, 10**6), LONG),
        (Replica(PLAIN, 64, 8192, 10**6), (200, 150)),
        (Replica(PLAIN, 16, 8192, 20_000), ({"p50": 2000, "p95": 4000, "most": 6000}, 100)),
    ],
)
def test_without_objectives_the_operating_point_is_what_a_full_replica_does(monkeypatch, replica, lengths):
    monkeypatch.setattr(planner, "REQUESTS", 2000)
    mix = load(classes=[one_class(*lengths)])
    draws, clients = random.Random(9), 2 * replica.slots
    full = closed_loop(replica, iter(lambda: mix.lengths(draws), None), clients, 1000.0, 100.0)
    rate, found, _ = operating_point(replica, mix, Slo(), "pools.main")
    assert 0.92 * full.requests_per_s < rate < 1.03 * full.requests_per_s
    assert rate * mix.means(replica.longest, "")[1] == pytest.approx(found.tokens_per_s, rel=0.05)


def test_an_objective_between_what_few_and_many_requests_alone_take_is_refused(monkeypatch):
    monkeypatch.setattr(planner, "REQUESTS", 600)
    replica, mix = Replica(PLAIN, 8, 8192, 10**6), dataclasses.replace(load(classes=[one_class(*LONG)]), seed=1)
    with pytest.raises(InvalidArgument, match=r"slo.e2e_s: must be at least [4-5][.\d]*, which requests alone take"):
        operating_point(replica, mix, Slo(e2e_s=3.75), "pools.main")
    rate, found, _ = operating_point(replica, mix, Slo(e2e_s=5.5), "pools.main")
    assert rate > 0.3 and found.e2e_p95_s <= 5.5


@pytest.mark.parametrize("slots", [16, 32])
def test_slots_do_not_bind_where_more_of_them_gain_nothing(slots):
    replica = Replica(dataclasses.replace(PLAIN, prefill_token_s=0.0005), slots, 8192, 10**6)
    _, _, binds = operating_point(replica, load(classes=[one_class(2000, 20)]), Slo(), "pools.main")
    assert binds == "steps"


def test_an_estimate_does_not_draft():
    with pytest.raises(InvalidArgument, match=r"pools.main.acceptance: must be left out: the engine does not draft"):
        planner.plan(of_table(table(acceptance=0.5)), Path("a.toml"))


DAY = [0.0] * 8 + [1.0] * 12 + [0.0] * 4


def chat_and_batch(chat_per_s: float, batch_per_s: float):
    """Return chats by day and long requests by night."""
    chat = one_class(100, 50, [chat_per_s * part for part in DAY])
    return [chat, one_class(6000, 1000, [batch_per_s * (1 - part) for part in DAY])]


def test_replicas_and_tokens_are_those_of_each_hours_mix(few):
    chat, batch = chat_and_batch(40.0, 5.0)
    alone = [planner.plan(of_table(table(slo={}, classes=[one])), Path("a.toml"))[0] for one in (chat, batch)]
    [both] = planner.plan(of_table(table(slo={}, classes=[chat, batch])), Path("a.toml"))
    assert both.hour == 0 and (both.input_tokens, both.output_tokens) == (6000, 1000)
    assert both.rate == pytest.approx(alone[1].rate) and both.little == pytest.approx(alone[1].little)
    assert [(one.hour, one.rate) for one in both.others] == [(8, pytest.approx(alone[0].rate))]
    assert max(alone[1].replicas) > 2 * max(alone[0].replicas)
    assert both.replicas == tuple(map(max, alone[0].replicas, alone[1].replicas))
    assert both.rates[0] == both.rate and both.rates[8] == both.others[0].rate
    tokens = 12 * 3600 * (40 * 150 + 5 * 7000)
    assert both.cost.per_1000_tokens == pytest.approx(1000 * both.cost.day / tokens)


def test_an_objective_that_one_hours_requests_alone_miss_is_refused_with_the_hour(few):
    given = table(slo={"e2e_s": 2.0}, classes=chat_and_batch(10_000.0, 0.1))
    with pytest.raises(InvalidArgument, match=r"pools.main.slo.e2e_s: must be at least .* alone take at hour 0, got 2"):
        planner.plan(of_table(given), Path("a.toml"))


@settings(max_examples=10, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 50), st.floats(0, 5)), min_size=24, max_size=24))
def test_hours_share_the_operating_point_of_a_mix_that_is_near(by_hour):
    chats, batches = zip(*by_hour, strict=True)
    classes = [one_class(100, 50, list(chats)), one_class(1000, 500, list(batches))]
    loads = planner.loads_of(of_table(table(classes=classes)).pools["main"], REPLICA, 0, "pools.main")
    found = planner._alike(loads)
    mixes = set(found.values())
    assert loads[0].work == max(one.work for one in loads) and found[loads[0]] == loads[0]
    assert len(mixes) <= planner.MOST_MIXES and all(found[mix] == mix for mix in mixes)
    for one, mix in found.items():
        assert one.apart(mix) == min(one.apart(other) for other in mixes)
        assert len(mixes) == planner.MOST_MIXES or one.apart(mix) <= planner.ALIKE


def test_hours_of_one_mix_have_one_operating_point_whatever_their_requests(few):
    users = [float(10 + hour) for hour in range(24)]
    [found] = planner.plan(of_table(table(classes=[one_class(100, 50, users)] * 2)), Path("a.toml"))
    assert not found.others and found.rates == pytest.approx([found.rate] * 24) and found.hour == 23


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
    counts, requests = [], planner.Load.requests
    monkeypatch.setattr(
        planner.Load, "requests", lambda load, rate, count: counts.append(count) or requests(load, rate, count)
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
    monkeypatch.setattr(planner, "ROUNDS", 3)
    monkeypatch.setattr(planner, "SEARCH", 2)


def test_a_prompt_is_read_in_a_step_of_its_own():
    """In each step a little of it would be read while the weights are, in no time."""
    replica = kind_of(of_table(table()).pools["main"], "pools.main")
    shares = planner._shares(replica, 4.0, 6000.0, 100.0)
    plain_s, with_prompt_s = (replica.step.seconds(4, 4 * 6050, tokens) for tokens in (0, 6000))
    steps_s = 24 * plain_s + with_prompt_s  # in 25 steps of four sequences 100 tokens are made, and one prompt is read
    assert shares["prefill"] == pytest.approx((with_prompt_s - plain_s) / steps_s) and shares["prefill"] > 0.2
    assert sum(shares.values()) == pytest.approx(1)


def test_a_plan_holds_together(few):
    [found] = planner.plan(of_table(table()), Path("a.toml"))
    assert found.source == "roofline" and sum(found.shares.values()) == pytest.approx(1)
    assert len(found.replicas) == 24 and min(found.replicas) >= 1
    assert 0 < found.little < 20 * found.forecast.e2e_mean_s
    assert found.cost.month == pytest.approx(730 * 2.0 * found.replicas[0])
    assert found.sensitivity["price"] == pytest.approx((-20, 20))
    assert all(None not in changes for changes in found.sensitivity.values())


def test_the_requests_at_once_are_those_of_the_hours_load_not_of_full_replicas(few):
    [found] = planner.plan(of_table(table(min_replicas=10)), Path("a.toml"))
    pool = of_table(table()).pools["main"]
    replica = kind_of(pool, "")
    mix = planner.loads_of(pool, replica, 0, "")[0]
    at = planner._simulated(replica, mix, 20 / 10, planner._count(replica, mix))
    assert found.replicas[0] == 10 and found.little == pytest.approx(20 * at.e2e_mean_s)
    [none] = planner.plan(of_table(table(classes=[one_class(200, 50, 0.0)], min_replicas=0)), Path("a.toml"))
    assert none.little == 0
