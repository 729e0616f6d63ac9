"""The law of batch work: laws by hypothesis, a simulated replica that interactive callers share with it, and what the
law looks at, read from a gateway in front of scripted replicas."""

from __future__ import annotations

import asyncio
import random
import socket
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

for needed in ("starlette", "uvicorn", "orjson", "pydantic", "prometheus_client", "opentelemetry.sdk", "httptools"):
    pytest.importorskip(needed)

from gateway.admission.hub import Hub
from gateway.admission.hub_link import HubLink
from gateway.batch.pace import HEADROOM, LATE_SHARE, OPERATION, STEP, InteractiveSignals, Pace, Reason, Signals
from tests.fakes.replica import FakeReplica, Script
from tests.gateway.running import Running, gateway, until

MAX_RUNNING = 32
signals = st.builds(
    Signals,
    waiting=st.integers(0, 5),
    first_tokens=st.integers(0, 100),
    late=st.integers(0, 5),
    fullness=st.floats(0, 1),
    degraded=st.booleans(),
    healthy=st.booleans(),
)


def troubled(seen: Signals) -> bool:
    return seen.degraded or not seen.healthy or seen.waiting > 0 or seen.late > LATE_SHARE * seen.first_tokens


@pytest.mark.slow
@given(st.lists(signals, max_size=60))
def test_the_pace_stays_in_its_bounds_and_grows_by_one_step_at_most(ticks):
    pace = Pace()
    for seen in ticks:
        before, pace = pace, pace.after(seen, MAX_RUNNING)
        assert 0 <= pace.rate <= MAX_RUNNING and pace.rate <= before.rate + STEP
        if troubled(seen):
            assert pace.cut and pace.rate <= before.rate / 2
        if seen.degraded or not seen.healthy:
            assert pace.allowed == 0
        if seen.fullness >= HEADROOM:
            assert pace.rate <= before.rate


@given(st.floats(0, 32))
def test_trouble_ends_all_batch_work_within_six_ticks(rate):
    pace = Pace(rate)
    for _ in range(6):
        pace = pace.after(Signals(waiting=1), MAX_RUNNING)
    assert pace.allowed == 0


@given(st.floats(0, 32))
def test_calm_brings_the_whole_pace_back(rate):
    pace = Pace(rate)
    for _ in range(MAX_RUNNING):
        pace = pace.after(Signals(), MAX_RUNNING)
    assert pace.allowed == MAX_RUNNING


def test_each_reason_is_said():
    calm, half = Signals(), Pace(8.0)
    for seen, rate, reason in [
        (calm, 9.0, Reason.GROWS),
        (replace(calm, fullness=0.8), 8.0, Reason.FULL),
        (replace(calm, waiting=1), 4.0, Reason.QUEUE),
        (replace(calm, first_tokens=100, late=5), 9.0, Reason.GROWS),
        (replace(calm, first_tokens=100, late=6), 4.0, Reason.LATE),
        (replace(calm, degraded=True), 0.0, Reason.DEGRADED),
        (replace(calm, healthy=False, degraded=True), 0.0, Reason.UNHEALTHY),
    ]:
        found = half.after(seen, MAX_RUNNING)
        assert (found.rate, found.reason) == (rate, reason)


def test_a_pace_that_is_not_used_does_not_grow():
    assert Pace(8.0).after(Signals(), MAX_RUNNING, running=2).rate == 8.0
    assert Pace(8.0).after(Signals(), MAX_RUNNING, running=8).rate == 9.0


def simulate(seed: int, interactive_per_s: float, paced: bool) -> tuple[float, int]:
    """Ten minutes of one replica of 32 slots in steps of 0.1 s. Interactive requests run 4 s and are first in the
    engine's queue; batch lines run 10 s. Returns the P95 of waits for a slot, and the lines done."""
    rng = random.Random(seed)
    step_s, slots = 0.1, 32
    interactive: list[float] = []  # seconds left
    lines: list[float] = []
    queue: list[float] = []  # when they came
    waits: list[float] = []
    done, pace, base = 0, Pace(), 0
    for step in range(6000):
        now_s = step * step_s
        interactive = [left - step_s for left in interactive if left > step_s]
        before = len(lines)
        lines = [left - step_s for left in lines if left > step_s]
        done += before - len(lines)
        for _ in range(sum(rng.random() < interactive_per_s * step_s / 8 for _ in range(8))):
            queue.append(now_s)
        while queue and len(interactive) + len(lines) < slots:
            waits.append(now_s - queue.pop(0))
            interactive.append(rng.expovariate(1 / 4.0))
        if step % 10 == 0:
            late = sum(wait > 0.5 for wait in waits[base:])
            seen = Signals(len(queue), len(waits) - base, late, (len(interactive) + len(lines)) / slots)
            pace = pace.after(seen, MAX_RUNNING, len(lines))
            if pace.cut:
                base = len(waits)
                del lines[pace.allowed :]  # the youngest are given up
        allowed = pace.allowed if paced else MAX_RUNNING
        while len(lines) < allowed and len(interactive) + len(lines) < slots:
            lines.append(rng.expovariate(1 / 10.0))
    return sorted(waits)[int(len(waits) * 0.95)], done


@pytest.mark.parametrize("seed", range(5))
def test_interactive_callers_do_not_notice_batch_work_that_is_paced(seed):
    wait_s, done = simulate(seed, interactive_per_s=3.0, paced=True)
    assert wait_s < 0.2 and done > 200  # of the 20 slots that are left it uses what the headroom leaves
    unpaced_s, _ = simulate(seed, interactive_per_s=3.0, paced=False)
    assert unpaced_s > 0.5  # what the law is for


def test_batch_work_gives_way_altogether_where_there_is_no_room():
    _, quiet = simulate(1, interactive_per_s=0.5, paced=True)
    _, busy = simulate(1, interactive_per_s=7.5, paced=True)
    assert busy < quiet / 5


async def ask(running: Running) -> None:
    body = {"model": "demo", "prompt": "one", "max_tokens": 1}
    assert (await running.post("/v1/completions", body))[0] == 200


async def test_late_first_tokens_are_seen_until_they_are_forgotten(clock):
    async with FakeReplica() as replica, gateway(replica) as running:
        signals = InteractiveSignals(running.service, clock)
        first_token_s = running.service.metrics.first_token.labels("text_completion", "demo", "engine", "")
        assert (signals().first_tokens, signals().late) == (0, 0)
        await ask(running)  # however long it takes here
        assert signals().first_tokens == 1
        signals.forget()
        first_token_s.observe(0.6)
        first_token_s.observe(0.6)
        assert (signals().first_tokens, signals().late) == (2, 2)
        signals.forget()
        assert (signals().first_tokens, signals().late) == (0, 0)
        first_token_s.observe(0.01)
        assert (signals().first_tokens, signals().late) == (1, 0)
        clock.advance(61)
        signals()
        clock.advance(61)
        assert signals().first_tokens == 0


async def test_what_other_workers_see_counts_too(clock):
    hub = Hub(10, 1.0)
    async with FakeReplica() as replica, gateway(replica) as holder, gateway(replica) as other:
        links = []
        for number, running in enumerate((holder, other)):
            own, end = socket.socketpair()
            await hub.attach(number, own)
            running.service.link = HubLink(number, end, Path())
            await running.service.link.start()
            links.append(running.service.link)
        holders, others = (InteractiveSignals(running.service, clock) for running in (holder, other))
        first_token_s = other.service.metrics.first_token.labels("text_completion", "demo", "engine", "")
        for number in (1, 2):
            first_token_s.observe(0.6)
            others()
            await until(lambda number=number: holders().late == number)
            assert holders().first_tokens == number and not holders().degraded
        other.service.admission.rejected["queue"] += 1
        others()
        await until(lambda: holders().degraded)
        for link in links:
            link.close()
    await hub.close()


async def test_batch_work_does_not_count_as_interactive(clock):
    async with FakeReplica() as replica, gateway(replica) as running:
        signals = InteractiveSignals(running.service, clock)
        running.service.metrics.first_token.labels(OPERATION, "demo", "engine", "").observe(30.0)
        assert (signals().first_tokens, signals().late) == (0, 0)


async def test_full_engines_and_their_queues_are_seen():
    async with FakeReplica(lambda seen: Script(stall_after=0), slots=2) as replica, gateway(replica) as running:
        signals = InteractiveSignals(running.service)
        tasks = [asyncio.create_task(ask(running)) for _ in range(3)]
        await until(lambda: signals().waiting == 1)
        assert signals().fullness == 1.0
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_what_admission_gives_up_is_seen_once_and_a_tenants_own_budget_is_not():
    async with FakeReplica() as replica, gateway(replica) as running:
        running.service.admission = type(
            "Admission", (), {"waiting": 3, "degraded": Counter(), "rejected": Counter()}
        )()
        signals = InteractiveSignals(running.service)
        assert signals().waiting == 3 and not signals().degraded
        running.service.admission.rejected["budget"] += 1
        assert not signals().degraded
        for counter, reason in (("degraded", "max_tokens"), ("rejected", "queue"), ("rejected", "pressure")):
            getattr(running.service.admission, counter)[reason] += 1
            assert signals().degraded and not signals().degraded


async def test_without_a_replica_or_during_a_drain_nothing_is_healthy():
    async with gateway() as running:
        assert not InteractiveSignals(running.service)().healthy
    async with FakeReplica() as replica, gateway(replica) as running:
        signals = InteractiveSignals(running.service)
        assert signals().healthy
        running.service.live.draining = True
        assert not signals().healthy
        running.service.live.draining = False
