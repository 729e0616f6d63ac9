import json
import os
import socket
import threading
import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.errors import InvalidArgument, Unavailable
from python_backends.ensemble import metadata_channel
from python_backends.ensemble.metadata_channel import MetadataListener, MetadataSender, StreamMetadata
from tests.fakes import other_user

METADATA = StreamMetadata("id-1", '{"stop": ["é"]}', max_tokens=10, num_input_tokens=3, end_ids=(2, 5))


@pytest.fixture
def name():
    return f"trident-test-{uuid.uuid4()}"


@pytest.fixture
def sender(name, monkeypatch):
    monkeypatch.setattr(
        metadata_channel, "_REPLY_TIMEOUT_S", 60.0
    )  # the detokenizer's thread has its turn when it has it
    sender = MetadataSender(name)
    yield sender
    sender.close()


class Table:
    """Ids that are taken, as the detokenizer keeps them."""

    def __init__(self):
        self.known = {}

    def __call__(self, metadata):
        free = metadata.request_id not in self.known
        self.known.setdefault(metadata.request_id, metadata)
        return free


@pytest.fixture
def table(name):
    table = Table()
    box = MetadataListener(name, table)
    yield table
    box.close()


@given(st.text(max_size=30), st.text(), st.integers(1), st.integers(1), st.lists(st.integers(0)).map(tuple))
def test_a_letter_survives_its_datagram(request_id, options, max_tokens, num_input_tokens, end_ids):
    metadata = StreamMetadata(request_id, options, max_tokens, num_input_tokens, end_ids)
    assert StreamMetadata.decode(metadata.encode()) == metadata


def test_a_posted_letter_has_arrived_when_post_returns(sender, table):
    sender.post(METADATA)
    assert table.known == {"id-1": METADATA}


def test_an_id_in_use_is_refused_by_name(sender, table):
    sender.post(METADATA)
    with pytest.raises(InvalidArgument, match="request_id: must be unique .* got one in use"):
        sender.post(METADATA)


@pytest.mark.parametrize(
    ("request_id", "problem"),
    [
        ("", "must be unique"),
        ("x" * 257, "must have 1 to 256 bytes, got 257"),
        ("é" * 129, "must have 1 to 256 bytes, got 258"),
    ],
)
def test_an_id_that_cannot_name_a_stream_is_refused(sender, table, request_id, problem):
    with pytest.raises(InvalidArgument, match=f"request_id: {problem}"):
        sender.post(StreamMetadata(request_id, "", 1, 1, ()))
    assert not table.known


def test_options_too_large_for_a_datagram_are_refused(sender, table):
    with pytest.raises(InvalidArgument, match="stop_words: must take at most .* bytes"):
        sender.post(StreamMetadata("id", "x" * 200_000, 1, 1, ()))


def test_the_largest_options_arrive(sender, table):
    sender.post(StreamMetadata("id", "x" * 179_000, 1, 1, ()))
    assert len(table.known["id"].options) == 179_000


def test_without_a_detokenizer_the_request_is_refused_for_now(sender):
    with pytest.raises(Unavailable, match="the detokenizer does not answer"):
        sender.post(METADATA)


def test_a_reply_that_came_too_late_is_not_taken_for_the_next_one(name, monkeypatch):
    monkeypatch.setattr(metadata_channel, "_REPLY_TIMEOUT_S", 0.05)
    released = threading.Event()
    box = MetadataListener(name, lambda metadata: metadata.request_id != "slow" or not released.wait(60))
    sender = MetadataSender(name)
    with pytest.raises(Unavailable):
        sender.post(StreamMetadata("slow", "", 1, 1, ()))
    released.set()
    monkeypatch.setattr(metadata_channel, "_REPLY_TIMEOUT_S", 60.0)
    sender.post(StreamMetadata("next", "", 1, 1, ()))  # the reply to "slow", a refusal, comes first
    sender.close()
    box.close()


def test_what_is_read_after_its_sender_gave_up_opens_no_stream(name, monkeypatch):
    monkeypatch.setattr(metadata_channel, "_REPLY_TIMEOUT_S", 0.05)
    read, reading, released = [], threading.Event(), threading.Event()

    def accept(metadata):
        read.append(metadata.request_id)
        reading.set()
        return released.wait(60)

    box, sender = MetadataListener(name, accept), MetadataSender(name)
    sender._socket.sendto(StreamMetadata("slow", "", 1, 1, ()).encode(), "\0" + name)
    assert reading.wait(60)
    with pytest.raises(Unavailable):
        sender.post(StreamMetadata("late", "", 1, 1, ()))
    released.set()
    monkeypatch.setattr(metadata_channel, "_REPLY_TIMEOUT_S", 60.0)
    sender.post(StreamMetadata("next", "", 1, 1, ()))
    sender.close()
    box.close()
    assert read == ["slow", "next"]


def test_hostile_datagrams_are_skipped(name, sender, table):
    hostile = [
        b"",
        b"\xff\xfe",
        b"[" * 100_000,
        b"[]",
        b"{}",
        b'{"end_ids": 5}',
        json.dumps(
            {"request_id": ["x"], "options": "", "max_tokens": 1, "num_input_tokens": 1, "end_ids": []}
        ).encode(),
        json.dumps({"request_id": "x", "options": "", "max_tokens": 1, "end_ids": []}).encode(),
    ]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        for datagram in hostile:
            stranger.sendto(datagram, "\0" + name)
    sender.post(METADATA)
    assert table.known == {"id-1": METADATA}


def test_another_user_of_the_machine_can_take_no_id(name, sender, table):
    other_user.send(name, [StreamMetadata("taken", "", 1, 1, ()).encode()])
    sender.post(METADATA)
    assert table.known == {"id-1": METADATA}


def test_another_user_of_the_machine_can_refuse_no_id(name, sender, table):
    forged = json.dumps({"request_id": METADATA.request_id, "accepted": False}).encode()
    other_user.send(f"{name}-reply-{os.getpid()}", [forged] * 3)
    sender.post(METADATA)
    assert table.known == {"id-1": METADATA}


def test_a_closed_listener_frees_its_name(name, sender):
    for _ in range(3):
        box = MetadataListener(name, Table())
        sender.post(METADATA)
        box.close()
