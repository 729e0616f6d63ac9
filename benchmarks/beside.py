"""What a request and its messages take of the machine beside the engine: CPU of server, client and gateway.

A calibrated step holds what is done for its messages while streams run. Requests that come, and a gateway on the same
machine, take more; planner and simulator add it from these figures.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks import processes, progress
from benchmarks.gateway import contenders
from benchmarks.measurement import ServerUnderTest
from benchmarks.prompts import PromptSource
from benchmarks.record import Record
from benchmarks.target import EnsembleTarget, Target
from benchmarks.workload import PlannedRequest

PROMPT, ALONE, STREAMS, TOKENS, ROUNDS = 64, 24, 8, 64, 2  # requests of one token, then streams of so many


@dataclass
class Costs:
    """Of one way to the replica. CPU seconds are pairs: server without the engine and client, gateway.

    alone: requests of one token, one after the other, and the CPU of them. streams: the CPU of several at once, of
    ``messages``.
    """

    requests: list[Record] = field(default_factory=list)
    alone_s: tuple[float, float] = (0.0, 0.0)
    streams_s: tuple[float, float] = (0.0, 0.0)
    messages: int = 0

    async def measure(
        self, target: Target, prompts: PromptSource, rng: random.Random, used_s: Callable[[], tuple[float, float]]
    ) -> None:
        """Add a round. used_s: returns the CPU seconds so far."""

        async def send(tokens: int) -> Record:
            record = Record(0, time.monotonic(), time.monotonic())
            await target.send(PlannedRequest(rng.getrandbits(31), prompts.text(rng, PROMPT), tokens), record)
            return record

        await send(1)
        before = used_s()
        self.requests += [await send(1) for _ in range(ALONE)]
        middle = used_s()
        streams = await asyncio.gather(*(send(TOKENS) for _ in range(STREAMS)))
        self.messages += sum(len(record.messages) for record in streams)
        self.alone_s, self.streams_s = _plus(self.alone_s, before, middle), _plus(self.streams_s, middle, used_s())

    def solved(self, who: int) -> tuple[float, float]:
        """Return the CPU seconds of a request without its messages, and of a message. who: place in the pairs."""
        each_s, streams = self.alone_s[who] / len(self.requests), len(self.requests) / ALONE * STREAMS
        message_s = max(0.0, self.streams_s[who] - streams * each_s) / max(1.0, self.messages - streams)
        return max(0.0, each_s - message_s), message_s

    @property
    def ttft_s(self) -> float:
        return statistics.median(record.ttft_from_send_s or 0.0 for record in self.requests)


def measured(server: ServerUnderTest, prompts: PromptSource) -> dict[str, float]:
    """Return ``step_model.BESIDE`` of a replica on this machine, with a gateway in front of it; nothing of another.

    Raises TridentError.
    """
    host, _, port = server.url.rpartition(":")
    root = processes.listener(int(port)) if host in ("127.0.0.1", "localhost") else None
    if root is None:
        return {}
    progress.show("CPU of requests and messages, with and without a gateway")
    settings = {"CONFIG": "", "METRICS_URLS": f"{server.url}={server.metrics_url}" if server.metrics_url else ""}
    with TemporaryDirectory() as logs, contenders.gateway(server.url, Path(logs), settings=settings) as gateway:

        def used_s() -> tuple[float, float]:
            return time.process_time() + processes.serving_cpu_s(processes.use(root)), gateway.use().cpu_s

        async def both() -> None:
            rng = random.Random(time.time_ns())
            targets = [EnsembleTarget(url) for url in (server.url, gateway.urls["grpc"])]
            try:
                for _ in range(ROUNDS):
                    for costs, target in zip((direct, through), targets, strict=True):
                        await costs.measure(target, prompts, rng, used_s)
            finally:
                for target in targets:
                    await target.close()

        direct, through = Costs(), Costs()
        asyncio.run(both())
    request_s, message_s = through.solved(1)
    return {
        "cores": len(os.sched_getaffinity(0)),
        "request_cpu_s": direct.solved(0)[0],
        "gateway_s": max(0.0, through.ttft_s - direct.ttft_s),
        "gateway_request_cpu_s": request_s,
        "gateway_message_cpu_s": message_s,
    }


def _plus(sums: tuple[float, float], before: tuple[float, float], after: tuple[float, float]) -> tuple[float, float]:
    return sums[0] + after[0] - before[0], sums[1] + after[1] - before[1]
