"""Run a server for the duration of a measurement: ``python -m server`` in its own process, on free ports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from benchmarks import processes
from benchmarks.child_process import ROOT, process
from benchmarks.measurement import ServerUnderTest
from contract.errors import EngineFailed

IDLE_S, IDLE_SHARE = 0.5, 0.1
REST_S = 120.0  # to wait for, at most
ENGINES = Path(os.environ.get("TRIDENT_ENGINES_DIR") or ROOT / "engines")
# The server's child command: prints where the server is, and ends when its standard input closes.
_CHILD = (
    "import json, os, sys\n"
    "print('SERVER ' + json.dumps({k: v for k, v in os.environ.items() if k.startswith('TRIDENT_')}), flush=True)\n"
    "sys.stdin.read()\n"
)


@contextmanager
def running_server(engine: str, env: Mapping[str, str] | None = None, rest: bool = True) -> Iterator[ServerUnderTest]:
    """Start a server for ``engines/<engine>`` with ``env`` besides our environment; ``rest``: wait until it has loaded
    what it does not need for its first tokens. Raises EngineFailed."""
    command = [sys.executable, "-m", "server", "--engine", engine, "--free-ports", "--", sys.executable, "-c", _CHILD]
    # The liveness probe's requests would count among ours.
    with process(command, None, {"TRIDENT_CANARY_INTERVAL_S": "86400", **(env or {})}) as child:
        server = _address(child, engine)
        if rest:
            wait_for_rest(child.pid)
        yield server


def wait_for_rest(pid: int) -> None:
    """Wait until engine workers below process ``pid`` want no core: one that drafts loads its second pipeline late."""
    for one in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess, OSError):
            limit_s = time.monotonic() + REST_S
            while processes.role(one.cmdline()) == "engine worker" and _busy(one.pid) > IDLE_SHARE:
                if time.monotonic() > limit_s:
                    print(f"engine worker {one.pid} still uses the CPU, after {REST_S:g} s", file=sys.stderr)
                    break


def _busy(pid: int) -> float:
    """Return the share of the next moment in which a process ran or waited for a core. Raises OSError: it ended."""
    before_s = processes.cpu_s(pid) + processes.waited_s(pid)
    time.sleep(IDLE_S)
    return (processes.cpu_s(pid) + processes.waited_s(pid) - before_s) / IDLE_S


def _address(process: subprocess.Popen[str], engine: str) -> ServerUnderTest:
    output = []
    for line in process.stdout or ():
        if line.startswith("SERVER "):
            variables = json.loads(line.removeprefix("SERVER "))
            return ServerUnderTest(variables["TRIDENT_URL"], variables["TRIDENT_METRICS_URL"], ENGINES / engine)
        output.append(line)
    raise EngineFailed(f"no server for engine {engine!r}:\n" + "".join(output[-20:]))
