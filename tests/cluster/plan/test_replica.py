"""One replica, step by step."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.plan.engine import Replica
from cluster.plan.replica import Request, _Run, closed_loop, figures, forecast, serve
from tests.cluster.plan.scenarios import REPLICA, STEP

requests = st.lists(
    st.builds(Request, st.floats(0, 5), st.integers(1, 600), st.integers(1, 60)), min_size=1, max_size=40
)


def test_a_request_alone_takes_the_steps_of_the_model():
    run = serve(REPLICA, [Request(1.0, 300, 3)])
    [done] = run.done
    first = STEP.seconds(0, 0, 256) + STEP.seconds(0, 0, 44)
    assert done.first_s == pytest.approx(1 + first)
    assert done.end_s - done.first_s == pytest.approx(STEP.seconds(1, 301, 0) + STEP.seconds(1, 302, 0))
    found = figures(REPLICA, run, 0, 5)
    assert found.ttft_p95_s == pytest.approx(first + STEP.request_s) and found.requests == 1


@given(requests, st.integers(1, 4), st.integers(64, 512))
def test_every_request_that_fits_ends_once_in_order_of_its_parts(load, slots, chunk):
    replica = Replica(STEP, slots, chunk, 700)
    sent = [dataclasses.replace(one) for one in load]
    run = serve(replica, sent)
    assert len(run.done) == sum(one.input_tokens + one.output_tokens <= 700 for one in load)
    assert all(one.at_s < one.first_s <= one.end_s for one in run.done)
    assert sum(tokens for _, tokens in run.steps) == sum(one.output_tokens - 1 for one in run.done)
    ends = sorted((one.at_s, 1) for one in run.done) and [(one.first_s, 0, one) for one in run.done]
    for at_s, _, _ in ends:  # no more at once than slots
        assert sum(one.first_s <= at_s < one.end_s for one in run.done) <= slots


def test_more_load_never_shortens_and_slots_hold():
    def at(rate):
        return forecast(REPLICA, [Request(n / rate, 100, 20) for n in range(200)], 50)

    slow, fast, over = at(2), at(20), at(200)
    assert slow.ttft_p95_s <= fast.ttft_p95_s < over.ttft_p95_s and slow.stable and fast.stable and not over.stable
    assert fast.tokens_per_s == pytest.approx(20 * 20, rel=0.1) and over.full_slots > 0.9
    assert over.requests_per_s < 200


def test_a_queue_that_grows_slowly_is_told_from_one_that_does_not():
    most = closed_loop(REPLICA, iter(lambda: (100, 20), None), 32, 100.0, 10.0).requests_per_s
    at = {
        part: forecast(REPLICA, [Request(n / (part * most), 100, 20) for n in range(800)], 200) for part in (0.98, 1.08)
    }
    assert at[0.98].stable and not at[1.08].stable


def test_littles_law_holds():
    found = forecast(REPLICA, [Request(n / 10, 100, 20) for n in range(400)], 100)
    inside_s = found.e2e_mean_s - STEP.request_s
    assert found.sequences == pytest.approx(found.requests_per_s * inside_s, rel=0.1)


def test_the_batch_is_that_of_the_window():
    """It is small at first, and for the 4 s after the last request of 14."""
    run = serve(REPLICA, [Request(n / 2, 50, 250) for n in range(30)])
    found = figures(REPLICA, run, 7, 14)
    instants = [7 + n / 100 for n in range(700)]
    at_once = [sum(one.at_s <= now < one.end_s for one in run.done) for now in instants]
    assert found.sequences == pytest.approx(np.mean(at_once), rel=0.03)


def test_an_engine_is_busy_for_the_part_of_the_window_in_which_it_makes_steps():
    run = serve(REPLICA, [Request(float(n), 50, 20) for n in range(4)])
    each_s = run.done[0].end_s - run.done[0].at_s
    assert figures(REPLICA, run, 1, 3).busy == pytest.approx(each_s)
    assert figures(REPLICA, run, 1, 1 + each_s).busy == pytest.approx(1)


def test_a_closed_loop_keeps_so_many_in_the_batch():
    found = closed_loop(REPLICA, iter(lambda: (50, 30), None), 8, 20.0, 2.0)
    step = STEP.seconds(8, 8 * 65, 8 * 50 / 30)
    assert found.tokens_per_s == pytest.approx(8 / step, rel=0.12) and 7 < found.sequences <= 8


def test_a_client_whose_request_is_refused_asks_for_the_next():
    """Every second one is too long."""
    short = dataclasses.replace(REPLICA, max_seq_len=100)
    lengths = itertools.cycle([(50, 30), (200, 30)])
    found = closed_loop(short, lengths, 8, 20.0, 2.0)
    all_fit = closed_loop(short, itertools.repeat((50, 30)), 8, 20.0, 2.0)
    assert found.sequences == pytest.approx(all_fit.sequences, rel=0.1)


@given(requests)
def test_inter_token_latencies_are_those_of_every_token(load):
    run = serve(REPLICA, load)
    found = figures(REPLICA, run, 0, 5)
    gaps_s = [step_s for step_s, tokens in run.steps for _ in range(tokens)] or [0.0]
    assert found.itl_mean_s == pytest.approx(np.mean(gaps_s))
    assert found.itl_p95_s == pytest.approx(np.percentile(gaps_s, 95))


def test_long_answers_take_no_memory_for_each_token():
    run = _Run(
        steps=[(0.1, 10**12), (0.2, 10**11)], done=[Request(0.0, 1, 1, 1.0, 2.0)], lacked={"slots": 0, "kv": 0, "": 1}
    )
    found = figures(REPLICA, run, 0, 5)
    assert (found.itl_mean_s, found.itl_p95_s) == (pytest.approx(0.12 / 1.1), 0.2)
