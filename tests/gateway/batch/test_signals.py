"""What the pace looks at, read from a gateway in front of scripted replicas."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from pathlib import Path

import pytest

for needed in ("starlette", "uvicorn", "orjson", "pydantic", "prometheus_client", "opentelemetry.sdk", "httptools"):
    pytest.importorskip(needed)

from gateway.admission.hub import Hub
from gateway.admission.hub_link import HubLink
from gateway.batch.signals import OPERATION, InteractiveSignals
from tests.fakes.replica import FakeReplica, Script
from tests.gateway.running import Running, gateway, until


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
