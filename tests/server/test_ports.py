"""Ports: free, or refused with the process that holds them."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from contract.errors import InvalidArgument, Unavailable
from server import ports


def test_free_ports_differ_and_pass_the_check():
    found = ports.free(3)
    assert len(set(found)) == 3
    ports.check("127.0.0.1", dict(zip("abc", found, strict=True)))


def test_no_process_is_given_a_port_that_one_was_given_a_moment_ago(monkeypatch):
    """Of the 20 ports there are: 6 for this process, 6 for another, 8 for this one."""
    monkeypatch.setattr(ports, "UNUSED_BY_CLIENTS", (21_700, 21_720))
    first = ports.free(6)
    draw = (
        "from server import ports; ports.UNUSED_BY_CLIENTS = 21_700, 21_720; print(*ports.free(6), flush=True); input()"
    )
    root = Path(ports.__file__).parents[1]
    with subprocess.Popen(
        [sys.executable, "-c", draw], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=root
    ) as other:
        theirs = list(map(int, other.stdout.readline().split()))
        rest = ports.free(20)
        other.communicate(b"\n")
    assert len(set(first + theirs + rest)) == len(first + theirs + rest) and len(theirs) == 6
    assert set(ports.free(20)) == set(theirs)  # it ended
    monkeypatch.setattr(ports, "RESERVED_S", 0.0)
    assert set(ports.free(20)) >= set(first)


def test_a_busy_port_is_refused_with_its_variable_and_its_process():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(Unavailable) as refusal:
            ports.check("127.0.0.1", {"TRIDENT_HTTP_PORT": port})
    message = str(refusal.value)
    assert (
        f"port {port} on 127.0.0.1 is in use by process {os.getpid()} (" in message
        and "set TRIDENT_HTTP_PORT" in message
    )


def test_a_port_held_on_every_address_by_another_process_is_found():
    hold = (
        "import socket, sys; s = socket.create_server(('0.0.0.0', 0)); print(s.getsockname()[1], flush=True); input()"
    )
    with subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        port = int(holder.stdout.readline())
        with pytest.raises(Unavailable, match=rf"in use by process {holder.pid} \(.*create_server"):
            ports.check("127.0.0.1", {"TRIDENT_GRPC_PORT": port})
        holder.communicate(b"\n")
    ports.check("127.0.0.1", {"TRIDENT_GRPC_PORT": port})


def test_two_equal_ports_are_refused():
    with pytest.raises(InvalidArgument, match="TRIDENT_HTTP_PORT: must differ from TRIDENT_GRPC_PORT, got 8001"):
        ports.check("127.0.0.1", {"TRIDENT_GRPC_PORT": 8001, "TRIDENT_HTTP_PORT": 8001})


def test_an_address_of_another_machine_is_refused():
    with pytest.raises(InvalidArgument, match="TRIDENT_GRPC_PORT: must be a port to listen on, got 192.0.2.1"):
        ports.check("192.0.2.1", {"TRIDENT_GRPC_PORT": ports.free(1)[0]})


def test_a_claimed_port_is_refused_to_a_second_supervisor_until_released():
    (port,) = ports.free(1)
    with ports.claim(port):
        with pytest.raises(Unavailable, match=f"gRPC port {port} belongs to another supervisor"):
            ports.claim(port)
    ports.claim(port).close()
