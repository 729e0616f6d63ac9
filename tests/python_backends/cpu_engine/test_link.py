import os
import pickle
import re
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from socket import socketpair

import numpy as np
import pytest

from contract.generation import SamplingParams
from contract.watchdog import Watchdog
from python_backends.cpu_engine.link import WorkerLink
from python_backends.ensemble.worker_messages import AddSequence, Ready, StepReport

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]


class Listener:
    def __init__(self, on_report=lambda report: None):
        self._changed = threading.Condition()
        self.heard, self.deaths, self._on_report = [], [], on_report

    def _hear(self, what):
        with self._changed:
            self.heard.append(what)
            self._changed.notify_all()

    def on_ready(self):
        self._hear("ready")

    def on_report(self, report):
        self._on_report(report)
        self._hear("report")

    def on_death(self, reason):
        self.deaths.append(reason)
        self._hear("death")

    def wait_for(self, what):
        with self._changed:
            assert self._changed.wait_for(lambda: what in self.heard, timeout=60), self.heard


@pytest.fixture
def open_link(triton, tiny_engine):
    links = []

    def make(folder=tiny_engine, **options):
        listener = Listener(**options)
        links.append(WorkerLink(folder, listener))
        return links[-1], listener

    yield make
    for link in links:
        link.close()
        link._listener.wait_for("death")


def pid(link):
    return link._process.pid


def endless(id=1):
    return AddSequence(id, np.array([1, 2, 3], np.int64), 250, SamplingParams(top_k=1), frozenset())


def test_a_worker_outlives_a_ctrl_c_and_its_death_is_told_once_and_last(open_link):
    link, listener = open_link()
    listener.wait_for("ready")
    os.kill(pid(link), signal.SIGINT)  # goes to every process of a terminal; the server drains first
    link.send(endless())
    listener.wait_for("report")
    os.kill(pid(link), signal.SIGKILL)
    listener.wait_for("death")
    link.send(endless(2))  # no receiver: silent
    link.close()
    time.sleep(0.05)
    assert listener.deaths == ["the engine process was killed by signal 9"] and listener.heard[-1] == "death"


def test_a_worker_that_cannot_load_says_why(open_link, tiny_engine, tmp_path, capfd):
    broken = tmp_path / "engine"
    shutil.copytree(tiny_engine, broken)
    (broken / "openvino_model.xml").write_text("<broken")
    _, listener = open_link(broken)
    listener.wait_for("death")
    [reason] = listener.deaths
    assert reason.startswith("the engine process ended with code 1: ") and len(reason) > 45 and "\n" not in reason
    assert "ready" not in listener.heard


@pytest.fixture
def stand_in(monkeypatch):
    """``stand_in(code)``: what runs instead of the worker from now on; its connection's descriptor is ``fd``."""
    real = subprocess.Popen

    def use(code):
        def start(args, **options):
            return real([args[0], "-c", f"import os, time; fd = {args[3]}; {code}"], **options)

        monkeypatch.setattr(subprocess, "Popen", start)

    return use


def test_a_listener_that_fails_ends_the_worker_instead_of_leaving_it_unheard(open_link, stand_in):
    message = pickle.dumps(StepReport(0, 0))
    stand_in(f"os.write(fd, {struct.pack('!i', len(message)) + message!r}); time.sleep(600)")

    def fail(report):
        raise KeyError("unknown stream")

    _, listener = open_link(on_report=fail)
    listener.wait_for("death")
    assert listener.deaths == [
        "the engine process was killed by signal 9: its report could not be processed: KeyError('unknown stream')"
    ]


def test_a_message_cut_off_by_a_death_is_a_death(open_link, stand_in):
    stand_in("os.write(fd, b'\\0\\0\\1\\0half')")
    _, listener = open_link()
    listener.wait_for("death")
    assert listener.deaths == ["the engine process ended with code 0"]


def test_commands_never_wait_for_a_worker_in_a_long_step(open_link, stand_in):
    stand_in("time.sleep(600)")
    link, _ = open_link()
    big = AddSequence(1, np.zeros(1_000_000, np.int64), 1, SamplingParams(), frozenset())  # more than a socket holds
    for _ in range(5):
        link.send(big)


def start_worker(engine_dir):
    ours, theirs = socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "python_backends.cpu_engine.worker", str(theirs.fileno()), str(engine_dir)],
            pass_fds=[theirs.fileno()],
            cwd=ROOT,
        )
    return process, Connection(ours.detach())


def test_a_worker_whose_owner_is_gone_ends_quietly_also_in_the_middle_of_a_sequence(tiny_engine, capfd):
    process, connection = start_worker(tiny_engine)
    assert isinstance(connection.recv(), Ready)
    connection.send(endless())
    connection.recv()
    connection.close()
    assert process.wait(timeout=60) == 0
    assert "Traceback" not in capfd.readouterr().err


def test_a_worker_whose_owner_left_before_it_was_loaded_ends_too(tiny_engine):
    process, connection = start_worker(tiny_engine)
    connection.close()
    assert process.wait(timeout=60) == 0


@pytest.fixture
def watched(triton, tiny_engine):
    """A link that takes a worker for hung after a second, and what it said of hangs."""
    links = []

    def make(stall_s=1.0, limit_s=60.0):
        listener, hangs = Listener(), []
        links.append((WorkerLink(tiny_engine, listener, Watchdog(stall_s, limit_s), hangs.append), listener))
        return *links[-1], hangs

    yield make
    for link, listener in links:
        link.close()
        listener.wait_for("death")


def test_a_worker_that_stands_still_with_work_to_do_is_killed_and_the_hang_is_told(watched):
    link, listener, hangs = watched()
    listener.wait_for("ready")
    link.send(endless())
    listener.wait_for("report")
    os.kill(pid(link), signal.SIGSTOP)
    link.send(endless(2))
    listener.wait_for("death")
    [death] = listener.deaths
    assert re.fullmatch(
        r"the engine process hung with [12] requests \(no progress and no CPU use.*\) and was killed", death
    )
    deadline_s = time.monotonic() + 60
    while not hangs:  # told after the listener has dealt with the death
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    assert hangs == [death]


def test_a_worker_without_work_is_not_expected_to_step(watched):
    link, listener, hangs = watched()
    listener.wait_for("ready")
    os.kill(pid(link), signal.SIGSTOP)
    time.sleep(2.5)
    os.kill(pid(link), signal.SIGCONT)
    link.send(endless())
    listener.wait_for("report")
    assert not listener.deaths and not hangs


def test_a_worker_in_one_long_step_that_computes_is_left_alone_until_the_limit(watched, stand_in):
    ready, message = pickle.dumps(Ready()), pickle.dumps(StepReport(0, 0))
    send = "os.write(fd, {!r})"
    frames = [struct.pack("!i", len(text)) + text for text in (ready, message)]
    compute = "end = time.process_time() + 2\nwhile time.process_time() < end: pass\n"
    stand_in(f"\n{send.format(frames[0])}\n{compute}{send.format(frames[1])}\nwhile True: pass")
    link, listener, hangs = watched(stall_s=1.0, limit_s=10.0)
    listener.wait_for("ready")
    link.send(endless())
    listener.wait_for("report")  # 2 s of CPU in a step: twice the stall time
    assert not listener.deaths and not hangs
    listener.wait_for("death")  # the next step never ends
    assert "although it uses CPU" in listener.deaths[0]
