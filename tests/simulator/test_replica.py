"""A replica as the gateway meets it: calls that end once, with the errors that gRPC has; its engine's steps."""

from __future__ import annotations

import asyncio
import random
from functools import partial

import grpc
import grpc.aio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clients.wire import failures
from cluster.plan.engine import Sequence
from contract.errors import DeadlineExceeded, PromptTooLong, Unavailable
from contract.generation import GenerationRequest
from gateway.config.settings import Settings
from simulator import virtual_time
from simulator.replica import Channel, Engine, Prompt, Replica, Sent
from simulator.routes import Routes
from simulator.scenario import Pool

POOL = Pool(step={"step_s": 0.1}, send_s=0.0)
ROUTES = Routes(Settings.from_environment({}), lambda _: {}, lambda _: None)


def replica() -> Replica:
    made = Replica("main", 1, partial(Engine, POOL, random.Random(0)), 0.0)
    made.state = "ready"
    return made


def ran(work):
    return virtual_time.run(work(), 0)


@pytest.mark.parametrize("bounds", [{"kv_tokens": 25}, {"max_seq_len": 25}, {"kv_tokens": 25, "max_seq_len": 29}])
def test_a_request_that_the_engine_cannot_hold_is_refused_as_too_long(bounds):
    async def work():
        served = Replica("main", 1, partial(Engine, Pool(step={"step_s": 0.1}, **bounds), random.Random(0)), 0.0)
        served.state = "ready"
        channel = Channel(served, None, ROUTES)
        fits = [message async for message in channel.generate(request(most=15), 60.0, ())]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            [message async for message in channel.generate(request(most=16), 60.0, ())]
        assert fits and not served.calls and not served.engine.running and not served.engine.waiting
        return failures.from_call(caught.value, "")

    refused = ran(work)
    assert isinstance(refused, PromptTooLong)
    assert str(refused) == "max_tokens: must be at most 15 with a prompt of 10 tokens, got 16"


def request(answer: int = 5, most: int = 20, continue_ids: tuple[int, ...] = ()) -> Sent:
    prompt = Prompt.of("a prompt", 10, answer)
    return Sent(GenerationRequest(prompt, max_tokens=most, continue_ids=continue_ids))


def test_a_replica_that_starts_takes_no_connection():
    async def work():
        starting = Replica("main", 1, partial(Engine, POOL, random.Random(0)), asyncio.get_running_loop().time() + 9.0)
        channel = Channel(starting, None, ROUTES)
        with pytest.raises(Unavailable):
            await channel.model_ready("ensemble", 1.0)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            [message async for message in channel.generate(request(), 60.0, ())]
        return caught.value.code()

    assert ran(work) is grpc.StatusCode.UNAVAILABLE


def test_a_call_yields_the_answers_tokens_and_ends():
    async def work():
        call = Channel(replica(), None, ROUTES).generate(request(), 60.0, ())
        return [message async for message in call]

    messages = ran(work)
    assert [token for delta, _, _ in messages for token in delta.token_ids] == [0, 1, 2, 3, 4]
    last, final, _ = messages[-1]
    assert (
        final and last.finish_reason.value == "stop" and (last.usage.input_tokens, last.usage.output_tokens) == (10, 5)
    )


def test_an_answer_goes_on_behind_the_ids_that_were_sent():
    async def work():
        call = Channel(replica(), None, ROUTES).generate(request(most=4, continue_ids=(0, 1)), 60.0, ())
        return [message async for message in call]

    messages = ran(work)
    assert [token for delta, _, _ in messages for token in delta.token_ids] == [2, 3]
    assert messages[-1][0].finish_reason.value == "length" and messages[-1][0].usage.output_tokens == 4


def test_a_death_a_deadline_and_a_cancel():
    async def work():
        loop, served = asyncio.get_running_loop(), replica()
        channel = Channel(served, None, ROUTES)
        late = channel.generate(request(), 0.25, ())
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            [message async for message in late]
        codes = [caught.value.code()]
        killed, left = channel.generate(request(), 9.0, ()), channel.generate(request(), 9.0, ())
        reading = asyncio.create_task(left.__anext__())
        await asyncio.sleep(0)
        left.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        loop.call_later(0.2, served.die)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            [message async for message in killed]
        refused = channel.generate(request(), 9.0, ())
        with pytest.raises(grpc.aio.AioRpcError) as again:
            await refused.__anext__()
        with pytest.raises(Unavailable):
            await channel.model_ready("ensemble", 1.0)
        with pytest.raises(OSError):
            served.metrics()
        return [*codes, caught.value.code(), again.value.code()], len(served.engine.running)

    unavailable = grpc.StatusCode.UNAVAILABLE
    assert ran(work) == ([grpc.StatusCode.DEADLINE_EXCEEDED, unavailable, unavailable], 0)


def test_messages_come_in_order_when_the_networks_delay_ends():
    async def work():
        served = replica()
        served.delay_s = 1.0
        call = Channel(served, None, ROUTES).generate(request(answer=40, most=40), 60.0, ())
        asyncio.get_running_loop().call_later(2.55, setattr, served, "delay_s", 0.0)
        return [token async for delta, _, _ in call for token in delta.token_ids]

    assert ran(work) == list(range(40))


def test_a_hung_replica_answers_nothing():
    async def work():
        served = replica()
        served.hang()
        with pytest.raises(DeadlineExceeded):
            await Channel(served, None, ROUTES).model_ready("ensemble", 2.0)
        return asyncio.get_running_loop().time() - virtual_time.START_S

    assert ran(work) == pytest.approx(2.0)


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
