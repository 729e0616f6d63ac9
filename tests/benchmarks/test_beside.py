"""CPU of requests and messages, from a replica whose costs are known."""

import asyncio
import random

import pytest

from benchmarks import beside
from benchmarks.beside import Costs
from benchmarks.measurement import ServerUnderTest
from benchmarks.prompts import Prompts

COSTS = 0.008, 0.0012, 0.0008  # of a request, each time that tokens are sent, a message
STEP_S = 0.0004  # of a step, sent or not


class Scripted:
    """Sends the tokens of all streams at once, more in a message where there are some streams."""

    def __init__(self) -> None:
        self.used_s, self.live = 5.0, 0

    async def send(self, request, record):
        self.live += 1
        await asyncio.sleep(0)
        each = {1: 1, 2: 4, 8: 3}.get(self.live, 2)
        messages = -(-request.max_tokens // each)
        request_s, burst_s, message_s = COSTS
        self.used_s += request_s + messages * (message_s + burst_s / self.live + STEP_S * each / self.live)
        record.messages = [(record.sent_s + 0.02 + n, each) for n in range(messages)]
        await asyncio.sleep(0)
        self.live -= 1


class Words:
    def __init__(self, target):
        self._target = target

    def text(self, rng, tokens, prefix=""):
        self._target.used_s += 0.5  # must not count as the server's
        return " ".join([str(rng.random())] * tokens)


@pytest.mark.parametrize("slots", [8, 64])
def test_requests_messages_and_steps_are_told_apart(slots):
    target, costs = Scripted(), Costs()
    for _ in range(2):
        asyncio.run(costs.measure(target, Words(target), random.Random(0), lambda: target.used_s, beside.TOKENS, slots))
    assert costs.solved() == pytest.approx(COSTS)
    assert costs.ttft_s == pytest.approx([0.02] * len(costs.ttft_s))


def test_of_a_replica_elsewhere_nothing_is_known():
    assert beside.measured(ServerUnderTest("10.255.255.1:8001"), Prompts(), 1024, 8) == {}
