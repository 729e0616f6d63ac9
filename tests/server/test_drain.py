"""The abort of streams; test_supervisor.py tests drains with a real server."""

import os
import socket

from server import drain


def test_an_abort_reaches_the_engines_control_socket_as_one_line():
    name = f"trident-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as engine:
        engine.bind(f"\0{name}")
        engine.settimeout(60)
        assert drain.abort(name, "the server is shutting down")
        assert engine.recv(4096) == b"abort the server is shutting down"


def test_an_abort_without_a_listening_engine_returns_false():
    assert not drain.abort(f"trident-test-none-{os.getpid()}", "why")
