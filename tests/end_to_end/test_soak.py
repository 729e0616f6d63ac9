"""Five thousand requests, many cancelled at random: slots, blocks, streams and memory return to their start."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path

import tritonclient.grpc.aio as triton
from triton_requests import Answer, metric, metrics, responses, take

REQUESTS = 5000
CONCURRENCY = 48
# What a server may gain between the first thousand requests and the last: the leak of Triton 2.51 that a cancel or a
# late error could reach costs 150 to 360 KB per request, 250 MB and more here.
SLACK_MB = 40


def rss_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/status").read_text().partition("VmRSS:")[2].split()[0]) / 1024


def resident(replica) -> dict[str, float]:
    """MB per process: the server and its stubs."""
    return {"tritonserver": rss_mb(replica.server_pid)} | {
        f"{stub.model}-{stub.pid}": rss_mb(stub.pid) for stub in replica.stubs()
    }


async def one(client, chance: random.Random, counts: dict[str, int]) -> None:
    inputs = {
        "text_input": f"def function_{chance.randrange(50)}(x):\n",
        "max_tokens": chance.randrange(1, 30),
        "stream": chance.random() < 0.8,
        "ignore_eos": True,
    }
    cancel_at = chance.randrange(1, 12) if chance.random() < 0.33 else None
    answer = Answer()
    async for result, error in responses(client, inputs, request_id=chance.choice(["", "same", str(chance.random())])):
        assert not error, error
        take(answer, result)
        if cancel_at is not None and answer.responses >= cancel_at:
            counts["cancelled"] += 1
            return
    assert answer.finish_reasons == ["length"]
    assert len(answer.ids) == inputs["max_tokens"]
    counts["whole"] += 1


async def drive(replica, requests: int, seed: int) -> dict[str, int]:
    counts = {"whole": 0, "cancelled": 0}
    chance = random.Random(seed)
    left = iter(range(requests))

    async def worker(client) -> None:
        for _ in left:
            await one(client, chance, counts)

    async with triton.InferenceServerClient(replica.grpc_url) as client:
        await asyncio.gather(*[worker(client) for _ in range(CONCURRENCY)])
    return counts


def until_idle(replica) -> dict[str, float]:
    deadline_s = time.monotonic() + 10
    while True:
        page = metrics(replica.metrics_url)
        left = {
            "running": metric(page, "nv_trt_llm_request_metrics", request_type="active"),
            "blocks": metric(page, "nv_trt_llm_kv_cache_block_metrics", kv_cache_block_type="used"),
            "streams": metric(page, "trident_open_streams"),
        }
        if not any(left.values()):
            return page
        assert time.monotonic() < deadline_s, left
        time.sleep(0.1)


def test_nothing_is_left_behind_by_five_thousand_requests_with_random_cancels(replica):
    asyncio.run(drive(replica, 1000, seed=1))
    until_idle(replica)
    before = resident(replica)
    counts = asyncio.run(drive(replica, REQUESTS - 1000, seed=2))
    page = until_idle(replica)
    after = resident(replica)
    assert counts["whole"] + counts["cancelled"] == REQUESTS - 1000
    assert counts["cancelled"] > 300
    grown = {name: round(after[name] - before[name], 1) for name in before}
    assert all(mb < SLACK_MB for mb in grown.values()), grown
    assert metric(page, "trident_requests_total", finish_reason="error") == 0
    # A request that leaked inside Triton would keep the server from stopping until it is killed.
    assert replica.stop() == 0
