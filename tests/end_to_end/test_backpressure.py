"""Every queue is bounded: overload answers at once, a slow reader costs only itself, what never fits is refused."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc.aio
import pytest
import tritonclient.grpc.aio as triton
from triton_requests import ask, metric, metrics, tensor
from tritonclient.grpc import service_pb2_grpc
from tritonclient.grpc._utils import _get_inference_request

from server.replica import running

LONG = {"text_input": "def fibonacci(n):\n", "max_tokens": 900, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def replica(engine_dir):
    with running("demo", env={"TRIDENT_MAX_WAITING": "4"}) as server:
        yield server


def capacity(replica, tokens: int) -> int:
    """How many requests of ``tokens`` (prompt and output) run at once: bounded by slots or by KV cache blocks."""
    page = metrics(replica.metrics_url)
    blocks = metric(page, "nv_trt_llm_kv_cache_block_metrics", kv_cache_block_type="max")
    per_request = -(-tokens // metric(page, "nv_trt_llm_kv_cache_block_metrics", kv_cache_block_type="tokens_per"))
    return int(min(metric(page, "nv_trt_llm_request_metrics", request_type="max"), blocks // per_request))


async def test_beyond_the_bound_a_request_is_refused_at_once_and_the_admitted_ones_are_served(replica):
    slots = capacity(replica, 220)
    async with triton.InferenceServerClient(replica.grpc_url) as client:
        answers = await asyncio.gather(*[ask(client, {**LONG, "max_tokens": 200}) for _ in range(slots + 30)])
    refused = [answer for answer in answers if answer.error]
    served = [answer for answer in answers if not answer.error]
    assert len(served) >= slots + 4 and refused
    assert all(
        "Overloaded: " in answer.error and "at most 4 may wait, try again later" in answer.error for answer in refused
    )
    assert all(len(answer.ids) == 200 for answer in served)
    page = metrics(replica.metrics_url)
    assert metric(page, "trident_errors_total", model="engine", error_type="Overloaded") == len(refused)


async def test_a_refusal_is_a_retryable_grpc_status_for_who_asks_for_statuses(replica):
    slots = capacity(replica, 920)
    async with triton.InferenceServerClient(replica.grpc_url) as client:
        full = [asyncio.create_task(ask(client, LONG)) for _ in range(slots + 4)]
        await asyncio.sleep(0.5)
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            for _ in range(50):  # the first of the full ones may end meanwhile
                await ask(client, LONG, headers={"triton_grpc_error": "true"})
        for task in full:
            task.cancel()
        await asyncio.gather(*full, return_exceptions=True)
    assert refusal.value.code() is grpc.StatusCode.UNAVAILABLE


async def until_idle(replica) -> None:
    for _ in range(200):
        load = metric(metrics(replica.metrics_url), "nv_trt_llm_request_metrics", request_type="active")
        if load == 0:
            return
        await asyncio.sleep(0.05)
    pytest.fail(f"{load} requests are still in the engine")


def rss_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


async def test_slow_readers_hold_a_bounded_amount_of_memory_and_slow_nobody_down(replica):
    """Four streams that nobody reads run to their end; what they hold is their own text, and others are served."""
    await until_idle(replica)
    async with triton.InferenceServerClient(replica.grpc_url) as client:
        await ask(client, LONG)
        before_mb = rss_mb(replica.server_pid)
        channels = [grpc.aio.insecure_channel(replica.grpc_url) for _ in range(4)]
        calls = []
        for channel in channels:
            call = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer()
            await call.write(_request(LONG))
            calls.append(call)
        answers = await asyncio.gather(*[ask(client, {**LONG, "max_tokens": 100}) for _ in range(4)])
        assert all(len(answer.ids) == 100 for answer in answers)
        await until_idle(replica)  # a stream that nobody reads must still end
        # 4 × 900 tokens at the few kilobytes a buffered response takes.
        assert rss_mb(replica.server_pid) - before_mb < 60
        for call, channel in zip(calls, channels, strict=True):
            call.cancel()
            await channel.close()


def _request(inputs: dict):
    return _get_inference_request(
        model_name="ensemble",
        inputs=[tensor(name, value) for name, value in inputs.items()],
        model_version="",
        request_id="",
        outputs=None,
        sequence_id=0,
        sequence_start=False,
        sequence_end=False,
        priority=0,
        timeout=None,
        parameters=None,
    )
