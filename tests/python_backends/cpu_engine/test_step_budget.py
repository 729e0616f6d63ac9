"""The prompt tokens of a step follow from what steps took."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract import manifest as manifests
from contract.scheduling import BLOCK_TOKENS, MAX_SLOWDOWN
from python_backends.cpu_engine.step_budget import StepBudget, attended
from python_backends.ensemble.worker_messages import EndSequence
from tests.python_backends.cpu_engine.test_prefix_cache import Schedule, sequence, undisturbed


def fed(step_s, running_s, token_s, attended_s=0.0, noise=0.0, most=512, steps=120):
    """A budget that has seen steps of an engine with these times."""
    budget, chance = StepBudget(most), np.random.default_rng(0)
    for _ in range(steps):
        running, tokens = int(chance.integers(0, 33)), int(chance.choice([0, 0, 64, 128, 400]))
        before = attended(int(chance.integers(0, 2000)), tokens)
        taken_s = step_s + running * running_s + tokens * token_s + before * attended_s
        budget.observe(running, tokens, before, taken_s * (1 + noise * chance.random()))
    return budget


@given(st.floats(1e-3, 0.05), st.floats(1e-5, 2e-3), st.floats(5e-5, 2e-3), st.floats(0, 1), st.integers(0, 8000))
def test_a_step_that_reads_prompts_stays_within_its_bound(step_s, running_s, token_s, growing, begin):
    """However far the prompt is read. growing: by which a token takes longer with 1,000 before it."""
    attended_s = growing * token_s / 1000
    tokens = fed(step_s, running_s, token_s, attended_s).tokens(32, 0, begin)
    without_s = step_s + 32 * running_s
    slowdown = 1 + (tokens * token_s + attended(begin, tokens) * attended_s) / without_s
    assert 32 <= tokens <= 512 - 32
    assert tokens == 32 or slowdown < MAX_SLOWDOWN * 1.15
    assert tokens == 480 or slowdown > MAX_SLOWDOWN * 0.85 or tokens == 32


def test_the_farther_a_prompt_is_read_the_fewer_tokens_a_step_reads_of_it():
    budget = fed(0.01, 0.001, 0.0003, 0.0003 / 1000)
    found = [budget.tokens(32, 0, begin) for begin in (0, 500, 1000, 2000, 4000)]
    assert found == sorted(found, reverse=True) and found[0] > 1.5 * found[3]


def test_the_more_prompts_wait_the_longer_is_a_step():
    budget = fed(0.01, 0.001, 0.0003)
    found = [budget.tokens(16, waiting, 0) for waiting in (0, 1, 2, 3, 8, 16, 1000)]
    assert found == sorted(found) and found[0] < found[2] < found[3] and found[-1] == 512 - 16
    assert budget.tokens(0, 1, 0) == 512


def test_no_part_of_a_step_is_negative():
    """Beside three sequences two blocks make 67 rows, which take oneDNN longer than 68: sequences seemed to save time,
    and a step of 31 of them to take none, so that prompts were read by single blocks."""
    budget = fed(0.017, 0.0001, 0.0007)
    for _ in range(60):
        budget.observe(3, 64, attended(0, 64), 0.093)
        budget.observe(4, 64, attended(0, 64), 0.061)
        budget.observe(3, 96, attended(0, 96), 0.085)
        assert min(budget._seconds) >= 0
    assert budget.tokens(31, 1, 0) > 32


@pytest.mark.parametrize(("token_s", "tokens"), [(0.0003, 512), (0.005, 190), (0.02, 47), (1.0, 32)])
def test_without_running_sequences_a_step_takes_a_second_at_most(token_s, tokens):
    """On a slow machine what comes meanwhile would wait for half a minute, and so would the liveness probe."""
    assert fed(0.05, 0.001, token_s).tokens(0, 1, 0) == pytest.approx(tokens, rel=0.1)


def test_before_enough_steps_were_seen_a_piece_is_a_few_blocks():
    budget = StepBudget(512)
    assert budget.tokens(4, 1, 0) == budget.tokens(0, 1, 0) == 128
    assert StepBudget(64).tokens(60, 1, 0) == 32  # a block at least, or prompts would never be read


def test_steps_that_are_all_alike_and_one_that_waited_for_a_core_do_no_harm():
    budget = fed(0.01, 0.001, 0.0003, noise=0.1)
    before = budget.tokens(32, 0, 0)
    budget.observe(32, 96, attended(0, 96), 5.0)
    assert budget.tokens(32, 0, 0) < 3 * before
    for _ in range(20):
        budget.observe(32, 0, 0.0, 0.042)
        budget.observe(32, 96, attended(0, 96), 0.042 + 96 * 0.0003)
    assert budget.tokens(32, 0, 0) == pytest.approx(before, rel=0.15)
    for _ in range(5000):
        budget.observe(32, 0, 0.0, 0.042)
    assert 32 <= budget.tokens(32, 0, 0) <= 480 and np.isfinite(budget._covariance).all()
    for _ in range(200):  # on a machine half as fast, the ratio is what it was
        budget.observe(32, 0, 0.0, 0.084)
        budget.observe(32, 96, attended(0, 96), 0.084 + 96 * 0.0006)
    assert budget.tokens(32, 0, 0) == pytest.approx((MAX_SLOWDOWN - 1) * 0.084 / 0.0006, rel=0.1)


def test_a_short_prompt_is_never_longer_than_a_step():
    assert StepBudget(64).short == 64 and StepBudget(2048).short == 256


class OneBlock(StepBudget):
    """Gives every step one block, and keeps what the steps read."""

    def __init__(self, short: int) -> None:
        super().__init__(512)
        self.short, self.read = short, list[tuple[int, float]]()

    def tokens(self, running: int, waiting: int, begin: int) -> int:
        return BLOCK_TOKENS

    def observe(self, running: int, tokens: int, attended: float, taken_s: float) -> None:
        self.read += [(tokens, attended)] if tokens else []


@pytest.mark.slow
@pytest.mark.parametrize("length", [65, 95, 96, 100])
def test_the_last_piece_of_a_prompt_is_no_larger_than_the_others(triton_types, tiny_engine, length):
    """Also where fewer tokens are left than a short prompt has, which is read whole."""
    prompt, budget = [7 * n % 256 for n in range(length)], OneBlock(short=64)
    commands = iter([[sequence(1, prompt, 4)]])
    schedule = Schedule(lambda schedule: next(commands, None)).run(tiny_engine, budget)
    assert schedule.generated[1] == undisturbed(tiny_engine, prompt, 4)
    begins = range(0, length, BLOCK_TOKENS)
    pieces = [(begin, min(BLOCK_TOKENS, length - begin)) for begin in begins]
    assert budget.read == [(tokens, attended(begin, tokens)) for begin, tokens in pieces]


@pytest.mark.slow
def test_a_short_prompt_does_not_wait_for_a_long_one_before_it(triton_types, tiny_engine):
    """The long one gets a block of each step all the same, and both texts are the undisturbed ones."""
    long, short = [7 * n % 256 for n in range(200)], [5 * n % 256 for n in range(40)]
    budget, commands = OneBlock(short=64), iter([[sequence(1, long, 4)], [sequence(2, short, 4)]])
    schedule = Schedule(lambda schedule: next(commands, None)).run(tiny_engine, budget)
    assert schedule.generated[1] == undisturbed(tiny_engine, long, 4)
    assert schedule.generated[2] == undisturbed(tiny_engine, short, 4)
    tokens = [tokens for tokens, _ in budget.read]
    assert tokens == [BLOCK_TOKENS, BLOCK_TOKENS + len(short), *[BLOCK_TOKENS] * 4, len(long) - 6 * BLOCK_TOKENS]


class Kept(StepBudget):
    """Keeps what the steps read."""

    def __init__(self, most: int) -> None:
        super().__init__(most)
        self.read = list[tuple[int, int, float]]()

    def observe(self, running: int, tokens: int, attended: float, taken_s: float) -> None:
        super().observe(running, tokens, attended, taken_s)
        self.read.append((running, tokens, attended))


@pytest.mark.slow
def test_prompts_that_come_together_count_in_the_steps_that_have_places_for_them(triton_types, tiny_engine):
    """They were all counted in the first of these steps, and tokens were taken for a quarter of what they cost."""
    most = manifests.load(tiny_engine).max_num_tokens
    prompts = [[(7 * n + id) % 256 for n in range(40)] for id in range(6)]
    budget, commands = Kept(most), iter([[sequence(id, prompt, 8) for id, prompt in enumerate(prompts, 1)]])
    schedule = Schedule(lambda schedule: next(commands, None)).run(tiny_engine, budget)
    assert [len(ids) for ids in schedule.generated.values()] == [8] * len(prompts)
    assert all(tokens <= most - running for running, tokens, _ in budget.read)
    assert sum(tokens for _, tokens, _ in budget.read) == sum(map(len, prompts))
    assert sum(before for *_, before in budget.read) == pytest.approx(sum(attended(0, len(one)) for one in prompts))


@pytest.mark.slow
def test_tokens_of_a_cancelled_prompt_count_in_no_later_step(triton_types, tiny_engine):
    most = manifests.load(tiny_engine).max_num_tokens
    prompts = [[(7 * n + id) % 256 for n in range(40)] for id in range(6)]
    first = [sequence(id, prompt, 2) for id, prompt in enumerate(prompts, 1)]
    steps = iter([first, [EndSequence(id) for id in range(1, 7)], *[[]] * 12, [sequence(7, prompts[0][:20], 30)]])
    budget = Kept(most)
    assert len(Schedule(lambda schedule: next(steps, None)).run(tiny_engine, budget).generated[7]) == 30
    assert not any(tokens for _, tokens, _ in budget.read[-28:])


@pytest.mark.slow
def test_tokens_that_the_prefix_cache_had_count_in_no_later_step(triton_types, tiny_engine):
    """Nobody told the engine that it had them: it counts whole prompts, and their steps read the ends."""
    most = manifests.load(tiny_engine).max_num_tokens
    prompts = [[(7 * n + id) % 256 for n in range(40)] for id in range(6)]
    again = [sequence(6 + id, prompt, 30) for id, prompt in enumerate(prompts, 1)]
    steps = iter([[sequence(id, prompt, 2) for id, prompt in enumerate(prompts, 1)], *[[]] * 12, again])
    budget = Kept(most)
    Schedule(lambda schedule: next(steps, None)).run(tiny_engine, budget)
    assert all(tokens <= most - running for running, tokens, _ in budget.read)
    assert not any(tokens for _, tokens, _ in budget.read[-20:])
