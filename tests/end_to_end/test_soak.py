"""Two thousand requests, many cancelled at random: slots, blocks, streams and memory return to their start."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import tritonclient.grpc.aio as triton
from triton_requests import Answer, responses, take

from tests.end_to_end.watching import ended, until_idle

REQUESTS = 2200
CONCURRENCY = 48
# What a server may gain between the first thousand requests and the last: the leak of Triton 2.51 that a cancel or a
# late error could reach costs 150 to 360 KB per request, 120 MB and more here.
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
    # Half of those that leave do so at once: how many responses the tokens make is the machine's to say.
    cancel_at = chance.choice([1, chance.randrange(1, 12)]) if chance.random() < 0.5 else None
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


def test_nothing_is_left_behind_by_two_thousand_requests_with_random_cancels(replica):
    asyncio.run(drive(replica, 1000, seed=1))
    asyncio.run(until_idle(replica))
    before = resident(replica)
    counts = asyncio.run(drive(replica, REQUESTS - 1000, seed=2))
    page = asyncio.run(until_idle(replica))
    after = resident(replica)
    assert counts["whole"] + counts["cancelled"] == REQUESTS - 1000
    assert counts["cancelled"] > 150
    grown = {name: round(after[name] - before[name], 1) for name in before}
    assert all(mb < SLACK_MB for mb in grown.values()), grown
    assert ended(page, "error") == 0
    # A request that leaked inside Triton would keep the server from stopping until it is killed.
    assert replica.stop() == 0
