"""Every queue is bounded: overload answers at once, a slow reader costs only itself, what never fits is refused."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc.aio
import pytest
import tritonclient.grpc.aio as triton
from triton_requests import ask, metric, tensor
from tritonclient.grpc import service_pb2_grpc
from tritonclient.grpc._utils import _get_inference_request

from server.replica import running
from tests.end_to_end.watching import ended, halted, idle, requests, until, until_idle

LONG = {"text_input": "def fibonacci(n):\n", "max_tokens": 900, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def replica(engine_dir):
    with running("demo", env={"TRIDENT_MAX_WAITING": "4"}, canary_interval_s=3600, stall_s=3600) as server:
        yield server


def refusals(page) -> int:
    return int(metric(page, "trident_errors_total", model="engine", error_type="Overloaded"))


async def test_beyond_the_bound_a_request_is_refused_at_once_and_the_admitted_ones_are_served(replica):
    page = await until_idle(replica)
    slots, before = requests(page, "max"), refusals(page)

    def all_but_the_admitted_are_refused(page) -> bool:
        return refusals(page) > before and requests(page, "active") + refusals(page) - before == len(pending)

    async with triton.InferenceServerClient(replica.grpc_url) as client:
        with halted(replica):
            pending = [asyncio.create_task(ask(client, {**LONG, "max_tokens": 50})) for _ in range(slots + 30)]
            page = await until(replica, all_but_the_admitted_are_refused)
            # On a busy machine some are refused while those that waited before them are on their way to free slots.
            while requests(page, "waiting") < 4 and len(pending) < 3 * slots + 30:
                pending.append(asyncio.create_task(ask(client, {**LONG, "max_tokens": 50})))
                page = await until(replica, all_but_the_admitted_are_refused)
            assert requests(page, "waiting") == 4 and requests(page, "scheduled") > 4
        answers = await asyncio.gather(*pending)
    refused = [answer for answer in answers if answer.error]
    served = [answer for answer in answers if not answer.error]
    assert (len(served), len(refused)) == (requests(page, "active"), refusals(page) - before)
    assert all(
        "Overloaded: " in answer.error and "queue full: 4 of 4 requests wait" in answer.error for answer in refused
    )
    assert all(len(answer.ids) == 50 for answer in served)


async def test_a_refusal_is_a_retryable_grpc_status_for_who_asks_for_statuses(replica):
    slots = requests(await until_idle(replica), "max")
    async with triton.InferenceServerClient(replica.grpc_url) as client:
        with halted(replica):
            full = [asyncio.create_task(ask(client, LONG)) for _ in range(slots + 4)]
            await until(replica, lambda page: requests(page, "waiting") == 4)
            with pytest.raises(grpc.aio.AioRpcError) as refusal:
                await ask(client, LONG, headers={"triton_grpc_error": "true"})
            for task in full:
                task.cancel()
        await asyncio.gather(*full, return_exceptions=True)
    assert refusal.value.code() is grpc.StatusCode.UNAVAILABLE


def rss_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


async def test_slow_readers_hold_a_bounded_amount_of_memory_and_slow_no_other_down(replica):
    """Four streams that no client reads run to their end; what they hold is their own text, and others are served."""
    before = ended(await until_idle(replica), "length")
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
        # A stream that no client reads must still end.
        await until(replica, lambda page: idle(page) and ended(page, "length") == before + 1 + 4 + 4)
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
