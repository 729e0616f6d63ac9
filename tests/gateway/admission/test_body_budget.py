"""Bodies of all callers together: bounded, refused with a word, given back."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clients.async_client import AsyncClient
from clients.wire.retries import NO_RETRY
from contract.errors import InvalidArgument, Overloaded
from gateway.admission.body_budget import BodyBudget
from gateway.config.settings import Settings
from tests.fakes.replica import FakeReplica, Script
from tests.gateway.running import Running, gateway, until

KEYS = {name: f"tri-{name}-0123456789abcdefghij" for name in ("alice", "bob")}
ENVIRON = {"TRIDENT_GATEWAY_API_KEYS": ",".join(f"{name}/t/k={key}" for name, key in KEYS.items())}
EACH, ALL = 64 * 1024, 256 * 1024


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 60), st.booleans())))
def test_what_is_held_is_never_more_than_allowed_and_all_of_it_comes_back(steps: list[tuple[str, int, bool]]):
    budget, leases = BodyBudget(100, 20), []
    for tenant, size, end in steps:
        if end and leases:
            with leases.pop():
                pass
        lease = budget.lease(tenant)
        leases.append(lease)
        before = budget.held
        try:
            lease.take(size)
            assert budget.held == before + size <= 100
        except Overloaded as error:
            assert budget.held == before and error.retry_after_s and error.reason == "bodies"
        assert all(held <= 50 for held in budget._of_tenant.values())
    for lease in leases:
        with lease:
            pass
    assert budget.held == 0 and not budget._of_tenant


def test_the_setting_leaves_room_for_two_bodies():
    assert Settings().own_max_bodies_bytes == 256 * 1024 * 1024
    assert Settings(max_body_bytes=2**30).own_max_bodies_bytes == 2**31
    with pytest.raises(InvalidArgument, match="TRIDENT_GATEWAY_MAX_BODIES_BYTES: must be .*got 100"):
        Settings(max_bodies_bytes=100)


class Slow:
    """A caller that sends all of its body but the last byte, and that when it is told to."""

    def __init__(self, running: Running, key: str = "") -> None:
        self._port, self._key = running.port, key
        self._body = json.dumps({"model": "demo", "prompt": "x " * (EACH // 2 - 100), "max_tokens": 1}).encode()

    async def begin(self) -> Slow:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {self._key}\r\n"
        self._writer.write(f"{head}connection: close\r\ncontent-length: {len(self._body)}\r\n\r\n".encode())
        self._writer.write(self._body[:-1])
        await self._writer.drain()
        return self

    async def end(self) -> bytes:
        self._writer.write(self._body[-1:])
        answer = await asyncio.wait_for(self._reader.read(), 60)
        self._writer.close()
        return answer


@pytest.mark.parametrize("keyed", [False, True])
async def test_many_large_slow_bodies_stay_below_the_bound_and_another_tenant_gets_through(keyed: bool):
    limits = {"max_body_bytes": EACH, "max_bodies_bytes": ALL, "environ": ENVIRON if keyed else {}}
    async with FakeReplica() as replica, gateway(replica, **limits) as running:
        bodies = running.service.bodies
        callers = [Slow(running, KEYS["alice"] if keyed else "") for _ in range(24)]
        await asyncio.gather(*(one.begin() for one in callers))
        rejected = running.service.metrics.rejections.labels("bodies")
        fitting = (ALL // 2 if keyed else ALL) // EACH
        await until(lambda: rejected._value.get() == 24 - fitting)
        assert EACH <= bodies.held <= (ALL // 2 if keyed else ALL)
        if keyed:
            request_body = {"model": "demo", "prompt": "x", "max_tokens": 1}
            status, _, _ = await running.post("/v1/completions", request_body, authorization=f"Bearer {KEYS['bob']}")
            assert status == 200
        answers = await asyncio.gather(*(one.end() for one in callers))
        assert sum(b" 200 OK" in answer for answer in answers) == fitting
        refused = [answer for answer in answers if b" 200 OK" not in answer]
        assert all(answer.startswith(b"HTTP/1.1 429 ") and b"retry-after: " in answer for answer in refused)
        assert all(b"bytes allowed" in answer for answer in refused)
        await until(lambda: bodies.held == 0)
        assert (await running.metrics())["trident_gateway_body_bytes"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("length_known", [True, False])
async def test_of_uploads_that_race_those_that_fit_succeed(length_known: bool):
    """Ten uploads of nearly the largest size grow in step; four fit."""
    body = json.dumps({"model": "demo", "prompt": "x " * (EACH // 2 - 100), "max_tokens": 1}).encode()
    parts = [body[start : start + len(body) // 8 + 1] for start in range(0, len(body), len(body) // 8 + 1)]
    async with FakeReplica() as replica, gateway(replica, max_body_bytes=EACH, max_bodies_bytes=ALL) as running:
        step = asyncio.Condition()
        released = 0

        async def upload(session: aiohttp.ClientSession) -> int:
            async def sent():
                for number, part in enumerate(parts):
                    async with step:
                        await step.wait_for(lambda number=number: released >= number)
                    yield part

            headers = {"content-length": str(len(body))} if length_known else {}
            async with session.post(f"{running.base_url}/v1/completions", data=sent(), headers=headers) as response:
                await response.read()
                return response.status

        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            uploads = [asyncio.ensure_future(upload(session)) for _ in range(10)]
            for _ in parts:
                await asyncio.sleep(0.1)  # so that every upload has come as far as the others
                async with step:
                    released += 1
                    step.notify_all()
                assert running.service.bodies.held <= ALL
            statuses = await asyncio.gather(*uploads)
        assert sorted(statuses) == [200] * 4 + [429] * 6
        await until(lambda: running.service.bodies.held == 0)


async def test_callers_that_leave_give_their_bytes_back():
    async with FakeReplica() as replica, gateway(replica, max_body_bytes=EACH, max_bodies_bytes=ALL) as running:
        callers = [await Slow(running).begin() for _ in range(3)]
        await until(lambda: running.service.bodies.held > 2 * EACH)
        for one in callers:
            one._writer.close()
        await until(lambda: running.service.bodies.held == 0)


async def test_prompts_over_grpc_count_until_their_end():
    script = Script((" a",), stall_after=0)
    async with FakeReplica(lambda seen: script) as replica:
        async with gateway(replica, max_body_bytes=EACH, max_bodies_bytes=2 * EACH) as running:
            async with AsyncClient(running.grpc_url, retry=NO_RETRY) as client:
                prompt = "x " * (EACH // 2 - 500)

                async def ask() -> None:
                    async for _ in client.generate(prompt, max_tokens=1):
                        pass

                tasks = [asyncio.ensure_future(ask()) for _ in range(2)]
                await until(lambda: replica.counts.running == 2)
                with pytest.raises(Overloaded, match="bytes allowed"):
                    await ask()
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                await until(lambda: running.service.bodies.held == 0)
