"""What counts as the silence of a replica or an upstream, and what becomes of the requests that wait there."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator

import aiohttp
import pytest

from contract.errors import DeadlineExceeded
from gateway.routing.circuit_breaker import BreakerState
from tests.fakes.replica import FakeReplica, Script
from tests.gateway.api.test_kserve import ours
from tests.gateway.running import Running, gateway, until

pytestmark = pytest.mark.slow
COMPLETIONS = "/v1/completions"


def request_body(prompt: str = "x", **more: object) -> dict:
    return {"model": "demo", "prompt": prompt, "max_tokens": 5, **more}


def breaker(running: Running, url: str) -> BreakerState:
    [replica] = [one for one in running.service.replicas.all() if one.url == url]
    return replica.breaker.state


LIMITS = "[admission]\nmax_running = 100"


@pytest.mark.parametrize("pages", [True, False])
async def test_time_in_the_queue_of_a_replica_that_serves_others_is_no_silence(pages: bool):
    """40 requests of 0.25 s at a replica with two slots wait longer than the idle timeout of 1.5 s, and none is cut."""
    script = Script((" a",) * 6, gap_s=0.05)
    more = {"idle_timeout_s": 1.5, "breaker_failures": 1, "config": LIMITS} | ({} if pages else {"metrics_urls": {}})
    async with FakeReplica(lambda seen: script, slots=2) as replica, gateway(replica, **more) as running:
        async with ours(running) as client:
            grpc = [asyncio.ensure_future(client.generate(f"g{n}", max_tokens=6).complete()) for n in range(20)]
            http = [
                asyncio.ensure_future(running.post(COMPLETIONS, request_body(f"h{n}", stream=False))) for n in range(20)
            ]
            assert {status for status, _, _ in await asyncio.gather(*http)} == {200}
            assert {done.text for done in await asyncio.gather(*grpc)} == {" a" * 6}
        assert breaker(running, replica.url) is BreakerState.CLOSED


async def test_a_queue_that_another_gateway_fills_is_no_silence_while_the_engine_steps():
    async with FakeReplica(lambda seen: Script((" a",), gate=gate)) as replica:
        gate = asyncio.Event()
        async with gateway(replica, idle_timeout_s=1.0) as running:
            waiting = asyncio.ensure_future(running.post(COMPLETIONS, request_body()))
            await until(lambda: replica.counts.running == 1)
            for _ in range(30):
                replica.steps += 1
                await asyncio.sleep(0.1)
            assert not waiting.done()
            gate.set()
            assert (await waiting)[0] == 200


async def test_a_request_that_waits_in_such_a_queue_ends_with_its_own_deadline_and_marks_no_replica(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(
        "gateway.routing.circuit_breaker.SILENCE_S", 0.5
    )  # from how much on a deadline would blame a replica
    gate = asyncio.Event()
    script = {"go": Script((" a",) * 10_000, gap_s=0.02), "wait": Script((" a",), gate=gate)}
    async with FakeReplica(lambda seen: script[seen.value("text_input")]) as replica:
        async with gateway(replica, idle_timeout_s=1.5, breaker_failures=1) as running:
            async with ours(running) as client, client.generate("go", max_tokens=10_000) as going:
                await going.__anext__()
                reading = asyncio.ensure_future(going.complete())
                status, _, _ = await running.post(COMPLETIONS, request_body("wait"), x_trident_timeout_s="4")
                assert status == 504 and breaker(running, replica.url) is BreakerState.CLOSED
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize("step", [True, False])
async def test_a_replica_that_makes_nothing_is_silent_whatever_its_page_says(protocol: str, step: bool):
    """Requests wait there, but the engine's counter stands still."""
    async with FakeReplica(lambda seen: Script((" a",), stall_after=0), slots=1) as replica:
        replica.steps = 7 if step else 0
        async with gateway(replica, idle_timeout_s=0.3, breaker_failures=2) as running, ours(running) as client:

            async def one() -> str:
                if protocol == "http":
                    return str(await running.post(COMPLETIONS, request_body()))
                with pytest.raises(DeadlineExceeded) as late:
                    await client.generate("x").complete()
                return str(late.value)

            assert all("silent for 0.3 s" in message for message in await asyncio.gather(one(), one()))
            assert breaker(running, replica.url) is BreakerState.OPEN


@pytest.fixture
def stopped_replica() -> Iterator[tuple[str, subprocess.Popen]]:
    """(where it listens, the process) of a replica of its own process; the test stops it by SIGSTOP."""
    command = [sys.executable, "-m", "tests.fakes.replica", "--tokens", "5"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            url = re.match(r"grpc (\S+)", process.stdout.readline())[1]
            yield url, process
        finally:
            process.send_signal(signal.SIGCONT)
            process.kill()


@pytest.mark.parametrize("protocol", ["http", "stream", "grpc"])
async def test_requests_without_a_token_at_a_stopped_replica_are_served_by_another(
    protocol: str, stopped_replica: tuple[str, subprocess.Popen]
):
    url, process = stopped_replica
    async with FakeReplica() as good:
        where = {"replicas": f"{url},{good.url}", "routing": "round_robin", "metrics_urls": {}}
        more = {"first_token_timeout_s": 2.0, "breaker_failures": 1000, "probe_interval_s": 600.0}
        async with gateway(good, **where, **more) as running, ours(running) as client:
            await until(lambda: len(running.service.replicas.ready()) == 2)
            os.kill(process.pid, signal.SIGSTOP)

            async def one(number: int) -> None:
                if protocol == "grpc":
                    assert (await client.generate(f"p{number}", max_tokens=2).complete()).text == f" p{number}" * 2
                    return
                body = request_body(f"p{number}", stream=protocol == "stream")
                status, message = await post_text(running, body)
                assert status == 200 and f" p{number}" in message and '"error"' not in message

            await asyncio.gather(*(one(number) for number in range(6)))
            assert good.counts.started == 6
            stopped = next(one for one in running.service.replicas.all() if one.url == url)
            assert stopped.breaker.failures == 3 and stopped.work.outstanding == 0
            page = await running.metrics()
            assert page["trident_gateway_retries_total"] == 3
            assert running.service.admission.running == 0


async def post_text(running: Running, body: dict) -> tuple[int, str]:
    """(status, the answer's text, an event stream's included)."""
    async with aiohttp.ClientSession() as session:
        async with session.post(running.base_url + COMPLETIONS, json=body) as answer:
            return answer.status, await answer.text()


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize("retries", [0, 1, 2])
async def test_a_prompt_that_hangs_engines_hangs_few_of_them_and_says_how_many(protocol: str, retries: int):
    replicas = [FakeReplica(lambda seen: Script((" a",), stall_after=0)) for _ in range(5)]
    async with replicas[0], replicas[1], replicas[2], replicas[3], replicas[4]:
        more = {"first_token_timeout_s": 0.2, "idle_timeout_s": 0.4, "hang_retries": retries}
        async with gateway(*replicas, **more) as running, ours(running) as client:
            if protocol == "http":
                status, _, body = await running.post(COMPLETIONS, request_body())
                message = body["error"]["message"]
                assert status == 504
            else:
                with pytest.raises(DeadlineExceeded) as late:
                    await client.generate("x").complete()
                message = str(late.value)
            assert "silent" in message and (f"tried {retries + 1} times" in message) is bool(retries)
            assert sum(one.counts.started for one in replicas) == retries + 1
            await until(lambda: all(one.counts.running == 0 for one in replicas))


async def test_a_request_that_had_a_token_is_never_tried_elsewhere():
    script = Script((" a", " b"), stall_after=1)
    async with FakeReplica(lambda seen: script) as one, FakeReplica(lambda seen: script) as two:
        more = {"first_token_timeout_s": 2.0, "idle_timeout_s": 2.5}
        async with gateway(one, two, **more) as running, ours(running) as client:
            with pytest.raises(DeadlineExceeded, match="silent"):
                await client.generate("x").complete()
            assert one.counts.started + two.counts.started == 1


@pytest.mark.parametrize("protocol", ["http", "grpc"])
async def test_when_probes_take_a_replica_out_its_requests_without_a_token_move_on(protocol: str):
    async with FakeReplica(lambda seen: Script((" a",), stall_after=0)) as bad, FakeReplica() as good:
        more = {"routing": "round_robin", "probe_interval_s": 0.1, "first_token_timeout_s": 600.0}
        async with gateway(bad, good, idle_timeout_s=600.0, **more) as running, ours(running) as client:
            tasks = [
                asyncio.ensure_future(
                    running.post(COMPLETIONS, request_body(f"p{n}"))
                    if protocol == "http"
                    else client.generate(f"p{n}", max_tokens=2).complete()
                )
                for n in range(4)
            ]
            await until(lambda: bad.counts.running == 2 and good.counts.finished == 2)
            bad.ready = False
            await asyncio.gather(*tasks)
            assert good.counts.finished == 4 and bad.counts.running == 0


async def test_a_deep_probe_that_waits_behind_real_requests_takes_no_replica_out():
    script = {"The": Script((" t",), gate_at=0, gate=asyncio.Event()), "x": Script((" a",) * 10_000, gap_s=0.02)}
    async with FakeReplica() as replica:
        async with gateway(replica, deep_probes=True, probe_interval_s=600.0, probe_timeout_s=1.5) as running:
            replica.script = lambda seen: script[seen.value("text_input")]
            [one] = running.service.replicas.all()
            async with ours(running) as client, client.generate("x", max_tokens=10_000) as going:
                await going.__anext__()
                reading = asyncio.ensure_future(going.complete())
                await running.service.replicas._probe(one)
                assert one.health.healthy and one.health.run == 0
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)
            await until(lambda: not running.service.live)
            await running.service.replicas._probe(one)
            assert one.health.run == 1  # no stream had a token meanwhile: it failed
