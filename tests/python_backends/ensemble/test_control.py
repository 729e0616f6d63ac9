import os
import socket
import threading
import time
import uuid

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from python_backends.ensemble.control import ControlListener, ControlMessage, ControlSender, Verb
from tests.fakes import other_user

numbers = st.integers(0, 2**63 - 1)


class Heard:
    """What a listener heard, and a way to wait for so many messages."""

    def __init__(self):
        self.messages, self._changed = [], threading.Condition()

    def __call__(self, message):
        with self._changed:
            self.messages.append(message)
            self._changed.notify_all()

    def wait_for(self, count):
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.messages) >= count, timeout=60), self.messages
        return self.messages


@pytest.fixture
def name():
    return f"trident-test-{uuid.uuid4()}"


@pytest.fixture
def heard(name):
    heard = Heard()
    listener = ControlListener(name, heard)
    yield heard
    listener.close()


def raw_send(name, *datagrams):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        for datagram in datagrams:
            sender.sendto(datagram, "\0" + name)


@given(st.sampled_from([Verb.CANCEL, Verb.STOP]), numbers, numbers)
def test_a_message_about_a_stream_survives_its_encoding(verb, epoch, key):
    message = ControlMessage(verb, epoch, key)
    assert ControlMessage.decode(message.encode()) == message


@given(st.text(max_size=200))
def test_an_abort_keeps_its_reason(reason):
    assert ControlMessage.decode(f"abort {reason}".encode()) == ControlMessage(Verb.ABORT, reason=reason)


@given(st.binary(max_size=100))
@example(b"cancel")
@example(b"cancel 1")
@example(b"cancel 1 2 3")
@example(b"cancel one 2")
@example(b"\xff\xfe")
@example(b"")
def test_any_datagram_is_one_of_ours_or_a_value_error(datagram):
    try:
        message = ControlMessage.decode(datagram)
    except ValueError:
        return
    assert isinstance(message.verb, Verb)


def test_messages_arrive_in_order(name, heard):
    sent = [ControlMessage(Verb.CANCEL, 7, key) for key in range(100)]
    sender = ControlSender(name)
    give_up_s = time.monotonic() + 60
    for message in sent:  # far more than the kernel's queue holds
        while not sender.send(message):  # the listener has not had its turn
            assert time.monotonic() < give_up_s
    sender.close()
    assert heard.wait_for(len(sent)) == sent


def test_hostile_datagrams_are_skipped_and_the_next_message_is_heard(name, heard):
    raw_send(
        name, b"", b"\xff" * 4096, b"cancel -1", b"cancel 1 2 3", b"shutdown now", b"stop \x00 1", os.urandom(2000)
    )
    raw_send(name, b"x" * 100_000)  # longer than any of ours
    raw_send(name, b"stop 3 4")
    assert heard.wait_for(1) == [ControlMessage(Verb.STOP, 3, 4)]


def test_another_user_of_the_machine_can_end_no_stream(name, heard):
    other_user.send(name, [b"cancel 3 4", b"abort the server is shutting down"])
    raw_send(name, b"stop 3 4")
    assert heard.wait_for(1) == [ControlMessage(Verb.STOP, 3, 4)]


def test_sending_without_a_receiver_says_so_and_does_not_raise(name):
    sender = ControlSender(name)
    assert sender.send(ControlMessage(Verb.CANCEL, 1, 2)) is False
    sender.close()


def test_a_listener_that_hangs_costs_the_sender_a_refusal_and_closes_all_the_same(name):
    release, started = threading.Event(), threading.Event()

    def slow(message):
        started.set()
        release.wait(60)

    listener = ControlListener(name, slow)
    sender = ControlSender(name)
    sender.send(ControlMessage(Verb.CANCEL, 1, 0))
    assert started.wait(60)
    while sender.send(ControlMessage(Verb.CANCEL, 1, 1)):
        pass
    release.set()
    listener.close()
    assert sender.send(ControlMessage(Verb.CANCEL, 1, 2)) is False
    sender.close()


def test_a_closed_listener_frees_its_name(name):
    for _ in range(3):
        heard = Heard()
        listener = ControlListener(name, heard)
        raw_send(name, b"cancel 1 2")
        heard.wait_for(1)
        listener.close()


def test_two_engines_cannot_have_one_control_socket(name, heard):
    with pytest.raises(OSError, match="in use"):
        ControlListener(name, Heard())
