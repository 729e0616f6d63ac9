"""A process that hangs says where its threads stand."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from contract import thread_dump

WRITES = """
import sys, threading, time
from contract import thread_dump
def stands_still(): time.sleep(60)
threading.Thread(target=stands_still, daemon=True).start()
thread_dump.write_on_signal()
print("ready", flush=True)
10 ** 10 ** 9 if sys.argv[1] == "busy" else time.sleep(60)
"""

WRITES_ITS_OWN = """
import threading
from contract import thread_dump
def recurse(n): return n and recurse(n - 1)
def busy():
    while True: recurse(20)
def starts_threads():
    while True:
        thread = threading.Thread(target=recurse, args=(20,))
        thread.start()
        thread.join()
for run in (busy, starts_threads): threading.Thread(target=run, daemon=True).start()
for _ in range(1000): thread_dump.write()
"""


@pytest.fixture
def started():
    running = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        running.append(subprocess.Popen([sys.executable, "-c", *arguments], text=True, **pipes))
        assert running[-1].stdout.readline() == "ready\n"
        return running[-1]

    yield start
    for process in running:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("how", ["idle", "busy"])  # busy: in one instruction, with the interpreter lock held
def test_the_stacks_of_all_threads_are_written_and_the_process_lives_on(started, how):
    process = started(WRITES, how)
    time.sleep(0.2)
    assert thread_dump.request(process.pid)
    lines = [process.stderr.readline()]
    while "<module>" not in lines[-1]:
        lines.append(process.stderr.readline())
    assert sum("thread 0x" in line.lower() for line in lines) == 2
    assert any("in stands_still" in line for line in lines)
    assert process.poll() is None


def test_a_process_that_the_signal_would_end_gets_none(started):
    process = started("import time; print('ready', flush=True); time.sleep(60)")
    assert not thread_dump.request(process.pid)
    time.sleep(0.2)
    assert process.poll() is None


def test_a_process_that_has_ended_gets_none():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert not thread_dump.request(process.pid)


def test_a_process_whose_threads_run_writes_its_own_stacks_unharmed():
    """The handler of a signal would crash it: it reads the frames of threads that run meanwhile."""
    done = subprocess.run([sys.executable, "-c", WRITES_ITS_OWN], stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 0 and done.stderr.count("in busy") == 1000
