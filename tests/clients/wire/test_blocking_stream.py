"""Streams for threads: the same rules as the asynchronous ones."""

from __future__ import annotations

import threading

import pytest

from clients import Client, RetryPolicy
from contract.errors import Cancelled, EngineFailed, Overloaded
from tests.fakes.replica import Script

ABC = ("a", "b", "c")
QUICK = RetryPolicy(attempts=4, base_s=0.001, cap_s=0.01)


def test_a_failure_before_the_first_token_is_retried_and_later_ones_are_not(threaded_replica, playlist):
    with Client(threaded_replica.url, retry=QUICK) as client:
        playlist.set(Script(refuse=Overloaded("full")), Script(ABC))
        stream = client.generate("x")
        assert [delta.text for delta in stream] == ["a", "b", "c"] and stream.attempts == 2
        playlist.set(Script(ABC, fail_after=1, error=EngineFailed("boom")), Script(ABC))
        stream = client.generate("x")
        assert next(stream).text == "a"
        with pytest.raises(EngineFailed, match="boom"):
            next(stream)
        assert stream.attempts == 1


def test_another_thread_cancels_a_stream_that_waits(threaded_replica, playlist):
    playlist.set(Script(ABC, stall_after=1))
    with Client(threaded_replica.url) as client:
        stream = client.generate("x")
        assert next(stream).text == "a"
        threading.Timer(0.05, stream.cancel).start()
        with pytest.raises(Cancelled):
            next(stream)


def test_a_cancel_while_the_request_is_being_sent_cancels_it(threaded_replica, playlist):
    playlist.set(Script(ABC, stall_after=1))
    with Client(threaded_replica.url) as client:
        stream = client.generate("x")
        send = stream._send

        def cancel_and_send(*arguments):
            stream.cancel()
            return send(*arguments)

        stream._send = cancel_and_send
        with pytest.raises(Cancelled):
            next(stream)


def test_leaving_the_block_cancels(threaded_replica, playlist):
    playlist.set(Script(ABC, stall_after=1))
    with Client(threaded_replica.url) as client:
        with client.generate("x") as stream:
            assert next(stream).text == "a"
        with pytest.raises(StopIteration):
            next(stream)
