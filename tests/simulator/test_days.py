"""Hours and days of traffic: the scenarios that ship, the worked examples, the scaling law and fairness (make
test-simulator)."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator import report
from simulator.run import Result, run
from simulator.scenario import read
from tests.simulator.test_run import CHAT, POOL, simulated

pytestmark = pytest.mark.simulation
SCENARIOS = Path(__file__).resolve().parents[2] / "simulator" / "scenarios"
GPU = {"slots": 64, "step": {"step_s": 0.02, "prefill_token_s": 0.0001}}
# Of a replica here: little, so that few requests keep several busy.
SMALL = {"slots": 4, "start_s": 60.0, "step": {"step_s": 0.05}}
LITTLE = {"slots": 4, "start_s": 60.0, "step": {"step_s": 0.2}}  # 20 tokens/s
SLOW = {"input": "20", "output": "lognormal:120,0.3"}


def wanted(result: Result) -> list[int]:
    return [count for _, _, count, _ in result.decisions]


def turns(counts: list[int]) -> int:
    """How often the number changed its direction."""
    steps = [after > before for before, after in pairwise(counts)]
    return sum(one != other for one, other in pairwise(steps))


def test_the_latency_breakdown_of_little_load():
    """P50, P95 and P99 of 138, 165 and 183 ms, all of it the prompt."""
    told = report.of(run(read(SCENARIOS / "low-load.toml")), {})["all"]
    found = [1e3 * told["ttft_s"][q] for q in ("p50", "p95", "p99")]
    assert found == pytest.approx([138, 165, 183], rel=0.1)
    assert told["largest_part_of_ttft"] == {"prefill": 1.0}


def test_the_latency_breakdown_of_much_load():
    """248, 719 and 1,339 ms: as far from the median as the queue and the prompts of others put it."""
    people = {"chat": {"arrivals": "poisson:4", "input": "lognormal:1165,0.12", "output": "lognormal:40,0.5"}}
    told = report.of(simulated(pools={"main": GPU}, personas=people, duration_s=900.0), {})["all"]
    found = [1e3 * told["ttft_s"][q] for q in ("p50", "p95", "p99")]
    assert found == pytest.approx([248, 719, 1339], rel=0.25)
    assert told["largest_part_of_ttft"]["queue"] > 0.1


def test_a_flash_crowd_is_held_and_answered():
    scenario = read(SCENARIOS / "flash-crowd.toml")
    result = run(scenario)
    crowd = report.of(result, {})["personas"]["crowd"]
    assert not result.violations and max(wanted(result)) >= 8
    assert crowd["ok"] + crowd["cancelled"] + crowd["failed"] == crowd["requests"] > 5000
    late = [record for record in result.records["regulars"] if record.intended_s > 1002 + 700]
    assert all(record.ok and record.ttft_s < 1.0 for record in late)  # it is over


def test_faults_cost_no_answer():
    result = run(read(SCENARIOS / "faults.toml"))
    assert not result.violations and all(record.ok for record in result.everyone)


@pytest.mark.parametrize("seed", range(3))
def test_budgets_caps_faults_and_people_who_leave_at_two_gateways(seed):
    result = run(read(SCENARIOS / "mixed.toml"), seed)
    assert not result.violations and not result.missed
    met = {"refused: budget", "refused: concurrency", "refused: deadline", "retried", "lost its replica: continued"}
    assert result.counts.keys() >= met
    steady = result.records["steady"]
    assert sum(bool(one.cancelled and one.messages) for one in steady) > 100 < sum(one.ok for one in steady)


@pytest.mark.days
def test_ten_thousand_users_at_once():
    many = {"main": GPU | {"replicas": 20, "slots": 512, "kv_tokens": 1_000_000, "step": {"step_s": 0.02}}}
    users = {"chat": {"users": 10_000, "think_s": 5.0, "input": "100", "output": "600"}}
    gateway = {"settings": {"max_in_flight": "20000", "first_token_timeout_s": "60"}}
    result = simulated(pools=many, personas=users, gateway=gateway, duration_s=20.0)
    assert not result.violations and len(result.everyone) >= 10_000 and all(one.ok for one in result.everyone)
    assert max(sample.running for sample in result.samples) > 9_000


WORK = 23  # tokens of decoding that a request of 20 and 20 tokens comes to


def test_the_vector_of_replicas(tmp_path):
    """1, 2, 3, 4, 4, 3 at 0, 120, 240, 360, 600 and 1,000 s, five at most."""
    levels = ((0, 60, 45), (60, 180, 100), (180, 300, 160), (300, 560, 235), (560, 1200, 150))  # from, until, tokens/s
    instants = [
        from_s + WORK * place / level
        for from_s, until_s, level in levels
        for place in range(int((until_s - from_s) * level / WORK))
    ]
    (tmp_path / "trace.jsonl").write_text("\n".join(json.dumps({"at_s": at_s}) for at_s in instants))
    people = {"all": {"arrivals": "trace:trace.jsonl", "input": "20", "output": "20"}}
    pool = SMALL | {"start_s": 5.0}  # 80 tokens/s
    rules = {"max_replicas": 5, "step_up": 1, "time_of_day": False, "start_s": 5.0, "slow_start_s": 0.0}
    scaling = {"pools": {"main": rules}}
    result = simulated(folder=tmp_path, pools={"main": pool}, personas=people, scaling=scaling, duration_s=1200.0)
    assert not result.violations
    at = {sample.at_s: sample.wanted for sample in result.samples}
    assert [at[float(second)] for second in (0, 120, 240, 360, 600, 1000)] == [1, 2, 3, 4, 4, 3], result.decisions


@pytest.mark.days
def test_a_day_follows_the_sun():
    day = [0.1] * 7 + [0.3, 0.6, 0.9, 1.0, 1.0, 0.9, 0.9, 1.0, 1.0, 0.8, 0.6, 0.5, 0.5, 0.4, 0.3, 0.2, 0.1]
    rules = {"min_replicas": 1, "max_replicas": 12}
    people = {"chat": SLOW | {"arrivals": "poisson:0.3", "day": day}}
    scaling = {"pools": {"main": rules}}
    settings = {"metrics_interval_s": "5", "probe_interval_s": "60"}
    result = simulated(
        pools={"main": LITTLE}, personas=people, scaling=scaling, duration_s=86_400.0, interval_s=15.0,
        gateway={"settings": settings},
    )  # fmt: skip
    assert not result.violations and min(wanted(result)) == 1
    told = report.of(result, {})["all"]
    assert told["ok"] / told["requests"] > 0.995
    night = [sample.wanted for sample in result.samples if 3 * 3600 < sample.at_s < 6 * 3600]
    noon = [sample.wanted for sample in result.samples if 10 * 3600 < sample.at_s < 15 * 3600]
    assert max(night) < min(noon) and turns(wanted(result)) < 20
    fixed = 24 * max(noon)
    assert result.replica_hours["main"] < 0.75 * fixed


@pytest.mark.days
@settings(max_examples=3)
@given(rate=st.floats(0.04, 0.3), seed=st.integers(0, 1000), replicas=st.integers(0, 8), floor=st.integers(1, 3))
def test_any_start_finds_its_number_and_stays(rate, seed, replicas, floor):
    """Never below the floor, no flapping on a noisy load, recovery from any number, monotone in the load."""
    rules = {"min_replicas": floor, "max_replicas": 12}

    def settled(rate: float, replicas: int) -> list[int]:
        people = {"chat": SLOW | {"arrivals": f"poisson:{rate}"}}
        pool = {"main": LITTLE | {"replicas": replicas, "start_s": 20.0}}
        result = simulated(
            seed, pools=pool, personas=people, scaling={"pools": {"main": rules}}, duration_s=5400.0, interval_s=15.0,
            gateway={"settings": {"metrics_interval_s": "5", "max_in_flight": "5000"}},
        )  # fmt: skip
        assert not result.violations
        return [sample.wanted for sample in result.samples if sample.at_s > 3600]

    late = settled(rate, replicas)
    assert min(late) >= floor and max(late) - min(late) <= 1 and turns(late) <= 2
    assert abs(late[-1] - settled(rate, 1)[-1]) <= 1
    assert settled(2 * rate, replicas)[-1] >= late[-1]


KEYS = 'salt = "9f3c0d5e2a71b8446c1fd0a3e97b5a28"\n'


@settings(max_examples=3)
@given(weights=st.tuples(st.sampled_from([1.0, 2.0, 3.0]), st.sampled_from([1.0, 4.0])), seed=st.integers(0, 1000))
def test_tenants_get_their_weights_of_what_there_is(tmp_path_factory, weights, seed):
    folder = tmp_path_factory.mktemp("fair")
    teams = "".join(f"[orgs.acme.teams.t{number}]\nweight = {weight}\n" for number, weight in enumerate(weights))
    (folder / "gateway.toml").write_text(
        KEYS + teams + "[admission]\ntenant_share = 1.0\nmax_waiting_per_tenant = 500\n"
    )
    greedy = CHAT | {"arrivals": "poisson:8", "output": "lognormal:60,0.5", "patience_s": 25.0}
    people = {f"t{number}": greedy | {"key": f"acme/t{number}/k"} for number in range(2)}
    result = simulated(
        seed, folder=folder, pools={"main": POOL | {"slots": 6}}, personas=people, duration_s=300.0, warmup_s=30.0,
        gateway={"policy": "gateway.toml", "settings": {"max_in_flight": "5000"}},
    )  # fmt: skip
    assert not result.violations
    told = report.of(result, {})["personas"]
    first, second = (told[f"t{number}"]["output_tokens_per_s"] for number in range(2))
    assert first / second == pytest.approx(weights[0] / weights[1], rel=0.2)


@settings(max_examples=3)
@given(per_minute=st.integers(2_000, 20_000), burst=st.integers(1_000, 5_000), seed=st.integers(0, 1000))
def test_no_budget_is_exceeded_and_what_it_allows_is_served(tmp_path_factory, per_minute, burst, seed):
    folder = tmp_path_factory.mktemp("budget")
    limits = f"[orgs.acme]\ntokens_per_minute = {per_minute}\nburst_tokens = {burst}\n"
    (folder / "gateway.toml").write_text(KEYS + limits)
    people = {"chat": CHAT | {"arrivals": "poisson:10", "key": "acme/web/site"}}
    result = simulated(seed, folder=folder, personas=people, gateway={"policy": "gateway.toml"}, duration_s=300.0)
    assert not result.violations and result.counts["refused: budget"] > 0
    used = sum(record.input_tokens + record.tokens for record in result.everyone)
    assert used > 0.8 * (burst + per_minute * 5)
