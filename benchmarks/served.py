"""A server for the length of a measurement: ``python -m server`` in a process of its own, on free ports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from benchmarks.measurement import Where
from contract.errors import EngineFailed

ROOT = Path(__file__).resolve().parents[1]
ENGINES = ROOT / "engines"
# Runs beside the server, says where it is, and ends with us: when our end of its standard input closes.
_HOLD = (
    "import json, os, sys\n"
    "print('SERVED ' + json.dumps({k: v for k, v in os.environ.items() if k.startswith('TRIDENT_')}), flush=True)\n"
    "sys.stdin.read()\n"
)


@contextmanager
def served(engine: str, env: Mapping[str, str] | None = None) -> Iterator[Where]:
    """``engines/<engine>`` behind a real server; ``env`` on top of ours. Raises EngineFailed with its own words."""
    command = [sys.executable, "-m", "server", "--engine", engine, "--free-ports", "--", sys.executable, "-c", _HOLD]
    # The canary's requests would count among ours.
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
        yield _where(process, engine)
    finally:
        process.stdin.close()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait(30)
        process.stdout.close()


def _where(process: subprocess.Popen, engine: str) -> Where:
    said = []
    for line in process.stdout:
        if line.startswith("SERVED "):
            variables = json.loads(line.removeprefix("SERVED "))
            return Where(variables["TRIDENT_URL"], variables["TRIDENT_METRICS_URL"], ENGINES / engine)
        said.append(line)
    raise EngineFailed(f"no server for engine {engine!r}:\n" + "".join(said[-20:]))
