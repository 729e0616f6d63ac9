"""Run a server for the duration of a measurement: ``python -m server`` in its own process, on free ports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from benchmarks.child_process import ROOT, process
from benchmarks.measurement import ServerUnderTest
from contract.errors import EngineFailed

ENGINES = Path(os.environ.get("TRIDENT_ENGINES_DIR") or ROOT / "engines")
# The server's child command: prints where the server is, and ends when its standard input closes.
_CHILD = (
    "import json, os, sys\n"
    "print('SERVER ' + json.dumps({k: v for k, v in os.environ.items() if k.startswith('TRIDENT_')}), flush=True)\n"
    "sys.stdin.read()\n"
)


@contextmanager
def running_server(engine: str, env: Mapping[str, str] | None = None) -> Iterator[ServerUnderTest]:
    """Start a server for ``engines/<engine>`` with ``env`` besides our environment. Raises EngineFailed."""
    command = [sys.executable, "-m", "server", "--engine", engine, "--free-ports", "--", sys.executable, "-c", _CHILD]
    # The liveness probe's requests would count among ours.
    with process(command, None, {"TRIDENT_CANARY_INTERVAL_S": "86400", **(env or {})}) as child:
        yield _address(child, engine)


def _address(process: subprocess.Popen[str], engine: str) -> ServerUnderTest:
    output = []
    for line in process.stdout or ():
        if line.startswith("SERVER "):
            variables = json.loads(line.removeprefix("SERVER "))
            return ServerUnderTest(variables["TRIDENT_URL"], variables["TRIDENT_METRICS_URL"], ENGINES / engine)
        output.append(line)
    raise EngineFailed(f"no server for engine {engine!r}:\n" + "".join(output[-20:]))
