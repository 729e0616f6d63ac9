"""A conversation over standard input."""

from __future__ import annotations

import io
import json

import pytest

from clients import AsyncClient, chat, terminal
from tests.fakes.replica import replica_in_thread


@pytest.fixture
def typed(monkeypatch):
    def type_lines(*lines: str) -> None:
        monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines) + "\n"))

    return type_lines


def test_every_turn_sends_the_whole_history(typed, capsys):
    typed("one", "two")
    with replica_in_thread() as replica:
        client = AsyncClient(replica.url)
        assert chat.converse(client, "be brief", {"max_tokens": 2}, False) == terminal.OK
        histories = [json.loads(seen.value("messages")) for seen in replica.seen]
    assert [message["role"] for message in histories[0]] == ["system", "user"]
    assert [message["role"] for message in histories[1]] == ["system", "user", "assistant", "user"]


def test_reset_begins_anew_and_quit_ends(typed, capsys):
    typed("one", "/reset", "two", "/nonsense", "/quit", "three")
    with replica_in_thread() as replica:
        assert chat.converse(AsyncClient(replica.url), "", {"max_tokens": 2}, False) == terminal.OK
        assert [len(json.loads(seen.value("messages"))) for seen in replica.seen] == [1, 1]
    assert "no such command: /nonsense" in capsys.readouterr().err


def test_an_error_ends_a_conversation_that_is_not_interactive(typed, capsys, unused_tcp_port):
    typed("one")
    client = AsyncClient(f"127.0.0.1:{unused_tcp_port}")
    assert chat.converse(client, "", {"max_tokens": 2, "timeout_s": 30.0}, False) == 6
