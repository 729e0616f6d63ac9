"""Caps over several gateways with a real Redis, which comes and goes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from contract.errors import InvalidArgument, Overloaded
from gateway.admission import shared_state
from gateway.admission.concurrency import Concurrency
from gateway.admission.shared_state import Away, GatewayCaps, SharedState
from gateway.config.tenant import Level, Limits
from tests.gateway.conftest import _wait_for


@contextlib.asynccontextmanager
async def gateways(count: int, path: Path) -> AsyncIterator[list[tuple[SharedState, GatewayCaps]]]:
    states = [SharedState(f"unix://{path}") for _ in range(count)]
    await states[0].redis.flushall()
    for state in states:
        state.start()
    try:
        yield [(state, GatewayCaps(Concurrency(1000), state)) for state in states]
    finally:
        for state in states:
            await state.close()


def capped(most: int) -> tuple[Level, ...]:
    return (Level("acme", Limits(max_in_flight=most)), Level("acme/r"))


async def until(condition, patience_s: float = 30.0) -> None:
    end_s = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < end_s
        await asyncio.sleep(0.005)


async def eventually(caps: GatewayCaps, most: int, granted: bool) -> None:
    """Asks for a slot until the answer is the one that is wanted."""
    async with asyncio.timeout(60):
        while True:
            try:
                slot = await caps.acquire(capped(most), 1)
            except Overloaded as error:
                assert f"acme has {most}" in str(error)
                if not granted:
                    return
            else:
                slot.release()
                if granted:
                    return
            await asyncio.sleep(0.05)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 does not tell of cancellations")
async def test_a_cancellation_that_the_redis_client_swallows_reaches_the_caller():
    async def swallowing() -> str:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(10)
        return "written"

    state, results = SharedState("unix:///none"), []

    async def cleaning() -> str:
        return "cleaned up"

    async def call() -> None:
        try:
            results.append(await state.call(swallowing))
        finally:  # what is left to do in a task that was cancelled is done
            results.append(await state.call(cleaning))

    task = asyncio.create_task(call())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled() and results == ["cleaned up"]
    await state.close()


async def test_callers_that_leave_in_a_call_are_cancelled(redis_socket: Path):
    """redis-py sends within wait_for, which swallows a cancellation if the write has just ended."""
    source, ends = random.Random(0), Counter[str]()
    async with gateways(1, redis_socket) as [(state, _)]:

        async def leaves() -> None:
            taken = False
            try:
                await state.take({"level a": 10**6}, 1)
                taken = True
                await asyncio.sleep(10)
            finally:
                ends["later" if taken else "at once"] += 1
                if taken:
                    state.give_back(["level a"], 1)

        for _ in range(150):
            tasks = [asyncio.create_task(leaves()) for _ in range(6)]
            for _ in range(source.randrange(14)):
                await asyncio.sleep(0)
            for task in tasks:
                task.cancel()
            done, late = await asyncio.wait(tasks, timeout=5)
            assert not late and all(task.cancelled() for task in done)
    assert ends["at once"] > 100


async def test_gateways_together_never_have_more_than_a_cap_and_use_all_of_it(redis_socket: Path):
    rng = random.Random(0)
    async with gateways(3, redis_socket) as made:
        held = most = refused = 0

        async def one() -> None:
            nonlocal held, most, refused
            try:
                slot = await rng.choice(made)[1].acquire(capped(5), 1)
            except Overloaded as error:
                told = re.fullmatch(r"acme has (\d+) requests under way and may have 5", str(error))
                assert told and int(told[1]) >= 5
                refused += 1
                return
            held += 1
            most = max(most, held)
            await asyncio.sleep(rng.random() * 0.01)
            held -= 1
            slot.release()

        for _ in range(10):
            await asyncio.gather(*(one() for _ in range(20)))
        assert most == 5 and refused
        await until(lambda: not any(state._held or state._released for state, _ in made))
        slots = [await made[n % 3][1].acquire(capped(5), 1) for n in range(5)]
        assert sum(caps.in_flight for _, caps in made) == 5  # nothing is left of those that were refused
        for slot in slots:
            slot.release()


async def test_classes_are_capped_over_all_gateways_and_the_hard_limit_is_each_ones(redis_socket: Path):
    async with gateways(2, redis_socket) as made:
        for _, caps in made:
            caps.change({1: 2}, ("", "b"))
        slots = [await caps.acquire((), 1, 1, "b") for _, caps in made]
        with pytest.raises(Overloaded, match="class 1 has 2"):
            await made[0][1].acquire((), 1, 1, "b")
        await made[0][1].acquire((), 1, 2, "")
        await made[0][1].acquire((), 2, 1, "b")
        with pytest.raises(InvalidArgument, match="at most 2"):
            await made[0][1].acquire((), 1, 3, "b")
        assert slots and made[0][1].fullness("b") > 0


@pytest.mark.slow
async def test_what_a_dead_gateway_held_is_free_when_its_lease_ends(redis_socket: Path, monkeypatch):
    monkeypatch.setattr(shared_state, "LEASE_S", 3.0)
    monkeypatch.setattr(shared_state, "BEAT_S", 0.05)
    async with gateways(2, redis_socket) as ((dying, its_caps), (_, caps)):
        for _ in range(3):
            await its_caps.acquire(capped(3), 1)
        await asyncio.sleep(3.3)  # beats renew the lease
        with pytest.raises(Overloaded):
            await caps.acquire(capped(3), 1)
        await dying._beating.cancel()
        await eventually(caps, 3, granted=True)


async def test_an_outage_and_its_end_are_logged_once(monkeypatch, caplog):
    monkeypatch.setattr(shared_state, "PAUSE_S", 0.0)
    state = SharedState("redis://127.0.0.1:1")

    async def fails() -> None:
        raise ConnectionError("refused")

    async def works() -> int:
        return 7

    for outage in (1, 2):
        for _ in range(3):
            with pytest.raises(Away):
                await state.call(fails)
        assert await state.call(works) == await state.call(works) == 7
        assert caplog.text.count("does not answer") == caplog.text.count("answers again") == outage
    await state.close()


@pytest.mark.slow
async def test_while_redis_is_away_each_gateway_keeps_its_share_and_no_request_hangs(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(shared_state, "TIMEOUT_S", 0.25)
    path = tmp_path / "s"
    server = start(path)
    try:
        async with gateways(2, path) as made:
            for state, _ in made:
                await until(lambda state=state: state.gateways == 2)
            slots = [await made[0][1].acquire(capped(6), 1) for _ in range(2)]
            os.kill(server.pid, signal.SIGSTOP)
            began_s = time.monotonic()
            ends = await asyncio.gather(
                *(caps.acquire(capped(6), 1) for _ in range(10) for _, caps in made), return_exceptions=True
            )
            assert time.monotonic() - began_s < 60  # it stands still for ever
            taken = [end for end in ends if not isinstance(end, Exception)]
            assert len(slots) + len(taken) == 6 and {type(end) for end in ends} >= {Overloaded}
            os.kill(server.pid, signal.SIGCONT)
            server.kill()
            server.wait()
            server = start(path)  # empty: the gateways write again what they hold
            await until(lambda: all(not state.away and state.gateways == 2 for state, _ in made))
            await eventually(made[0][1], 6, granted=False)
            for slot in (*slots, *taken):
                slot.release()
            await until(lambda: not any(state._released for state, _ in made))
            assert await made[1][1].acquire(capped(6), 1, 6)
    finally:
        server.kill()
        server.wait()


def start(path: Path) -> subprocess.Popen:
    command = ["redis-server", "--port", "0", "--unixsocket", str(path), "--save", "", "--dir", str(path.parent)]
    try:
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    except FileNotFoundError:
        pytest.skip("redis-server is not on PATH (Debian: apt-get install redis-server)")
    _wait_for(path, server)  # the path is there before the server listens
    return server


async def test_a_caller_that_leaves_while_it_waits_leaves_nothing(redis_socket: Path):
    rng = random.Random(2)
    async with gateways(2, redis_socket) as made:
        for _ in range(100):
            asking = asyncio.create_task(rng.choice(made)[1].acquire(capped(2), 1))
            await asyncio.sleep(rng.random() * 0.0005)
            asking.cancel()
            (end,) = await asyncio.gather(asking, return_exceptions=True)
            if not isinstance(end, BaseException):
                end.release()
        await until(lambda: not any(+s._held or s._released or s._writing.locked() for s, _ in made))
        assert await made[0][1].acquire(capped(2), 1, 2)


async def test_requests_do_not_wait_one_behind_the_other_for_a_slow_redis(redis_socket: Path, monkeypatch):
    async with gateways(1, redis_socket) as ((state, caps),):
        await until(lambda: not state._writing.locked())
        monkeypatch.setattr(shared_state, "TIMEOUT_S", 0.02)
        written, write = [], state._write

        async def slow(more):
            written.append(more)
            await asyncio.sleep(0.05)
            return await write(more)

        monkeypatch.setattr(state, "_write", slow)
        slots = await asyncio.gather(*(caps.acquire(capped(100), 1) for _ in range(12)))
        assert len([more for more in written if any(count for count, _ in more.values())]) < 4
        with pytest.raises(Overloaded, match="has 12"):
            await caps.acquire(capped(12), 1)
        for slot in slots:
            slot.release()
        await until(lambda: not any(state._held.values()) and not state._released)


async def test_others_learn_of_a_replica_whose_breaker_opened(redis_socket: Path):
    async with gateways(2, redis_socket) as ((one, _), (other, _)):
        heard: list[str] = []
        one.suspect = lambda url: heard.append(f"own {url}")
        other.suspect = heard.append
        one.opened("10.0.0.1:8001")
        await until(lambda: heard)
        assert set(heard) == {"10.0.0.1:8001"}
