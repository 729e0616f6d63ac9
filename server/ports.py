"""The three ports: checked before anything starts, with an error that names the port and the process that holds it."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shlex
import socket
import time

import psutil

from contract import interpreter
from contract.errors import InvalidArgument, Unavailable

MAX_COMMAND_CHARS = 100
UNUSED_BY_CLIENTS = 10240, 32768  # Linux takes ports of outgoing connections from 32768 on
RESERVED_S = 60.0  # a server listens on a free port by then
_reserved: list[tuple[float, int]] = []  # since when, and the descriptor of a socket that stands for the port


def check(host: str, ports: dict[str, int]) -> None:
    """Check that ports, by variable, can be bound. Raises Unavailable: one is in use; InvalidArgument: it is wrong."""
    seen: dict[int, str] = {}
    for variable, port in ports.items():
        if port in seen:
            raise InvalidArgument(variable, f"must differ from {seen[port]}, got {port} for both")
        seen[port] = variable
    for variable, port in ports.items():
        try:
            socket.create_server((host, port)).close()
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise Unavailable(
                    f"port {port} on {host} is in use{_by_process(port)}; stop that or set {variable} to another port"
                ) from error
            problem = f"must be a port to listen on, got {host}:{port}: {os.strerror(error.errno or 0)}"
            raise InvalidArgument(variable, problem) from error


def claim(grpc_port: int) -> socket.socket:
    """Claim ``grpc_port`` for this supervisor for as long as the returned socket is open.

    A supervisor that restarts its server holds no port; the claim keeps a second supervisor away meanwhile.
    Raises Unavailable: another supervisor has the port.
    """
    try:
        return _named(f"trident-supervisor-{grpc_port}")
    except OSError as error:
        raise Unavailable(
            f"gRPC port {grpc_port} belongs to another supervisor ({interpreter.command()} -m server status); "
            "set TRIDENT_GRPC_PORT to another port"
        ) from error


def free(count: int, host: str = "127.0.0.1") -> list[int]:
    """Return ``count`` different ports on which no process listens now, and that no process was given a minute ago.

    They are drawn below the range that the kernel takes the ports of outgoing connections from, one of which could else
    get the port before the server listens on it.
    """
    while _reserved and time.monotonic() - _reserved[0][0] > RESERVED_S:
        os.close(_reserved.pop(0)[1])
    found: list[int] = []
    for port in random.Random().sample(range(*UNUSED_BY_CLIENTS), k=UNUSED_BY_CLIENTS[1] - UNUSED_BY_CLIENTS[0]):
        if len(found) == count:
            break
        with contextlib.suppress(OSError):
            # Tritonserver listens seconds later, and exits if another server does so on one of its ports by then.
            _reserved.append((time.monotonic(), _named(f"trident-port-{port}").detach()))
            socket.create_server((host, port)).close()
            found.append(port)
    return found


def _named(name: str) -> socket.socket:
    """Return a socket of an abstract name, which one process at a time can have. Raises OSError: another has it."""
    named = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        named.bind(f"\0{name}")
    except OSError:
        named.close()
        raise
    return named


def listener(port: int) -> psutil.Process | None:
    """Return a process that listens on ``port``; None if there is none that this user may see."""
    for connection in psutil.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid is not None:
            return psutil.Process(connection.pid)
    return None


def _by_process(port: int) -> str:
    with contextlib.suppress(psutil.Error):  # it exited meanwhile
        if found := listener(port):
            command = shlex.join(found.cmdline())
            shown = command if len(command) <= MAX_COMMAND_CHARS else f"{command[:MAX_COMMAND_CHARS]} …"
            return f" by process {found.pid} ({shown})"
    return ""
