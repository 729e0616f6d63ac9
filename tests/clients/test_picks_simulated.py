"""Picks against each other, in simulated time: where each is better, and that none is worse than it promises.

Seeds are fixed and time is simulated, so the figures are the same on every machine.
"""

from __future__ import annotations

import random

import pytest

from clients.replica_set import picks
from clients.replica_set.costs import Costs
from tests.clients.fleet import Engine, Job, Outcome, poisson, simulate

pytestmark = pytest.mark.slow

GPU = {f"r{n}": Engine() for n in range(4)}
# Slow at prompts: a prompt token is a tenth of a step.
CPU = {f"r{n}": Engine(8, 0.02, 0.004, prefill_s_per_token=0.0004) for n in range(4)}


def chat(now_s: float, rng: random.Random) -> Job:
    """Four short questions to one long rewrite."""
    if rng.random() < 0.8:
        return Job(now_s, rng.randint(20, 200), rng.randint(10, 60), 64)
    return Job(now_s, rng.randint(500, 2000), rng.randint(300, 800), 1024)


def documents(now_s: float, rng: random.Random) -> Job:
    """Short answers all, but one prompt in seven is a document."""
    prompt_tokens = rng.randint(20, 100) if rng.random() < 0.85 else rng.randint(6000, 12_000)
    return Job(now_s, prompt_tokens, rng.randint(20, 60), 64)


def tenants(now_s: float, rng: random.Random) -> Job:
    """Sixty tenants with a long preamble each, a few of them with most of the traffic."""
    tenant = min(int(rng.paretovariate(0.6)), 60)
    return Job(now_s, 2000 + rng.randint(20, 100), rng.randint(10, 60), 64, f"tenant {tenant}", 2000)


def conversations(now_s: float, rng: random.Random) -> Job:
    """Each with a history of its own that the next turn repeats."""
    number = rng.randrange(200)
    return Job(now_s, 1500, rng.randint(10, 60), 64, f"c{number}", 1400, session=f"c{number}")


def play(name: str, make, rate: float, engines: dict[str, Engine], count: int = 2000, **options) -> Outcome:
    return simulate(picks.BY_NAME[name], poisson(rate, count, random.Random(1), make), engines, **options)


def test_the_fleet_keeps_its_own_arithmetic() -> None:
    engine = Engine(slots=2, step_s=0.01, step_s_per_sequence=0.0, prefill_s_per_token=0.001)
    lone = simulate(picks.round_robin, [Job(0.0, 100, 11, 11)], {"r": engine})
    assert lone.ttft_s == [pytest.approx(0.11)] and lone.latency_s == [pytest.approx(0.21)]
    three = simulate(picks.round_robin, [Job(0.0, 0, 10, 10)] * 3, {"r": engine})
    assert max(three.ttft_s) > 0.1  # the third waits for a slot


def test_round_robin_is_beaten_wherever_requests_differ() -> None:
    blind, aware = play("round_robin", chat, 22, GPU), play("least_outstanding", chat, 22, GPU)
    assert aware.ttft(0.9) < 0.7 * blind.ttft(0.9)
    assert aware.latency(0.5) < 0.9 * blind.latency(0.5)
    assert aware.most_outstanding < blind.most_outstanding


def test_two_choices_are_nearly_as_good_as_looking_at_all() -> None:
    two, all_of_them = play("power_of_two_choices", chat, 22, GPU), play("least_outstanding", chat, 22, GPU)
    blind = play("round_robin", chat, 22, GPU)
    assert two.ttft(0.9) < all_of_them.ttft(0.9) + 0.3 * (blind.ttft(0.9) - all_of_them.ttft(0.9))


def test_with_old_loads_two_choices_avoid_the_herd() -> None:
    two = play("power_of_two_choices", chat, 22, GPU, look_every_s=1.0)
    herd = play("least_outstanding", chat, 22, GPU, look_every_s=1.0)
    assert two.ttft(0.5) < herd.ttft(0.5)
    assert two.most_outstanding < herd.most_outstanding


@pytest.mark.parametrize("rate", [2, 3])
def test_token_aware_keeps_short_prompts_from_waiting_behind_documents(rate: float) -> None:
    tokens, requests = play("token_aware", documents, rate, CPU), play("least_outstanding", documents, rate, CPU)
    assert tokens.ttft(0.9) < 0.95 * requests.ttft(0.9)
    assert tokens.latency(0.95) < 1.02 * requests.latency(0.95)


@pytest.mark.parametrize("rate", [16, 22])
def test_token_aware_is_no_worse_where_prompts_hardly_matter(rate: float) -> None:
    tokens, requests = play("token_aware", chat, rate, GPU), play("least_outstanding", chat, rate, GPU)
    assert tokens.ttft(0.9) < 1.1 * requests.ttft(0.9)
    assert tokens.latency(0.95) < 1.1 * requests.latency(0.95)


def test_a_measured_weight_beats_a_constant_that_does_not_fit() -> None:
    """An engine whose prompt tokens cost several decoded ones, which no constant 0.1 foresees."""
    slow = {f"r{n}": Engine(16, 0.02, 0.0005, prefill_s_per_token=0.004) for n in range(4)}

    def prompts(now_s: float, rng: random.Random) -> Job:
        return Job(now_s, rng.choice([10, 10, 10, 1500]), rng.randint(20, 200), 256)

    class Fixed(Costs):
        prefill_weight = 0.1

    learned = Costs()
    measured = play("token_aware", prompts, 1.6, slow, costs=learned)
    assumed = play("token_aware", prompts, 1.6, slow, costs=Fixed())
    assert learned.prefill_weight > 0.2
    assert measured.ttft(0.9) < 0.9 * assumed.ttft(0.9)


def test_prefix_affinity_finds_more_in_the_caches_and_answers_sooner() -> None:
    engines = {f"r{n}": Engine(prefill_s_per_token=0.0002, cached_prefixes=10) for n in range(4)}
    kept, spread = play("prefix_affinity", tenants, 12, engines), play("least_outstanding", tenants, 12, engines)
    assert kept.hit_rate > spread.hit_rate + 0.08
    assert kept.latency(0.95) < 0.9 * spread.latency(0.95)


def test_session_affinity_keeps_conversations_together_without_drowning_a_replica() -> None:
    engines = {f"r{n}": Engine(prefill_s_per_token=0.0002, cached_prefixes=80) for n in range(4)}
    kept = play("session_affinity", conversations, 14, engines)
    spread = play("power_of_two_choices", conversations, 14, engines)
    assert kept.hit_rate > 0.7 > spread.hit_rate + 0.1
    assert max(kept.shares.values()) < 1.6 * 2000 / 4


def test_one_popular_prefix_spreads_over_the_fleet_instead_of_drowning_one_replica() -> None:
    def viral(now_s: float, rng: random.Random) -> Job:
        return Job(now_s, 500, rng.randint(20, 60), 64, "the one", 450)

    bounded = play("prefix_affinity", viral, 40, GPU)
    unbounded = simulate(
        lambda loads, request, rng: picks.home(request.prefix, loads, 1e9),
        poisson(40, 2000, random.Random(1), viral),
        GPU,
    )
    assert len(unbounded.shares) == 1 and len(bounded.shares) == 4
    assert bounded.ttft(0.9) < 0.1 * unbounded.ttft(0.9)
