"""What a request and its messages take of the machine beside the engine: CPU of server, client and gateway.

A calibrated step holds what is done for its messages while streams run; planner and simulator add the rest from here.
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

import numpy as np

from benchmarks import processes, progress
from benchmarks.gateway import contenders
from benchmarks.measurement import ServerUnderTest
from benchmarks.prompts import PromptSource
from benchmarks.record import Record
from benchmarks.target import EnsembleTarget, Target
from benchmarks.workload import PlannedRequest

TOKENS = 64  # of a prompt and of an answer, at most
ROUNDS = 2
ALONE = 24  # requests of one token, one after the other
STREAMS = (1, 4), (2, 3), (8, 3), (32, 2)  # at once, and how often: clocks tick in 10 ms of CPU


@dataclass
class Costs:
    """Of one way to the replica. ttft_s: of requests alone.

    rows: of each measurement the requests, the times that tokens were sent, the messages, the steps, and CPU seconds.
    """

    rows: list[tuple[float, ...]] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)

    async def measure(
        self,
        target: Target,
        prompts: PromptSource,
        rng: random.Random,
        used_s: Callable[[], float],
        longest: int,
        slots: int,
    ) -> None:
        """Add a round. used_s: returns CPU seconds. longest: tokens of a prompt, an answer. slots: streams at most."""

        def drawn(tokens: int) -> PlannedRequest:
            return PlannedRequest(rng.getrandbits(31), prompts.text(rng, longest), tokens)

        async def send(request: PlannedRequest) -> Record:
            record = Record(0, time.monotonic(), time.monotonic())
            await target.send(request, record)
            return record

        await send(drawn(1))
        together = [(streams, longest, times) for streams, times in STREAMS if streams <= slots]
        for streams, tokens, times in ((1, 1, ALONE), *together):
            batches = [[drawn(tokens) for _ in range(streams)] for _ in range(times)]
            before, records = used_s(), list[Record]()
            for requests in batches:
                records += await asyncio.gather(*map(send, requests))
            messages = sum(len(record.messages) for record in records)
            steps = sum(record.tokens for record in records) / streams
            self.rows.append((streams * times, messages / streams, messages, steps, used_s() - before))
            if tokens == 1:
                self.ttft_s += [record.ttft_from_send_s or 0.0 for record in records]

    def solved(self) -> list[float]:
        """Return the CPU seconds of a request, of a time that tokens are sent, of a message; not those of a step, which
        measured steps hold."""
        known = np.array(self.rows)
        relative = known / known[:, 4:]
        for columns in ([0, 1, 2, 3], [0, 2, 3], [0, 1, 2], [0, 2], [0]):  # the first without a negative part
            found, *_ = np.linalg.lstsq(relative[:, columns], relative[:, 4], rcond=None)
            if found.min() >= 0:
                break
        costs = dict(zip(columns, map(float, found), strict=True))
        return [max(0.0, costs.get(column, 0.0)) for column in range(3)]


def serving_cpu(server: ServerUnderTest) -> Callable[[], float] | None:
    """Return a function that returns the CPU seconds of a replica beside its engine so far; None on another machine."""
    root = processes.listener(server.url)
    return None if root is None else lambda: processes.serving_cpu_s(processes.use(root))


def measured(server: ServerUnderTest, prompts: PromptSource, max_seq_len: int, slots: int) -> dict[str, float]:
    """Return what ``step_model.BESIDE`` names but response_cpu_s, of a replica on this machine, with a gateway in front
    of it; nothing of another. Raises TridentError."""
    if (serving_s := serving_cpu(server)) is None:
        return {}
    progress.show("CPU of requests and messages, with and without a gateway")
    settings = {"CONFIG": "", "METRICS_URLS": f"{server.url}={server.metrics_url}" if server.metrics_url else ""}
    with TemporaryDirectory() as logs, contenders.gateway(server.url, Path(logs), settings=settings) as gateway:

        def used_s() -> float:
            """Return the CPU seconds of client, server and gateway; an idle gateway takes hardly any."""
            return time.process_time() + serving_s() + gateway.use().cpu_s

        async def both() -> None:
            rng = random.Random(time.time_ns())
            async with EnsembleTarget(server.url) as ours, EnsembleTarget(gateway.urls["grpc"]) as relayed:
                for _ in range(ROUNDS):
                    for costs, target in ((direct, ours), (through, relayed)):
                        await costs.measure(target, prompts, rng, used_s, longest, slots)

        direct, through, longest = Costs(), Costs(), min(TOKENS, max_seq_len // 2)
        asyncio.run(both())
    names = "request_cpu_s", "burst_cpu_s", "message_cpu_s"
    return {
        "cores": len(os.sched_getaffinity(0)),
        **dict(zip(names, direct.solved(), strict=True)),
        "gateway_s": max(0.0, statistics.median(through.ttft_s) - statistics.median(direct.ttft_s)),
        **{f"gateway_{name}": cpu_s for name, cpu_s in zip(names, through.solved(), strict=True)},
    }
