"""The model of an engine against steps counted by hand, and against itself step by step."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.plan.engine import Sequence
from simulator import virtual_time
from simulator.engine import Engine
from simulator.scenario import Pool

STEP = {"step_s": 0.02, "sequence_s": 0.001, "context_token_s": 1e-6, "prefill_token_s": 0.0001}


def served(
    requests: list[tuple[float, int, int]], cancelled: dict[int, float] | None = None, **pool: object
) -> list[list[tuple[float, int]]]:
    """Run (arrival, prompt, answer) requests; return (seconds, tokens) of every message of each."""

    async def work() -> list[list[tuple[float, int]]]:
        loop = asyncio.get_running_loop()
        engine = Engine(Pool(**{"step": STEP, "slots": 4, **pool}), random.Random(0))
        began_s, messages = loop.time(), [[] for _ in requests]
        sequences = []
        for (at_s, prompt, answer), mine in zip(requests, messages, strict=True):

            def send(sequence: Sequence, tokens: int, end: bool, mine: list = mine) -> None:
                mine.append((round(loop.time() - began_s, 9), tokens))

            sequences.append(Sequence(prompt, answer, answer, send))
            loop.call_at(began_s + at_s, engine.submit, sequences[-1], began_s + at_s)
        for number, at_s in (cancelled or {}).items():
            loop.call_at(began_s + at_s, engine.cancel, sequences[number], began_s + at_s)
        await asyncio.sleep(1000.0)
        assert not engine.running and not engine.waiting and not engine.kv_usage and not engine._context
        return messages

    return virtual_time.run(work(), 0)


def test_one_request_takes_its_prompt_and_its_steps():
    [messages] = served([(0.0, 1000, 3)], send_s=0.0, prefill_chunk=600)
    first = 2 * 0.02 + 1000 * 0.0001
    second = first + 0.02 + 0.001 + 1e-6 * 1001
    assert [tokens for _, tokens in messages] == [1, 1, 1]
    assert [at_s for at_s, _ in messages] == pytest.approx([first, second, second + 0.021 + 1e-6 * 1002])


def test_messages_gather_tokens_and_the_end_comes_at_the_same_time():
    [fine], [coarse] = (served([(0.0, 10, 50)], send_s=send_s) for send_s in (0.0, 0.3))
    assert len(fine) == 50 and 3 <= len(coarse) <= 8
    assert sum(tokens for _, tokens in coarse) == 50 and fine[-1][0] == pytest.approx(coarse[-1][0], rel=0.01)


def test_slots_and_blocks_bound_what_runs():
    first, second, third = served([(0.0, 10, 20), (0.001, 10, 20), (0.002, 10, 20)], slots=2)
    assert third[0][0] > min(first[-1][0], second[-1][0])
    first, second = served([(0.0, 10, 20), (0.001, 10, 20)], kv_tokens=50)
    assert second[0][0] > first[-1][0]


def test_a_shared_prefix_is_read_once():
    async def work() -> list[float]:
        loop, ends = asyncio.get_running_loop(), []
        engine = Engine(Pool(step=STEP), random.Random(0))
        for _ in range(2):
            began_s, done = loop.time(), asyncio.Event()
            engine.submit(Sequence(1000, 1, 1, lambda *_, done=done: done.set(), prefix=("a", 900)), began_s)
            await done.wait()
            ends.append(loop.time() - began_s)
        return ends

    assert virtual_time.run(work(), 0) == pytest.approx([2 * 0.02 + 0.1, 0.02 + 0.01])


REQUESTS = st.lists(st.tuples(st.floats(0, 3), st.integers(1, 700), st.integers(1, 60)), min_size=1, max_size=8)


@given(REQUESTS, st.dictionaries(st.integers(0, 7), st.floats(0, 4), max_size=3))
def test_every_sequence_makes_its_tokens_once_and_leaves(requests, cancelled):
    cancelled = {number: at_s for number, at_s in cancelled.items() if number < len(requests)}
    for number, messages in enumerate(served(requests, cancelled, send_s=0.5)):
        made, due = sum(tokens for _, tokens in messages), requests[number][2]
        assert made <= due if number in cancelled else made == due
        assert all(tokens > 0 for _, tokens in messages)


@given(REQUESTS)
def test_few_messages_take_as_long_as_many(requests):
    fine, coarse = (served(requests, send_s=send_s, slots=8) for send_s in (0.0, 5.0))
    # A long span takes the mean of its contexts, so its steps end a little earlier or later, and a request that arrives
    # about then is read in the step before or after: each of them may move the others by a step.
    # With a slot for each, since a request that waits for one that ends later is late by its whole answer.
    steps_s = 0.03 * (1 + len(requests)) + STEP["prefill_token_s"] * sum(prompt for _, prompt, _ in requests)
    for one, other in zip(fine, coarse, strict=True):
        assert one[-1][0] == pytest.approx(other[-1][0], abs=steps_s, rel=0.02)


def test_a_hang_delays_and_nothing_is_lost():
    async def work() -> tuple[float, int]:
        loop, made, done = asyncio.get_running_loop(), [], asyncio.Event()
        engine = Engine(Pool(step=STEP), random.Random(0))

        def send(sequence: Sequence, tokens: int, end: bool) -> None:
            made.append(tokens)
            if end:
                done.set()

        began_s = loop.time()
        engine.submit(Sequence(10, 20, 20, send), began_s)
        loop.call_later(0.1, engine.stop)
        loop.call_later(5.1, engine.resume, began_s + 5.1)
        await done.wait()
        return loop.time() - began_s, sum(made)

    took_s, made = virtual_time.run(work(), 0)
    assert made == 20 and 5.3 < took_s < 5.6
