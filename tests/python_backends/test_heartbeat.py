"""What a stub says of itself, heard on the supervisor's socket."""

import socket
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
