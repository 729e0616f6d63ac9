"""A replica as the gateway meets it: calls that end once, with the errors that gRPC has."""

from __future__ import annotations

import asyncio
import random
from functools import partial

import grpc
import grpc.aio
import pytest

from clients.wire import failures
from contract.errors import DeadlineExceeded, PromptTooLong, Unavailable
from contract.generation import GenerationRequest
from gateway.config.settings import Settings
from simulator import virtual_time
from simulator.engine import Engine
from simulator.replica import Channel, Prompt, Replica, Sent
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
