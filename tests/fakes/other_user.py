"""Another user of this machine who sends to our abstract sockets."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

import pytest

_UID = 65534  # "nobody": on every Linux, and never us
# The privileges are dropped inside, because that user may not be allowed to read the interpreter's folder.
_SEND = """
import os, socket, sys
os.setgroups([]); os.setgid(int(sys.argv[1])); os.setuid(int(sys.argv[1]))
with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
    for datagram in sys.argv[3:]:
        sender.sendto(bytes.fromhex(datagram), "\\0" + sys.argv[2])
"""


def send(name: str, datagrams: Sequence[bytes]) -> None:
    """Sends to the abstract socket ``name`` as another user. Skips the test where we may not become one."""
    if os.getuid() != 0:
        pytest.skip("only root can send a datagram as another user")
    words = [datagram.hex() for datagram in datagrams]
    command = [sys.executable, "-I", "-S", "-c", _SEND, str(_UID), name, *words]
    subprocess.run(command, check=True, timeout=60)
