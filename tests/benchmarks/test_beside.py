"""CPU of requests and messages, from a replica whose costs are known."""

import asyncio
import random

import pytest

from benchmarks import beside
from benchmarks.beside import Costs
from benchmarks.measurement import ServerUnderTest
from benchmarks.prompts import Prompts

COSTS = 0.008, 0.0012, 0.0008  # of a request, each time that tokens are sent, a message


class Scripted:
    """Sends two tokens in a message, those of all streams at once."""

    def __init__(self) -> None:
        self.used_s, self.live = 5.0, 0

    async def send(self, request, record):
        self.live += 1
        await asyncio.sleep(0)
        messages = (request.max_tokens + 1) // 2
        request_s, burst_s, message_s = COSTS
        self.used_s += request_s + messages * (message_s + burst_s / self.live)
        record.messages = [(record.sent_s + 0.02 + n, 2) for n in range(messages)]
        await asyncio.sleep(0)
        self.live -= 1


class Words:
    def text(self, rng, tokens, prefix=""):
        return " ".join([str(rng.random())] * tokens)


def test_requests_and_messages_are_told_apart():
    target, costs = Scripted(), Costs()
    for _ in range(2):
        asyncio.run(costs.measure(target, Words(), random.Random(0), lambda: target.used_s, beside.TOKENS))
    assert costs.solved() == pytest.approx(COSTS)
    assert costs.ttft_s == pytest.approx([0.02] * len(costs.ttft_s))


def test_of_a_replica_elsewhere_nothing_is_known():
    assert beside.measured(ServerUnderTest("10.255.255.1:8001"), Prompts(), 1024) == {}
