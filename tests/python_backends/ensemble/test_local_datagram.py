import array
import os
import socket
import uuid

import pytest

from python_backends.ensemble import local_datagram
from tests.fakes import other_user


@pytest.fixture
def name():
    return f"trident-test-{uuid.uuid4()}"


@pytest.fixture
def bound(name):
    with local_datagram.bind(name) as bound:
        bound.settimeout(60)
        yield bound


def own_send(name, datagram, descriptors=()):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        sender.sendmsg([datagram], rights, 0, "\0" + name)


def test_our_own_datagrams_arrive_with_the_address_to_answer(name, bound):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.bind(f"\0{name}-sender")
        sender.sendto(b"hello", "\0" + name)
    assert local_datagram.receive(bound, 100) == (b"hello", f"\0{name}-sender".encode())


def test_a_datagram_of_another_user_is_not_received(name, bound):
    other_user.send(name, [b"from another user"])
    own_send(name, b"ours")
    assert local_datagram.receive(bound, 100) is None
    assert local_datagram.receive(bound, 100)[0] == b"ours"


def test_file_descriptors_that_come_along_are_not_kept(name, bound):
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        own_send(name, b"with files", [0, 1, 2])
        assert local_datagram.receive(bound, 100)[0] == b"with files"
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_name_in_use_is_refused_and_nothing_is_left_open(name, bound):
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="in use"):
        local_datagram.bind(name)
    assert len(os.listdir("/proc/self/fd")) == before
