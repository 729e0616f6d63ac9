"""How steps read prompts; the engine itself is tested on the simulation's clock, in tests/simulator/test_engine.py."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.plan import engine
from cluster.plan.engine import Replica
from cluster.plan.replica import Request, serve
from python_backends.cpu_engine import step_budget
from tests.cluster.plan.scenarios import REPLICA, STEP


@settings(max_examples=30)
@given(st.integers(1, 15), st.integers(0, 5000), st.integers(1, 40))
def test_a_step_that_reads_prompts_beside_streams_stays_short(streams, context, prompts):
    short = dataclasses.replace(REPLICA, slower=1.7)
    room, plain_s = short.room(streams, context, prompts), STEP.seconds(streams, context, 0)
    longest_s = max((1.7 + prompts / streams) * plain_s, STEP.seconds(streams, context, 32))
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


def test_the_planner_reads_prompts_by_the_engines_rule():
    assert (engine.SLOWER, engine.SHORT_TOKENS) == (step_budget.SLOWER, step_budget.SHORT)


CORES = dataclasses.replace(
    STEP, cores=2, request_cpu_s=0.008, burst_cpu_s=0.001, message_cpu_s=0.001, gateway_request_cpu_s=0.004,
    gateway_message_cpu_s=0.0004,
)  # fmt: skip
BESIDE = dataclasses.replace(REPLICA, step=CORES)
SHARED = dataclasses.replace(BESIDE, shared=True)


def test_a_request_takes_its_cpu_from_those_that_run():
    def ends(replica: Replica, *at_s: float) -> list[float]:
        requests = [Request(each_s, 32, 50) for each_s in at_s]
        serve(replica, requests)
        return [request.end_s for request in requests]

    assert ends(REPLICA, 0.0) == pytest.approx(ends(BESIDE, 0.0))  # nobody waits for it
    assert ends(SHARED, 0.0)[0] > ends(BESIDE, 0.0)[0]  # the gateway sends its messages
    late = ends(REPLICA, 0.0, 0.1)[0]
    assert late + 0.003 <= ends(BESIDE, 0.0, 0.1)[0] <= late + 0.01
    assert ends(SHARED, 0.0, 0.1)[0] > late + 0.006


@given(st.integers(1, 64), st.integers(0, 5000))
def test_sending_takes_more_where_steps_are_longer_than_calibrated(streams, context):
    alone_s, shared_s = BESIDE.seconds(streams, context, 0), SHARED.seconds(streams, context, 0)
    assert alone_s == pytest.approx(CORES.seconds(streams, context, 0))
    assert alone_s < shared_s <= alone_s + streams * 0.0002 + 1e-12
    slower_s = BESIDE.seconds(streams, context, 0, pace_s=10.0)  # each token in a message of its own
    assert alone_s - 1e-12 <= slower_s <= alone_s + 0.0005 + streams * 0.0005
    assert REPLICA.seconds(streams, context, 0, pace_s=10.0) == STEP.seconds(streams, context, 0)
