"""Stubs and servers that exist and do nothing, told from those that are alive. Real processes send the heartbeats."""

import asyncio
import os
import signal
import subprocess
import sys
import time
import uuid
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

from server.liveness import Heartbeats, Responding
from server.settings import ROOT
from server.stubs import Stub

PATIENCE_S = 60.0
STALL_S = 1.5
BEATING = """
import sys, time
from python_backends.heartbeat import Heartbeat
heartbeat = Heartbeat(sys.argv[1], period_s=0.05)
exec(sys.argv[2])
"""


@pytest.fixture
def control():
    return f"trident-test-{uuid.uuid4()}"


@pytest.fixture
def beating(control):
    """``beating(code)``: a process that beats while it runs ``code``, as a stub."""
    started = []

    def start(code):
        command = [sys.executable, "-c", BEATING, f"{control}-supervisor", code]
        started.append(subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}))
        return Stub(started[-1].pid, "tokenizer", "tokenizer_0_0", 1)

    yield start
    for process in started:
        process.kill()
        process.wait()


async def until(happened):
    deadline_s = time.monotonic() + PATIENCE_S
    while not (found := happened()):
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.05)
    return found


def watch(control, stub, script):
    """Runs ``script(heartbeats)`` with the heartbeats of ``stub``; returns what was said of hung engines."""
    said = []

    async def run():
        heartbeats = Heartbeats(control, STALL_S, 60.0, lambda pid, reason: said.append((pid, reason)))
        try:
            await until(lambda: heartbeats.hung([stub]) == [] and stub.pid in heartbeats._pulses)
            await script(heartbeats)
        finally:
            heartbeats.close()

    asyncio.run(run())
    return said


def test_a_stopped_stub_is_hung_and_one_that_goes_on_soon_is_not(control, beating):
    stub = beating("time.sleep(600)")

    async def script(heartbeats):
        os.kill(stub.pid, signal.SIGSTOP)
        end_s = time.monotonic() + STALL_S / 3
        while time.monotonic() < end_s:
            assert heartbeats.hung([stub]) == []
            await asyncio.sleep(0.05)
        os.kill(stub.pid, signal.SIGCONT)
        beats = heartbeats._pulses[stub.pid].beats
        await until(lambda: heartbeats._pulses[stub.pid].beats > beats + 3)
        assert heartbeats.hung([stub]) == []
        os.kill(stub.pid, signal.SIGSTOP)
        [(found, reason)] = await until(lambda: heartbeats.hung([stub]))
        assert found == stub and reason.startswith("no heartbeat: no progress and no CPU use for ")

    watch(control, stub, script)


def test_a_call_that_waits_for_ever_is_a_hang_and_one_that_computes_is_not(control, beating):
    stuck, busy = beating("with heartbeat: time.sleep(600)"), beating("with heartbeat:\n while True: pass")

    async def script(heartbeats):
        await until(lambda: busy.pid in heartbeats._pulses)
        [(found, reason)] = await until(lambda: heartbeats.hung([stuck, busy]))
        assert found == stuck and reason.startswith("a call does not end: ")

    watch(control, stuck, script)


def test_a_stub_that_was_unloaded_is_no_longer_expected_to_beat(control, beating):
    stub = beating("heartbeat.close(); time.sleep(600)")

    async def script(heartbeats):
        await until(lambda: stub.pid not in heartbeats._pulses)
        assert heartbeats.hung([stub]) == []

    async def run():
        heartbeats = Heartbeats(control, STALL_S, 60.0, lambda pid, reason: None)
        await script(heartbeats)
        heartbeats.close()

    asyncio.run(run())


def test_a_hung_engine_is_passed_on_with_its_stubs_pid(control, beating):
    stub = beating("time.sleep(0.2); heartbeat.engine_hung('no step for 7 s'); time.sleep(600)")
    heard = []

    async def run():
        heartbeats = Heartbeats(control, STALL_S, 60.0, lambda pid, reason: heard.append((pid, reason)))
        await until(lambda: heard)
        heartbeats.close()

    asyncio.run(run())
    assert heard[0] == (stub.pid, "no step for 7 s")


class Answer(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def log_message(self, *words):
        pass


def test_a_server_that_accepts_and_never_answers_is_hung_and_one_that_answers_is_not():
    # An idle process stands for a tritonserver that uses no CPU; the listening socket's backlog accepts for it.
    idle = subprocess.Popen(["sleep", "600"])
    server = HTTPServer(("127.0.0.1", 0), Answer)
    url = f"http://127.0.0.1:{server.server_port}"

    async def run():
        answering = Thread(target=server.serve_forever, daemon=True)
        answering.start()
        responding = Responding(url, idle.pid, STALL_S, 60.0)
        task = asyncio.create_task(responding.watch())
        end_s = time.monotonic() + 2 * STALL_S
        while time.monotonic() < end_s:
            assert responding.problem() == ""
            await asyncio.sleep(0.1)
        server.shutdown()
        assert "no progress" in await until(responding.problem)
        task.cancel()

    try:
        asyncio.run(run())
    finally:
        server.server_close()
        idle.kill()
        idle.wait()
