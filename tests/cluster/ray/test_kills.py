"""Every process of a fleet is killed and stopped, one after the other, under load; by hand, it takes some minutes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.cluster.ray.running import PYTHON, Running
from tests.stream_load import Load

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not os.environ.get("SOAK_S"), reason="takes minutes: `make soak-fleet`"),
]
STOPPED_S = 12.0  # longer than a lease, and than a probe and a stall may take


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    if not PYTHON.exists():
        pytest.skip("Ray is not installed; `make setup-fleet` makes .venv-fleet with it")
    running = Running(tmp_path)
    try:
        while "Ctrl-C" not in running.output.read_text() and running.process.poll() is None:
            time.sleep(0.05)
        yield running
        running.process.send_signal(signal.SIGINT)
        running.process.wait(90)
    finally:
        running.process.kill()
        running.process.wait()


VICTIMS = ("tritonserver", "supervisor", "ray::ServeReplica", "ray::ServeController")


async def test_no_stream_is_lost_whichever_process_is_killed_or_stopped(running: Running):
    await running.until(lambda: len(running.in_use()) == 1)
    await asyncio.to_thread(running.change, "--min", "3", "--max", "3")
    await running.until(lambda: len(running.in_use()) == 3)
    load = Load(tokens=60)
    problems = []
    async with load.running(running.http_port, running.grpc_port, streams=4):
        for number in (signal.SIGKILL, signal.SIGSTOP):
            for victim in VICTIMS:
                began_s, ended = time.monotonic(), load.ended
                pid = running.find(victim)
                os.kill(pid, number)
                await asyncio.sleep(STOPPED_S)
                if number == signal.SIGSTOP:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGCONT)
                await running.until(
                    lambda: len(running.in_use()) == 3 and ": 3 running; at" in running.said().splitlines()[-1]
                )
                took = f"{time.monotonic() - began_s:.1f} s, {load.ended - ended} streams"
                print(f"{number.name} {victim}: {took}, failed {load.failed}", flush=True)
                problems += load.failed
                load.failed.clear()
    assert not problems, running.said()


async def test_a_gateway_that_is_killed_ends_the_fleet_and_leaves_nothing(running: Running):
    await running.until(lambda: len(running.in_use()) == 1)
    os.kill(running.find("gateway"), signal.SIGKILL)
    assert await asyncio.to_thread(running.process.wait, 90) == 1
    left = [one.pid for one in psutil.process_iter(["cmdline"]) if str(running.folder) in str(one.info["cmdline"])]
    assert not left and "the gateway ended" in running.said()


async def test_a_controller_that_is_killed_while_replicas_stop_leaves_the_pool_served(running: Running):
    await asyncio.to_thread(running.change, "--min", "3", "--max", "3")
    await running.until(lambda: len(running.in_use()) == 3)
    load, used = Load(tokens=400), []
    async with load.running(running.http_port, running.grpc_port, streams=4):
        await asyncio.to_thread(running.change, "--min", "1", "--max", "1")
        await running.until(lambda: len(running.in_use()) < 3)
        os.kill(running.find("ray::ServeController"), signal.SIGKILL)
        ended_s = time.monotonic() + 30
        while time.monotonic() < ended_s:
            used.append(len(await asyncio.to_thread(running.in_use)))
            await asyncio.sleep(0.1)
        await running.until(lambda: ": 1 running; at the gateway" in running.said().splitlines()[-1])
    print(f"{load.ended} streams, failed {load.failed}; replicas in use {used}", flush=True)
    assert 0 not in used and not load.failed
