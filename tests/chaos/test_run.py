"""A run as a whole: `make chaos` is its test; here what needs no fleet."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import psutil
import pytest

from chaos import run
from chaos.fleet import BUDGET_TOKENS, Fleet
from chaos.invariants import Record
from chaos.load import LEFT, PROMPTS, Outcome
from chaos.scenario import Fault
from server import ports


def test_a_process_that_is_gone_gets_no_signal():
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert not run._signal(ended.pid, signal.SIGKILL) and not run._signal(0, signal.SIGKILL)


async def test_a_fault_that_nothing_got_has_not_happened(tmp_path):
    fleet, record = Fleet(tmp_path), Record({}, 0, 0.0)
    fleet._add("gateway-2", ["sleep", "60"])
    fault = Fault(0.0, "kill.gateway", "gateway-2")
    try:
        for _ in range(2):  # the second time nothing is left
            await run._do(fleet, fault, 0.0, record)
            fleet.processes["gateway-2"].process.wait()
        assert [this.fault for this in record.happened] == [this.fault for this in record.missed] == [fault]
    finally:
        await fleet.close()


async def test_a_fault_that_envoy_did_not_take_has_not_happened(tmp_path, monkeypatch):
    fleet, record = Fleet(tmp_path), Record({}, 0, 0.0)
    fault = Fault(0.0, "envoy.abort", "replica-1", 0.1)
    for taken in ((True, True), (True, False), (False, True)):
        answers = iter(taken)

        async def set_envoy(*_: object, answers=answers) -> bool:
            return next(answers)

        monkeypatch.setattr(fleet, "set_envoy", set_envoy)
        await run._do(fleet, fault, 0.0, record)
    assert len(record.happened) == 1 and len(record.missed) == 2


async def test_a_fault_that_is_cancelled_leaves_no_process_stopped(tmp_path):
    fleet = Fleet(tmp_path)
    fleet._add("gateway-2", ["sleep", "60"])
    process = psutil.Process(fleet.processes["gateway-2"].pid)
    fault = Fault(0.0, "stop.gateway", "gateway-2", 60.0)
    doing = asyncio.create_task(run._do(fleet, fault, 0.0, Record({}, 0, 0.0)))
    try:
        await _until(lambda: process.status() == psutil.STATUS_STOPPED)
        doing.cancel()
        await asyncio.wait({doing})
        await _until(lambda: process.status() != psutil.STATUS_STOPPED)
    finally:
        await fleet.close()


async def _until(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.01)


# A run whose fleet is one program that a fault stops.
STOPPED = """
import signal, sys
from chaos import __main__, run
from chaos.fleet import BUDGET_TOKENS, Fleet
async def start(fleet):
    fleet._add("gateway-2", ["sleep", "600"])
async def observed(fleet, scenario):
    pid = fleet.processes["gateway-2"].pid
    run._signal(pid, signal.SIGSTOP)
    print("stopped", pid, flush=True)
    await run.asyncio.sleep(600)
Fleet.start, run._observed = start, observed
sys.exit(__main__.main(["--count", "1"]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 2])
def test_sigterm_closes_the_fleet(tmp_path, times: int):
    environ = os.environ | {"TMPDIR": str(tmp_path)}
    chaos = subprocess.Popen([sys.executable, "-c", STOPPED], stdout=subprocess.PIPE, text=True, env=environ)
    assert chaos.stdout is not None
    process = psutil.Process(next(int(line.split()[1]) for line in chaos.stdout if line.startswith("stopped")))
    for _ in range(times):
        chaos.send_signal(signal.SIGTERM)
    chaos.communicate(timeout=60)
    assert chaos.returncode == 143
    assert not process.is_running()


@pytest.mark.skipif(not shutil.which("redis-server"), reason="redis-server is not on PATH")
async def test_a_budget_that_redis_does_not_know_is_whole(tmp_path):
    from redis.asyncio import Redis

    [port] = ports.free(1)
    fleet, record = Fleet(tmp_path), Record({}, 0)
    fleet._add("redis", ["redis-server", "--port", str(port), "--save", "", "--dir", str(tmp_path)])
    try:
        await _until(lambda: b"Ready to accept" in (tmp_path / "redis.log").read_bytes())
        fleet.redis_url = f"redis://127.0.0.1:{port}/0"
        await run._read_redis(fleet, record)
        assert record.budgets == (0.0, 0.0)
        async with Redis.from_url(fleet.redis_url) as redis:
            await redis.hset(
                "trident:{metered}:tokens:metered/chaos", mapping={"balance": BUDGET_TOKENS - 9, "held": 2}
            )
        await run._read_redis(fleet, record)
        assert record.budgets == (7.0, 2.0)
    finally:
        await fleet.close()


def test_what_requests_used_is_in_the_gateways_logs(tmp_path):
    line = '{"message":"generation","request_id":"%s","duration_s":0.1'
    queued, line = line + "}", line + ',"input_tokens":3,"output_tokens":2}'
    reused = line.replace("generation", 'generation","reuse":"replay')
    lines = [line % "chaos-1", line % "chaos-2", line % "warm-4", queued % "chaos-5", reused % "chaos-6"]
    lines.append(line % "chaos-3")
    text = "\n".join(lines)[:-9]
    (tmp_path / "gateway-1.log").write_text(text)
    outcomes = [Outcome(PROMPTS[0], "http", "one", 0.0, error=LEFT, id=f"chaos-{number}") for number in (1, 3, 4, 5)]
    whole = [Outcome(PROMPTS[0], "http", "one", 0.0, id=f"chaos-{number}") for number in (2, 6)]
    assert run._read_logs(tmp_path, [*outcomes, *whole]) == []
    assert [(one.tokens, one.logged) for one in whole] == [(None, (3, 2)), (None, None)]
    assert [one.logged_s for one in whole] == [0.1, 0.0]
    assert [one.tokens for one in outcomes] == [(3, 2), None, None, (0, 0)]


@pytest.mark.slow
def test_the_command_shows_the_same_scenario_of_the_same_seed_and_refuses_what_it_cannot_read(tmp_path):
    def show(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "chaos", "--show", *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=os.getcwd())

    one, two = show("--seed", "7", "--count", "1"), show("--scenario", "/nowhere.chaos")
    assert one.stdout.startswith("seed 7\nduration 25\n") and one.returncode == 0
    assert two.returncode == 2 and "SCENARIO: must be a file" in two.stderr
    none = show("--scenario", str(tmp_path))
    assert none.returncode == 2 and "SCENARIO: must be a script or a folder of *.chaos files" in none.stderr


def test_lines_of_the_gateways_logs_that_tell_of_a_defect_are_found(tmp_path):
    line = '{"message":"unhandled exception in request chaos-1","exception":"Traceback\\n  File x\\nKeyError: 3"}'
    words = "coroutine 'read' was never awaited"
    (tmp_path / "gateway-2.log").write_text(f'{line}\n{{"message":"listening"}}\nRuntimeWarning: {words}\n')
    first, second = run._read_logs(tmp_path, [])
    assert first == "gateway-2: unhandled exception in request chaos-1: KeyError: 3"
    assert second == f"gateway-2: RuntimeWarning: {words}"


def test_when_a_gateway_counts_by_itself_is_in_its_log(tmp_path):
    line = '{"time":"%s.250Z","message":"the shared state does not answer, each gateway goes on by itself: timeout"}'
    at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(1_800_000_000))
    (tmp_path / "gateway-1.log").write_text(
        f'{line % at}\n{{"message":"the shared state answers again"}}\nRuntimeError'
    )
    [redis_late_s] = run._redis_late_s(tmp_path)
    assert redis_late_s == pytest.approx(1_800_000_000.25 + time.monotonic() - time.time(), abs=0.05)
