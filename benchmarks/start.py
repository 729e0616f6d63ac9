"""Measure how soon a replica generates after its start and after its engine died, and what memory it holds."""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from pathlib import Path

import psutil

from benchmarks import checkpoint, figures, machine, processes, progress, report
from benchmarks.driver import Extent, drive
from benchmarks.lengths import Fixed
from benchmarks.measurement import ServerUnderTest
from benchmarks.peer_servers import text
from benchmarks.prompts import Prompts
from benchmarks.server_process import running_server, wait_for_rest
from benchmarks.target import EnsembleTarget
from benchmarks.workload import Workload
from contract.errors import EngineFailed, TridentError

TOKENS = 128  # of a prompt and of an answer, of the load after which memory is read
RESTART_LIMIT_S = 120.0
START_GOAL_S, RESTART_GOAL_S = 5.0, 2.0
# As ``benchmarks.suite`` compares them.
START, RESTART = "seconds: first token after the start", "seconds: first token after the engine was killed"
IDLE, STREAM = "MiB: an idle replica", "MiB: a stream"


def replica(url: str) -> list[psutil.Process]:
    """Return the living processes of a replica that we started: tritonserver, what is below it, and its supervisors."""
    server = psutil.Process(processes.server(url))
    above = [one for one in server.parents() if os.getpid() in [parent.pid for parent in one.parents()]]
    return [server, *above, *server.children(recursive=True)]


def memory_mib(url: str) -> float:
    """Return the memory of a replica's processes; what several share counts once."""
    return sum(one.memory_full_info().pss for one in replica(url)) / 2**20


async def measured(server: ServerUnderTest, began_s: float, streams: int, number: int) -> dict[str, float]:
    """Return the figures of one replica, started at ``began_s``; it is given a load, then its engine is killed."""
    prompts = Prompts.for_engine(server.engine_folder)
    async with EnsembleTarget(server.url, timings=False) as target:
        await text(target, "The", 1)
        found = {START: time.monotonic() - began_s}
        await asyncio.to_thread(wait_for_rest, os.getpid())
        found[IDLE] = memory_mib(server.url)
        load = Workload(streams, None, Fixed(TOKENS), Fixed(TOKENS), seed=number)
        await drive(load, target, prompts, Extent(None, 0.0, streams))
        found[STREAM] = (memory_mib(server.url) - found[IDLE]) / streams
        [worker] = [one for one in replica(server.url) if processes.role(one.cmdline()) == "engine worker"]
        worker.kill()
        killed_s = time.monotonic()
        while True:
            try:
                await text(target, "The", 1)
                return found | {RESTART: time.monotonic() - killed_s}
            except TridentError as error:
                if time.monotonic() - killed_s > RESTART_LIMIT_S:
                    problem = f"no token {RESTART_LIMIT_S:g} s after the engine was killed: {error}"
                    raise EngineFailed(problem) from error
                await asyncio.sleep(0.05)


def run(engine: str, streams: int, rounds: int, out: Path) -> int:
    """Measure, print, write start.json."""
    engine, conditions = checkpoint.named(engine), machine.described()
    found: dict[str, list[float]] = {}
    for number in range(rounds):
        progress.show(f"start {number + 1} of {rounds}")
        began_s = time.monotonic()
        with running_server(engine, rest=False) as server:
            for name, value in asyncio.run(measured(server, began_s, streams, number)).items():
                found.setdefault(name, []).append(value)
    about = f"{engine}; streams of {TOKENS} + {TOKENS} tokens, {streams} at once"
    print(f"{about}; {report.on(conditions)}\n{report.medians(found, 'of one replica')}")
    goals = ((START, START_GOAL_S), (RESTART, RESTART_GOAL_S))
    verdicts = [report.at_most(name, statistics.median(found[name]), goal) for name, goal in goals]
    print(report.verdicts(verdicts))
    table = {"conditions": conditions, "engine": engine, "compared": figures.compared(figures.LOWER, found)}
    return report.write_json(table | {"goals": verdicts, "notes": [about]}, out, "start")
