"""How steps read prompts; the engine itself is tested on the simulation's clock, in tests/simulator/test_engine.py."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.plan.engine import Replica
from cluster.plan.replica import Request, serve
from contract.scheduling import LONG_UNDRAFTED_FROM, UNDRAFTED_FROM, WHOLE_PROMPT_TOKENS, slowdown
from contract.step_model import texts
from tests.cluster.plan.scenarios import REPLICA, STEP


@given(st.integers(1, 15), st.integers(0, 5000), st.integers(1, 40))
def test_a_step_that_reads_prompts_beside_streams_stays_short(streams, context, prompts):
    short = dataclasses.replace(REPLICA, slower=1.7)
    room, plain_s = short.room(streams, context, prompts), STEP.seconds(streams, context, 0)
    longest_s = max(slowdown(streams, prompts, 1.7) * plain_s, STEP.seconds(streams, context, 32))
    assert 32 <= room <= REPLICA.room(streams, context, prompts)
    assert STEP.seconds(streams, context, room) <= longest_s * 1.001
    assert short.room(0, 0, prompts) == 256


def test_short_prompts_beside_streams_are_read_in_one_step_and_long_ones_are_not():
    replica = dataclasses.replace(REPLICA, chunk_tokens=512, slower=1.7, short_tokens=100)
    streams = [Request(0.0, 10, 400) for _ in range(2)]
    took = {}
    for tokens in (100, 101):
        late = Request(1.0, tokens, 1)
        run = serve(replica, [*streams, late])
        took[tokens] = late.first_s
        assert len(run.done) == 3
    assert took[100] < took[101]


CORES = dataclasses.replace(
    STEP, cores=2, request_cpu_s=0.008, burst_cpu_s=0.001, message_cpu_s=0.001, gateway_request_cpu_s=0.012,
    gateway_burst_cpu_s=0.001, gateway_message_cpu_s=0.0014,
)  # fmt: skip
BESIDE = dataclasses.replace(REPLICA, step=CORES)
SHARED = dataclasses.replace(REPLICA, step=CORES.behind_gateway)


def test_a_request_takes_its_cpu_from_those_that_run():
    def ends(replica: Replica, *at_s: float) -> list[float]:
        requests = [Request(each_s, 32, 50) for each_s in at_s]
        serve(replica, requests)
        return [request.end_s for request in requests]

    plain = dataclasses.replace(REPLICA, step=dataclasses.replace(CORES, request_cpu_s=0.0))
    assert ends(plain, 0.0) == pytest.approx(ends(BESIDE, 0.0))  # nobody waits for it
    assert ends(SHARED, 0.0)[0] > ends(BESIDE, 0.0)[0] > ends(REPLICA, 0.0)[0]  # messages are sent
    late = ends(plain, 0.0, 0.1)[0]
    assert late + 0.003 <= ends(BESIDE, 0.0, 0.1)[0] <= late + 0.01
    assert ends(SHARED, 0.0, 0.1)[0] > late + 0.006


def test_the_first_step_after_a_pause_and_steps_with_prompts_are_as_in_service():
    def firsts(**service: float) -> list[float]:
        step = dataclasses.replace(STEP, **service)
        requests = [Request(at_s, 32, 50) for at_s in (0.0, 0.1, 9.0)]
        serve(dataclasses.replace(REPLICA, step=step), requests)
        return [request.first_s - request.at_s for request in requests]

    plain, idle = firsts(), firsts(idle_s=0.004)
    assert [round(b - a, 6) for a, b in zip(plain, idle, strict=True)][::2] == [0.004, 0.004]
    assert abs(idle[1] - plain[1]) < 0.01  # another part of a step may be left when it comes
    assert firsts(spread=0.2) == firsts(spread=0.2) != plain


DRAFTS = dataclasses.replace(STEP, draft_1_s=0.0026, **dict.fromkeys(("draft_2_s", "draft_4_s", "draft_8_s"), 0.0006))


REQUEST = (0.0, 32, 200)


def drafting_replica(*acceptance: float | tuple[float, ...]) -> Replica:
    return dataclasses.replace(REPLICA, step=dataclasses.replace(DRAFTS, draft_tokens=8, acceptance=texts(acceptance)))


def ends(replica: Replica, *given: tuple[float, int, int]) -> list[float]:
    """Return when requests of (arrival, prompt, answer) end."""
    requests = [Request(*one) for one in given]
    assert len(serve(replica, requests).done) == len(requests)
    return [request.end_s for request in requests]


@given(st.integers(1, 300), st.integers(1, 200), st.floats(0.2, 1.0), st.floats(0.2, 1.0))
def test_more_accepted_drafts_never_end_a_request_later(prompt, answer, one, other):
    """A request alone: one that ends sooner may leave another alone, whose steps then draft more and take longer.

    To a thousandth: of the same number of steps, each reads more tokens that were accepted.
    """
    [few], [many] = (ends(drafting_replica(part), (0.0, prompt, answer)) for part in sorted((one, other)))
    assert many <= few * 1.001


@given(st.lists(st.tuples(st.floats(0, 2), st.integers(1, 300), st.integers(1, 200)), min_size=1, max_size=8))
def test_an_engine_whose_drafts_are_rejected_is_a_plain_one(given):
    plain = dataclasses.replace(REPLICA, step=DRAFTS)
    assert ends(drafting_replica(0.0, 0.1), *given) == ends(plain, *given) == ends(REPLICA, *given)


def test_an_engine_whose_drafts_take_longer_than_they_gain_is_a_plain_one():
    dear = dataclasses.replace(DRAFTS, draft_1_s=2 * DRAFTS.engine_s(1, 0, 0), draft_tokens=8)

    def end_s(*acceptance: float) -> float:
        return ends(dataclasses.replace(REPLICA, step=dataclasses.replace(dear, acceptance=(acceptance,))), REQUEST)[0]

    assert end_s(0.5) == ends(REPLICA, REQUEST)[0]  # one token of eight
    assert end_s(1.0) < 0.5 * end_s(0.5)


def test_a_request_alone_takes_the_steps_of_its_drafts():
    [end_s] = ends(drafting_replica(1.0), (0.0, 32, 1 + 9 * 10))
    steps_s = [DRAFTS.seconds(1, 33 + 9 * n, 0, 1) for n in range(10)]
    assert end_s == pytest.approx(DRAFTS.seconds(0, 0, 32) + sum(steps_s), rel=1e-6)
    # The second one has 3 drafts: 45 steps beside the first one make 180 tokens of it.
    first_s, second_s = sorted(ends(drafting_replica(1.0), (0.0, 32, 400), (0.0, 32, 400)))
    assert second_s - first_s == pytest.approx(220 / 4 * DRAFTS.seconds(1, 322, 0, 1), rel=0.05)
    # One more than are drafted for ends the drafts of all, whose tokens are read again.
    many = [(0.0, 32, 100)] * (UNDRAFTED_FROM + 1)
    assert ends(drafting_replica(1.0), *many) == pytest.approx(ends(REPLICA, *many), rel=0.1)


def test_one_that_comes_beside_drafts_does_not_wait_for_those_that_are_read_again():
    most, late = UNDRAFTED_FROM, Request(2.0, 32, 50)
    drafted = [Request(0.2 * n, 250, 400) for n in range(most)]
    done = serve(drafting_replica(0.5), [*drafted, late]).done
    assert len(done) == most + 1
    again_s = most * DRAFTS.prompt_s(300, REPLICA.chunk_tokens)
    assert late.first_s - late.at_s < DRAFTS.prompt_s(32, REPLICA.chunk_tokens, most, 300) + 0.25 * again_s


def test_no_more_are_drafted_for_than_that_gains_for():
    longer = {"draft_1_s": 0.0106, "draft_2_s": 0.0036, "draft_4_s": 0.0036, "draft_8_s": 0.02}
    dear = dataclasses.replace(DRAFTS, draft_tokens=8, acceptance=((0.9,),), **longer)
    loses = next(n for n in range(1, UNDRAFTED_FROM) if dear.drafts_speedup(n) < 1)
    assert 1 < dear.drafted_up_to < loses

    def last_s(replica: Replica, count: int) -> float:
        return ends(replica, *[(0.0, 32, 100)] * count)[-1]

    drafting = dataclasses.replace(REPLICA, step=dear)
    assert last_s(drafting, loses) == pytest.approx(last_s(REPLICA, loses), rel=0.1)
    assert last_s(drafting, 2) < 0.8 * last_s(REPLICA, 2)


def test_a_long_prompt_is_drafted_for_beside_few():
    beside = [(0.0, 32, 100)] * LONG_UNDRAFTED_FROM
    long, short = ((0.1, WHOLE_PROMPT_TOKENS + more, 100) for more in (1, 0))
    plain = ends(REPLICA, *beside, long)
    assert ends(drafting_replica(1.0), *beside, long)[-1] == pytest.approx(plain[-1], rel=0.2)
    assert ends(drafting_replica(1.0), *beside, short)[-1] < 0.6 * plain[-1]


def test_acceptance_changes_within_an_answer():
    [end_s] = ends(drafting_replica((0.0, 0.0, 1.0)), (0.0, 32, 16 + 9 * 10))
    steps_s = [DRAFTS.seconds(1, 33 + n, 0, 1) for n in range(15)]
    steps_s += [DRAFTS.seconds(1, 48 + 9 * n, 0, 1) for n in range(10)]
    assert end_s == pytest.approx(DRAFTS.seconds(0, 0, 32) + sum(steps_s), rel=0.01)


def test_a_long_answer_is_drafted_for_again_when_the_others_have_ended():
    crowd = [(0.0, 32, 50)] * UNDRAFTED_FROM
    long, short = (0.0, 32, 400), (0.0, 32, 60)
    assert ends(drafting_replica(1.0), *crowd, long)[-1] < 0.5 * ends(REPLICA, *crowd, long)[-1]
    # Nothing of one that has little left.
    assert ends(drafting_replica(1.0), *crowd, short)[-1] == pytest.approx(ends(REPLICA, *crowd, short)[-1], rel=0.1)


def test_several_long_answers_are_drafted_for_again_when_plain_steps_have_lost_enough():
    crowd, long = [(0.0, 32, 50)] * UNDRAFTED_FROM, [(0.0, 32, 400)] * (UNDRAFTED_FROM // 2)
    quick, plain = (ends(replica, *crowd, *long)[-1] for replica in (drafting_replica(1.0), REPLICA))
    assert quick < 0.6 * plain


def test_drafting_goes_on_when_those_without_drafts_have_ended():
    crowd, late = [(0.0, 32, 100)] * (UNDRAFTED_FROM + 1), (9.0, 32, 100)
    slow, quick = (ends(replica, *crowd, late)[-1] for replica in (REPLICA, drafting_replica(1.0)))
    assert quick - 9.0 < (slow - 9.0) / 3
