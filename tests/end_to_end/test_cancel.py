"""A client that cancels, times out or vanishes frees the engine's slot and KV blocks, through the ensemble.

How fast is measured by benchmarks/cancel.py; here it must happen at all, long before the request would have ended.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time

import pytest
import tritonclient.grpc.aio as triton
from triton_requests import Answer, ask, metric, metrics, responses, take, tensor

# Far more than any of these needs, far less than a thousand requests of this length take.
PATIENCE_S = 5.0
LONG = {"text_input": "def fibonacci(n):\n", "max_tokens": 900, "ignore_eos": True, "stream": True}


@pytest.fixture
async def client(replica):
    async with triton.InferenceServerClient(replica.grpc_url) as connection:
        yield connection


def engine_load(replica) -> tuple[float, float, float]:
    """Running and waiting requests, and KV blocks in use."""
    page = metrics(replica.metrics_url)
    return (
        metric(page, "nv_trt_llm_request_metrics", request_type="scheduled"),
        metric(page, "nv_trt_llm_request_metrics", request_type="waiting"),
        metric(page, "nv_trt_llm_kv_cache_block_metrics", kv_cache_block_type="used"),
    )


async def until_load(replica, wanted) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not wanted(load := await asyncio.to_thread(engine_load, replica)):
        assert time.monotonic() < deadline_s, f"running, waiting, blocks are still {load}"
        await asyncio.sleep(0.02)


async def until_idle(replica) -> None:
    await until_load(replica, lambda load: load == (0, 0, 0))


async def cancel_after(client, responses_seen: int, **inputs) -> Answer:
    answer = Answer()
    async for result, error in responses(client, {**LONG, **inputs}):
        assert not error
        take(answer, result)
        if answer.responses >= responses_seen:
            break
    return answer


@pytest.mark.parametrize("seen", [1, 2, 30])
async def test_cancelling_between_tokens_frees_the_engine(client, replica, seen):
    answer = await cancel_after(client, seen)
    await until_idle(replica)
    assert len(answer.ids) < 900


async def test_cancelling_before_the_first_token_frees_the_engine(client, replica):
    task = asyncio.create_task(ask(client, {**LONG, "text_input": "import " * 100}))
    await asyncio.sleep(0)
    task.cancel()
    await until_idle(replica)


async def test_cancelling_at_the_last_token_leaves_nothing_behind(client, replica):
    await asyncio.gather(*[cancel_after(client, 5, max_tokens=5) for _ in range(20)])
    await until_idle(replica)


async def test_cancelling_an_answer_asked_for_in_one_piece_frees_the_engine(client, replica):
    task = asyncio.create_task(ask(client, {**LONG, "stream": False}))
    await until_load(replica, lambda load: load[0] == 1)
    task.cancel()
    await until_idle(replica)


async def test_five_hundred_cancels_at_once_free_everything_and_the_next_request_is_served(client, replica):
    await asyncio.gather(*[cancel_after(client, 1) for _ in range(40)])
    tasks = [asyncio.create_task(ask(client, LONG)) for _ in range(500)]
    await until_load(replica, lambda load: load[0] > 0 and load[1] > 100)
    for task in tasks:
        task.cancel()
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
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        await until_load(replica, lambda load: load[0] >= 4)
    finally:
        process.kill()
        process.wait()
    await until_idle(replica)


async def test_a_clients_own_deadline_frees_the_engine(client, replica):
    async def requests():
        yield {"model_name": "ensemble", "inputs": [tensor(name, value) for name, value in LONG.items()]}

    stream = client.stream_infer(requests(), stream_timeout=0.05)
    with pytest.raises(Exception, match="Deadline"):
        async for _ in stream:
            pass
    await until_idle(replica)


async def test_a_timeout_while_generating_ends_the_stream_with_a_typed_error(client, replica):
    answer = await ask(client, LONG, timeout_us=150_000)
    assert answer.finish_reasons == ["error"]
    assert answer.outputs["error_message"].item().decode().startswith("DeadlineExceeded: ")
    assert len(answer.ids) < 900
    await until_idle(replica)


async def test_a_timeout_in_the_queue_never_reaches_the_engine(client, replica):
    before = metrics(replica.metrics_url)
    slots = int(metric(before, "nv_trt_llm_request_metrics", request_type="max"))
    full = [asyncio.create_task(ask(client, {**LONG, "max_tokens": 990})) for _ in range(slots * 2)]
    await until_load(replica, lambda load: load[1] > 0)
    late = await ask(client, {**LONG, "text_input": "late"}, timeout_us=100_000)
    said = late.error or late.outputs["error_message"].item().decode()
    assert "DeadlineExceeded: the deadline passed while it waited for a slot" in said
    assert late.ids == []
    for task in full:
        task.cancel()
    await until_idle(replica)
