from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clients.replica_set import costs
from clients.replica_set.costs import Costs, Observation, Pace
from contract.generation import GenerationRequest


def observed(learned: Costs, weight: float, count: int = 200, overhead_s: float = 0.02, seed: int = 0) -> None:
    """Answers of an engine whose prompt token costs ``weight`` of a decoded one, each with a fixed delay on top."""
    rng = random.Random(seed)
    for _ in range(count):
        prompt, answer, running = rng.randint(20, 3000), rng.randint(2, 300), rng.randint(1, 20)
        share_s = 0.001
        prefill_s = overhead_s + prompt * weight * share_s * rng.uniform(0.9, 1.1)
        learned.observe(Observation(prefill_s, prompt, (answer - 1) * share_s * running, answer, running))


@pytest.mark.parametrize("weight", [0.02, 0.1, 1.0, 4.0])
def test_the_prefill_weight_is_learned_whatever_it_is(weight: float) -> None:
    learned = Costs()
    observed(learned, weight)
    assert learned.prefill_weight == pytest.approx(weight, rel=0.25)


def test_a_weight_that_changes_is_followed() -> None:
    learned = Costs()
    observed(learned, 0.1)
    observed(learned, 0.5, seed=1)
    assert learned.prefill_weight == pytest.approx(0.5, rel=0.25)


def test_short_prompts_are_not_blamed_for_the_step_they_waited_for() -> None:
    learned, rng = Costs(), random.Random(0)
    for _ in range(100):
        prompt = rng.randint(5, 50)
        learned.observe(Observation(0.02 + prompt * 0.0001, prompt, 0.1, 101, 1))
    assert learned.prefill_weight == pytest.approx(0.1, rel=0.05)  # the plain ratio would say 0.8


def test_before_anything_is_known_estimates_are_cautious() -> None:
    cost = Costs().estimate(prompt_bytes=4000, max_tokens=500)
    assert (cost.prefill, cost.decode, cost.total) == (100.0, 500.0, 600.0)


def test_an_answer_is_booked_at_the_average_length_and_never_above_max_tokens() -> None:
    learned = Costs()
    for tokens in (10, 30):
        learned.observe(Observation(0.1, 10, 0.1, tokens, 1))
    assert learned.estimate(0, 1000).decode == 20
    assert learned.estimate(0, 5).decode == 5


def test_the_size_of_a_token_is_learned() -> None:
    learned = Costs()
    for _ in range(600):
        learned.observe_size(200, 100)
    assert learned.estimate(1000, 1).prefill == pytest.approx(50, rel=0.1)


@given(st.lists(st.tuples(*[st.floats(0, 1e3)] * 2, st.integers(0, 9999), st.integers(0, 999), st.floats(0, 99))))
def test_no_observation_makes_a_cost_negative_or_undefined(rows) -> None:
    learned = Costs()
    for prefill_s, decode_s, uncached, answer, running in rows:
        learned.observe(Observation(prefill_s, uncached, decode_s, answer, running))
        learned.observe_size(uncached, answer)
        cost = learned.estimate(1000, 100)
        assert 0 <= cost.prefill < float("inf") and 0 <= cost.decode <= 100


def test_the_size_and_the_beginning_of_a_prompt() -> None:
    system, first = {"role": "system", "content": "be brief"}, {"role": "user", "content": "hällo"}
    later = ({"role": "assistant", "content": "yes"}, {"role": "user", "content": "and?"})
    assert costs.prompt_bytes(GenerationRequest("hällo")) == 6
    assert costs.prompt_bytes(GenerationRequest(messages=(system, first))) == 14
    assert costs.prompt_bytes(GenerationRequest(input_ids=(1, 2, 3))) == 12
    assert costs.prefix(GenerationRequest(input_ids=(1, 2, 3)), 8) == "1 2"
    called = {"role": "assistant", "content": None, "tool_calls": [1]}
    with_tools = GenerationRequest(messages=(system, first, called), tools="[{}]")
    assert costs.prompt_bytes(with_tools) == 14 + len("[1]") + len("[{}]")
    assert costs.prefix(with_tools).startswith("[{}]\0")
    turn_one = costs.prefix(GenerationRequest(messages=(system, first)))
    assert turn_one == costs.prefix(GenerationRequest(messages=(system, first, *later))) != ""
    assert turn_one != costs.prefix(GenerationRequest(messages=(system, later[1])))
    assert costs.prefix(GenerationRequest("x" * 5000), 100) == "x" * 100


def seen_at(running: float, step_s: float, tokens: int = 101) -> Observation:
    return Observation(0.01, 10, step_s * (tokens - 1), tokens, running)


def test_the_pace_of_a_full_replica_is_learned_from_one_that_is_not_full() -> None:
    pace, rng = Pace(), random.Random(0)
    for _ in range(200):
        running = rng.randint(1, 20)
        pace.observe(seen_at(running, 0.01 + 0.002 * running))
    assert pace.tokens_per_s(64) == pytest.approx(64 / (0.01 + 0.002 * 64), rel=0.05)
    assert pace.tokens_per_s(0) == 0.0


def test_half_the_step_time_is_twice_the_pace_whatever_ran_beside() -> None:
    slow, fast = Pace(), Pace()
    for _ in range(50):
        slow.observe(seen_at(8, 0.02))
        fast.observe(seen_at(8, 0.01))
    assert fast.tokens_per_s(16) == pytest.approx(2 * slow.tokens_per_s(16))


def test_a_few_answers_say_nothing_about_the_pace() -> None:
    pace = Pace()
    for _ in range(Pace.LEAST_SEEN - 1):
        pace.observe(seen_at(1, 0.01))
    pace.observe(seen_at(1, 0.01, tokens=1))  # has no second token
    assert pace.tokens_per_s(8) == 0.0
    pace.observe(seen_at(1, 0.01))
    assert pace.tokens_per_s(8) > 0.0


@given(st.lists(st.tuples(st.integers(1, 64), st.floats(1e-4, 1.0)), min_size=16, max_size=60), st.integers(1, 256))
def test_a_pace_is_a_positive_number_whatever_was_seen(seen: list[tuple[int, float]], slots: int) -> None:
    pace = Pace()
    for running, step_s in seen:
        pace.observe(seen_at(running, step_s))
    assert 0 < pace.tokens_per_s(slots) < float("inf")
