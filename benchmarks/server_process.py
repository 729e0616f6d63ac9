"""Run a server for the duration of a measurement: ``python -m server`` in its own process, on free ports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from benchmarks.measurement import ServerUnderTest
from contract.errors import EngineFailed

ROOT = Path(__file__).resolve().parents[1]
ENGINES = ROOT / "engines"
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
    environ = {**os.environ, "TRIDENT_CANARY_INTERVAL_S": "86400", **(env or {})}
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield _address(process, engine)
    finally:
        if process.stdin is not None:
            process.stdin.close()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait(30)
        if process.stdout is not None:
            process.stdout.close()


def _address(process: subprocess.Popen[str], engine: str) -> ServerUnderTest:
    output = []
    for line in process.stdout or ():
        if line.startswith("SERVER "):
            variables = json.loads(line.removeprefix("SERVER "))
            return ServerUnderTest(variables["TRIDENT_URL"], variables["TRIDENT_METRICS_URL"], ENGINES / engine)
        output.append(line)
    raise EngineFailed(f"no server for engine {engine!r}:\n" + "".join(output[-20:]))
