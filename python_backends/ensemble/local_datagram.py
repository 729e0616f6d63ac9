"""Abstract unix datagram sockets that accept datagrams of their own user and of root only.

Every user of the machine can send to an abstract socket: it has no file and so no permissions. The kernel attaches the
sender's user id to every datagram, and only root can forge it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

_CREDENTIALS = struct.Struct("iII")  # struct ucred: pid, uid, gid
# Space for the credentials only, so that the kernel never installs file descriptors that another user passes.
_ANCILLARY_BYTES = socket.CMSG_SPACE(_CREDENTIALS.size)


def bind(name: str) -> socket.socket:
    """Return a datagram socket bound to the abstract ``name``, to be read with :func:`receive`. Raises OSError: the
    name is in use."""
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)  # before it can receive anything
        bound.bind("\0" + name)
    except OSError:
        bound.close()
        raise
    return bound


def receive(bound: socket.socket, max_bytes: int) -> tuple[bytes, Any] | None:
    """Wait for one datagram; return it with its sender's address, or None if another user sent it.

    max_bytes: the longest datagram; a longer one is cut.
    Raises TimeoutError: the socket has a timeout and nothing came within it.
    """
    datagram, ancillary, _, sender = bound.recvmsg(max_bytes, _ANCILLARY_BYTES)
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS) and len(data) >= _CREDENTIALS.size:
            _, uid, _ = _CREDENTIALS.unpack_from(data)
            return (datagram, sender) if uid in (0, os.getuid()) else None
    return None


class Listener:
    """Calls ``handle`` in a thread of its own for every datagram of this process's user or root, until closed.

    handle: takes the datagram; returns the reply, or None for none.
    """

    def __init__(self, name: str, max_bytes: int, thread: str, handle: Callable[[bytes], bytes | None]) -> None:
        self._socket = bind(name)
        self._max_bytes, self._handle = max_bytes, handle
        self._closing = False
        self._thread = threading.Thread(target=self._listen, name=thread, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        while not self._closing:
            received = receive(self._socket, self._max_bytes)
            if received is None:
                continue  # another user of this machine
            datagram, sender = received
            if (reply := self._handle(datagram)) is not None:
                with contextlib.suppress(OSError):  # the sender is gone
                    self._socket.sendto(reply, sender)

    def close(self) -> None:
        self._closing = True
        self._socket.shutdown(socket.SHUT_RD)  # wakes recv, also when the queue is full
        self._thread.join(timeout=1)
        self._socket.close()
