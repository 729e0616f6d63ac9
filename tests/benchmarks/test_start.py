"""Which processes are a replica's, and their memory; tests/end_to_end/test_benchmarks.py starts a real one."""

import os
import subprocess
import sys

import pytest

from benchmarks import start
from contract.errors import EngineFailed

SERVER = (
    "import socket, subprocess, sys; server = socket.create_server(('127.0.0.1', 0));"
    "child = subprocess.Popen(['sleep', '60']); print(server.getsockname()[1], flush=True);"
    "sys.stdin.read(); child.kill()"
)
SUPERVISOR = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"


@pytest.mark.slow
def test_supervisors_and_children_belong_to_a_replica_and_we_do_not():
    argv = [sys.executable, "-c", SUPERVISOR, SERVER]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as supervisor:
        url = f"127.0.0.1:{supervisor.stdout.readline().strip()}"
        found = start.replica(url)
        assert len(found) == 3 and supervisor.pid in {one.pid for one in found} and os.getpid() not in found
        assert 1 < start.memory_mib(url) < 500
        supervisor.stdin.close()
    with pytest.raises(EngineFailed, match=f"no process listens on {url}"):
        start.replica(url)
