"""Detection of stubs and servers that hang. Real processes send the listener."""

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

from server.hang_detection import HeartbeatListener, HttpWatch
from server.settings import ROOT
from server.stubs import Stub

TIMEOUT_S = 60.0
STALL_S = 3.0  # more than the 1.5 s that one look adds at most after a pause of the watcher
STUB = """
import os, sys, time
from python_backends.heartbeat import Heartbeat
heartbeat = Heartbeat(sys.argv[1], period_s=0.05)
exec(sys.argv[2])
"""


@pytest.fixture
def control():
    return f"trident-test-{uuid.uuid4()}"


@pytest.fixture
def start_stub(control):
    """``start_stub(code)``: a process that sends listener while it runs ``code``, as a stub."""
    started = []

    def start(code):
        command = [sys.executable, "-c", STUB, f"{control}-supervisor", code]
        started.append(subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}))
        return Stub(started[-1].pid, "tokenizer", "tokenizer_0_0", 1)

    yield start
    for process in started:
        process.kill()
        process.wait()


async def until(condition):
    deadline_s = time.monotonic() + TIMEOUT_S
    while not (result := condition()):
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.05)
    return result


def watch(control, stub, script):
    """Run ``script(listener)`` once ``stub`` has sent a heartbeat."""

    async def run():
        listener = HeartbeatListener(control, STALL_S, 60.0, lambda pid, reason: None)
        try:
            await until(lambda: listener.hung([stub]) == [] and stub.pid in listener.received)
            await script(listener)
        finally:
            listener.close()

    asyncio.run(run())


@pytest.mark.slow
def test_a_stopped_stub_is_hung_and_one_that_continues_soon_is_not(control, start_stub):
    stub = start_stub("time.sleep(600)")

    async def script(listener):
        os.kill(stub.pid, signal.SIGSTOP)
        end_s = time.monotonic() + STALL_S / 3
        while time.monotonic() < end_s:
            assert listener.hung([stub]) == []
            await asyncio.sleep(0.05)
        os.kill(stub.pid, signal.SIGCONT)
        beats = listener.received[stub.pid]
        await until(lambda: listener.received[stub.pid] > beats + 3)
        assert listener.hung([stub]) == []
        os.kill(stub.pid, signal.SIGSTOP)
        [(found, reason)] = await until(lambda: listener.hung([stub]))
        assert found == stub and reason.startswith("no heartbeat: no progress and no CPU use for ")

    watch(control, stub, script)


@pytest.mark.slow
def test_a_call_that_waits_without_end_is_a_hang_and_one_that_computes_is_not(control, start_stub):
    stuck, busy = start_stub("with heartbeat: time.sleep(600)"), start_stub("with heartbeat:\n while True: pass")

    async def script(listener):
        await until(lambda: busy.pid in listener.received)
        [(found, reason)] = await until(lambda: listener.hung([stuck, busy]))
        assert found == stuck and reason.startswith("a call does not end: ")

    watch(control, stuck, script)


def test_a_stub_that_was_unloaded_need_not_send_heartbeats(control, start_stub, tmp_path):
    unload = tmp_path / "unload"
    code = f"while not os.path.exists({str(unload)!r}): time.sleep(0.02)"
    stub = start_stub(f"{code}\nheartbeat.close()\ntime.sleep(600)")

    async def script(listener):
        unload.touch()
        await until(lambda: stub.pid not in listener.received)
        assert listener.hung([stub]) == []

    watch(control, stub, script)


def test_a_hung_engine_is_reported_with_the_pid_of_its_stub(control, start_stub):
    stub = start_stub("time.sleep(0.2); heartbeat.engine_hung('no step for 7 s'); time.sleep(600)")
    reported = []

    async def run():
        listener = HeartbeatListener(control, STALL_S, 60.0, lambda pid, reason: reported.append((pid, reason)))
        await until(lambda: reported)
        listener.close()

    asyncio.run(run())
    assert reported[0] == (stub.pid, "no step for 7 s")


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args):
        pass


@pytest.mark.slow
def test_a_server_that_accepts_and_never_answers_is_hung_and_one_that_answers_is_not():
    # An idle process has the CPU use of a hung tritonserver; the backlog of the listening socket accepts connections.
    idle = subprocess.Popen(["sleep", "600"])
    server = HTTPServer(("127.0.0.1", 0), Handler)
    url = f"http://127.0.0.1:{server.server_port}"

    async def run():
        serving = Thread(target=server.serve_forever, daemon=True)
        serving.start()
        watch = HttpWatch(url, idle.pid, STALL_S, 60.0)
        task = asyncio.create_task(watch.poll())
        end_s = time.monotonic() + 2 * STALL_S
        while time.monotonic() < end_s:
            assert watch.problem() == "" and not watch.is_silent
            await asyncio.sleep(0.1)
        server.shutdown()
        assert await until(lambda: watch.problem() or watch.is_silent) is True  # before it counts as hung
        assert "no progress" in await until(watch.problem)
        task.cancel()

    try:
        asyncio.run(run())
    finally:
        server.server_close()
        idle.kill()
        idle.wait()
