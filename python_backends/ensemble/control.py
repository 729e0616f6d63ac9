"""Commands from the detokenizer and the supervisor to the engine, beside Triton.

Triton 2.51 never marks a running engine step of an ensemble as cancelled when the client disconnects. It marks the
detokenizer's, which then sends a command on an abstract unix datagram socket. One datagram is one command in text.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from python_backends.ensemble import local_datagram

_MAX_BYTES = 4096

# The kernel queues ten datagrams for a listener (net.unix.max_dgram_qlen), which takes some 20 µs for each. When many
# streams are cancelled at once, a short wait is better than a lost command.
_SEND_TIMEOUT_US = 5_000


class Verb(str, Enum):
    """CANCEL: the client has disconnected. STOP: a stop string matched. ABORT: end all streams."""

    CANCEL = "cancel"
    STOP = "stop"
    ABORT = "abort"


@dataclass(frozen=True)
class ControlMessage:
    """One command. epoch, key: the stream, see StreamState; not with ABORT. reason: with ABORT only."""

    verb: Verb
    epoch: int = 0
    key: int = 0
    reason: str = ""

    def encode(self) -> bytes:
        """Return a command about a stream as a datagram; the supervisor writes its own (server/drain.py)."""
        return f"{self.verb.value} {self.epoch} {self.key}".encode()

    @classmethod
    def decode(cls, datagram: bytes) -> ControlMessage:
        """Raises ValueError: the datagram is not a command."""
        verb_text, _, rest = datagram.decode().partition(" ")
        verb = Verb(verb_text)
        if verb is Verb.ABORT:
            return cls(verb, reason=rest)
        epoch, key = rest.split(" ")
        return cls(verb, int(epoch), int(key))


class ControlSender:
    """Sends commands; waits up to 5 ms for a busy listener. The caller repeats a lost one with the next increment."""

    def __init__(self, name: str) -> None:
        self._address = "\0" + name
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 0, _SEND_TIMEOUT_US))

    def send(self, message: ControlMessage) -> bool:
        """Return whether the listener has the command."""
        try:
            self._socket.sendto(message.encode(), self._address)
        except OSError:  # no engine is listening now, or its queue is full
            return False
        return True

    def close(self) -> None:
        self._socket.close()


class ControlListener(local_datagram.Listener):
    """Calls ``handle`` in a thread of its own for every command of this process's user or root, until closed."""

    def __init__(self, name: str, handle: Callable[[ControlMessage], None]) -> None:
        def decode(datagram: bytes) -> None:
            try:
                message = ControlMessage.decode(datagram)
            except ValueError:
                return
            handle(message)

        super().__init__(name, _MAX_BYTES, "control", decode)
