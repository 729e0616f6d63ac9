"""What a stub says of itself, heard on the supervisor's socket."""

import signal
import socket
import subprocess
import sys
import time
import uuid

import pytest

from python_backends.heartbeat import Heartbeat


@pytest.fixture
def supervisor():
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bound:
        bound.settimeout(60)
        name = f"trident-test-{uuid.uuid4()}"
        bound.bind("\0" + name)
        yield name, bound


def hear(bound, wanted, most=1000):
    """Datagrams up to the first that is ``wanted``."""
    heard = []
    while not heard or heard[-1] != wanted:
        assert len(heard) < most, heard[-5:]
        heard.append(bound.recv(4096).decode())
    return heard


def test_beats_say_how_many_calls_there_were_and_whether_one_is_under_way(supervisor):
    name, bound = supervisor
    heartbeat = Heartbeat(name, period_s=0.01)
    hear(bound, "beat 0 0")
    with heartbeat:
        hear(bound, "beat 1 1")
    hear(bound, "beat 1 0")
    with pytest.raises(KeyError), heartbeat:
        raise KeyError
    hear(bound, "beat 2 0")
    heartbeat.close()
    assert hear(bound, "end")
    bound.setblocking(False)
    with pytest.raises(BlockingIOError):
        bound.recv(4096)


def test_a_hang_of_the_engine_is_said_until_it_is_heard(supervisor):
    name, bound = supervisor
    heartbeat = Heartbeat(name, period_s=0.01)
    heartbeat.engine_hung("no step")
    for _ in range(3):
        hear(bound, "engine_hung no step")
    heartbeat.close()


def test_without_a_supervisor_it_is_silent():
    heartbeat = Heartbeat(f"trident-test-{uuid.uuid4()}", period_s=0.001)
    with heartbeat:
        heartbeat.engine_hung("no receiver")
    heartbeat.close()


CALL = """
import sys, time
from python_backends.heartbeat import Heartbeat
heartbeat = Heartbeat("trident-test-nobody")
if sys.argv[1] == "between":
    print("ready", flush=True)
    time.sleep(3)
with heartbeat:
    if sys.argv[1] == "within":
        print("ready", flush=True)
    time.sleep(3 if sys.argv[1] == "within" else 0)
with heartbeat:
    print("called again", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pause_s", "when", "ends"), [(1.5, "within", True), (0.3, "within", False), (1.5, "between", False)]
)
def test_a_stub_that_stood_still_within_a_call_ends_before_the_next(pause_s, when, ends):
    """Triton has given the call up and would take its answer for the next one's."""
    process = subprocess.Popen([sys.executable, "-c", CALL, when], stdout=-1, stderr=-1, text=True)
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.6)  # the process ticks four times a second
    process.send_signal(signal.SIGSTOP)
    time.sleep(pause_s)
    process.send_signal(signal.SIGCONT)
    out, log = process.communicate(timeout=60)
    assert (process.returncode, out) == ((1, "") if ends else (0, "called again\n"))
    assert ("did not run for a second within a call" in log) == ends
