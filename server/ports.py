"""The three ports: free before anything starts, or a clear error that names the port and who holds it."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from contract import interpreter
from contract.errors import InvalidArgument, Unavailable

LISTEN = "0A"  # st of /proc/net/tcp


def check(host: str, ports: dict[str, int]) -> None:
    """``ports``: variable → port. Raises Unavailable for a busy one, InvalidArgument for one that cannot be."""
    seen: dict[int, str] = {}
    for variable, port in ports.items():
        if port in seen:
            raise InvalidArgument(variable, f"{port} is also {seen[port]}; the three ports must differ")
        seen[port] = variable
    for variable, port in ports.items():
        try:
            _bind(host, port).close()
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise Unavailable(
                    f"port {port} on {host} is in use{_held_by(port)}; stop that or set {variable} to another port"
                ) from error
            raise InvalidArgument(variable, f"cannot listen on {host}:{port}: {os.strerror(error.errno)}") from error


def claim(grpc_port: int) -> socket.socket:
    """Marks ``grpc_port`` as this supervisor's for as long as the returned socket lives.

    A supervisor that is restarting its server holds no port; this name keeps a second one away meanwhile.
    """
    claimed = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claimed.bind(f"\0trident-supervisor-{grpc_port}")
    except OSError as error:
        claimed.close()
        raise Unavailable(
            f"gRPC port {grpc_port} belongs to another supervisor ({interpreter.command()} -m server status); "
            "set TRIDENT_GRPC_PORT to another port"
        ) from error
    return claimed


def free(count: int, host: str = "127.0.0.1") -> list[int]:
    """``count`` different ports nobody listens on right now."""
    with contextlib.ExitStack() as stack:
        return [stack.enter_context(_bind(host, 0)).getsockname()[1] for _ in range(count)]


def holder(port: int) -> tuple[int, str] | None:
    """(pid, command line) of a process that listens on ``port``, if /proc shows it to us."""
    inodes = set(_listening_inodes(port))
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if any(os.readlink(fd) in inodes for fd in (process / "fd").iterdir()):
                return int(process.name), (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(
                    errors="replace"
                ).strip()
        except OSError:  # it ended meanwhile, or is somebody else's
            continue
    return None


def _listening_inodes(port: int) -> Iterator[str]:
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                columns = line.split()
                if columns[3] == LISTEN and int(columns[1].rpartition(":")[2], 16) == port:
                    yield f"socket:[{columns[9]}]"


def _held_by(port: int) -> str:
    found = holder(port)
    if found is None:
        return ""
    pid, command = found
    return f" by process {pid} ({command if len(command) <= 100 else command[:100] + ' …'})"


def _bind(host: str, port: int) -> socket.socket:
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    # Connections of the last server that still linger in TIME_WAIT do not make its port busy.
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
        bound.listen(1)
    except OSError:
        bound.close()
        raise
    return bound
