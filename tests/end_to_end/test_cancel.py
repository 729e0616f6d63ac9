"""A client that cancels, times out or vanishes frees the engine's slot and KV blocks, through the ensemble.

How fast is measured by benchmarks/cancel.py; here it must happen at all, before the request would have ended.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from functools import partial

import pytest
import tritonclient.grpc.aio as triton
from triton_requests import Answer, ask, responses, take, tensor

from tests.end_to_end.watching import PATIENCE_S, ended, halted, left_in_time, requests, until, until_idle

LONG = {"text_input": "def fibonacci(n):\n", "max_tokens": 900, "ignore_eos": True, "stream": True}

# The first that the request outlives on its way to the engine is the one that counts.
DEADLINES_US = (150_000, 2_000_000, 20_000_000)


@pytest.fixture
async def client(replica):
    async with triton.InferenceServerClient(replica.grpc_url) as connection:
        yield connection


async def cancel_after(client, responses_seen: int, **inputs) -> None:
    answer = Answer()
    async for result, error in responses(client, {**LONG, **inputs}):
        assert not error
        take(answer, result)
        if answer.responses >= responses_seen:
            break


@pytest.mark.parametrize("seen", [1, 2, 30])
async def test_cancelling_between_tokens_frees_the_engine(client, replica, seen):
    await left_in_time(replica, partial(cancel_after, client, seen))


@pytest.mark.parametrize("stream", [True, False])
async def test_cancelling_before_the_first_token_frees_the_engine(client, replica, stream):
    before = ended(await until_idle(replica), "cancelled")
    with halted(replica):
        task = asyncio.create_task(ask(client, {**LONG, "text_input": "import " * 100, "stream": stream}))
        await until(replica, lambda page: requests(page, "scheduled") == 1)
        task.cancel()
        await until(replica, lambda page: ended(page, "cancelled") == before + 1)
    await until_idle(replica)


async def test_cancelling_at_the_last_token_leaves_nothing_behind(client, replica):
    await asyncio.gather(*[cancel_after(client, 5, max_tokens=5) for _ in range(20)])
    await until_idle(replica)


async def test_cancelling_an_answer_asked_for_in_one_piece_frees_the_engine(client, replica):
    async def leave() -> None:
        task = asyncio.create_task(ask(client, {**LONG, "stream": False}))
        await until(replica, lambda page: requests(page, "scheduled") == 1 or task.done())
        task.cancel()

    await left_in_time(replica, leave)


async def test_five_hundred_cancels_at_once_free_everything_and_the_next_request_is_served(client, replica):
    await asyncio.gather(*[cancel_after(client, 1) for _ in range(40)])
    before = ended(await until_idle(replica), "cancelled")
    with halted(replica):
        tasks = [asyncio.create_task(ask(client, LONG)) for _ in range(500)]
        await until(replica, lambda page: requests(page, "active") == 500)
        for task in tasks:
            task.cancel()
        await until(replica, lambda page: ended(page, "cancelled") == before + 500)
    await until_idle(replica)
    answer = await ask(client, {**LONG, "max_tokens": 3})
    assert answer.finish_reasons == ["length"]


async def test_a_client_process_that_is_killed_frees_the_engine(replica):
    code = (
        "import asyncio, sys; sys.path[:0] = ['tests/fakes', '.']\n"
        "import tritonclient.grpc.aio as triton\n"
        "from triton_requests import ask\n"
        "async def main():\n"
        f"    async with triton.InferenceServerClient({replica.grpc_url!r}) as client:\n"
        f"        await asyncio.gather(*[ask(client, {LONG!r}) for _ in range(8)])\n"
        "asyncio.run(main())\n"
    )
    before = ended(await until_idle(replica), "cancelled")
    with halted(replica):
        process = subprocess.Popen([sys.executable, "-c", code])
        try:
            await until(replica, lambda page: requests(page, "active") == 8)
        finally:
            process.kill()
            process.wait()
        await until(replica, lambda page: ended(page, "cancelled") == before + 8)
    await until_idle(replica)


async def test_a_clients_own_deadline_frees_the_engine(client, replica):
    async def requests_made():
        yield {"model_name": "ensemble", "inputs": [tensor(name, value) for name, value in LONG.items()]}

    async def leave(deadline_s: float) -> None:
        with pytest.raises(Exception, match="Deadline"):
            async for _ in client.stream_infer(requests_made(), stream_timeout=deadline_s):
                pass

    before = ended(await until_idle(replica), "cancelled")
    with halted(replica):
        for deadline_s in (0.5, 5.0, PATIENCE_S):  # the request must have come to the engine by then
            leaving = asyncio.create_task(leave(deadline_s))
            page = await until(replica, lambda page, it=leaving: it.done() or requests(page, "scheduled") == 1)
            await leaving
            if requests(page, "scheduled"):
                break
        await until(replica, lambda page: ended(page, "cancelled") == before + 1)
    await until_idle(replica)


async def test_a_timeout_while_generating_ends_the_stream_with_a_typed_error(client, replica):
    for timeout_us in DEADLINES_US:
        await until_idle(replica)
        with halted(replica):
            answer = await ask(client, LONG, timeout_us=timeout_us)
        if answer.finish_reasons:
            break
    assert answer.finish_reasons == ["error"]
    message = answer.outputs["error_message"].item().decode()
    assert message == "DeadlineExceeded: the deadline passed while it was generating"
    await until_idle(replica)


async def test_a_timeout_in_the_queue_never_reaches_the_engine(client, replica):
    slots = requests(await until_idle(replica), "max")
    with halted(replica):
        full = [asyncio.create_task(ask(client, {**LONG, "max_tokens": 990})) for _ in range(slots * 2)]
        await until(replica, lambda page: requests(page, "active") == slots * 2)
        for timeout_us in DEADLINES_US:
            late = await ask(client, {**LONG, "text_input": "late"}, timeout_us=timeout_us)
            message = late.error or late.outputs["error_message"].item().decode()
            if "while it waited for a slot" in message:
                break
        assert "DeadlineExceeded: the deadline passed while it waited for a slot" in message
        assert late.ids == []
        for task in full:
            task.cancel()
    await until_idle(replica)
