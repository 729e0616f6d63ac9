"""Status file of a supervisor: a small JSON file for people and tools.

``.triton/status-<grpc port>.json`` exists from start to clean stop; after a failure it stays and gives the reason.
Its supervisor sets its modification time every BEAT_S, so that one that hangs is noticed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

from contract import failpoint
from server.process import start_ticks
from server.recovery import State

BEAT_S = 1.0
HUNG_S = 10.0  # without a beat


@dataclass(frozen=True)
class Status:
    """Content of the status file.

    state: a recovery.State, "dead" if the supervisor was killed, or "hung" if it is stopped or does not run.
    since: when the state was entered, UTC, ISO 8601.
    restarts, reloads: server restarts and model reloads since the supervisor started.
    reason: one sentence or "".
    pid: of the supervisor.
    started: start time of the supervisor in clock ticks since boot.
    server_pid: of tritonserver; 0 while it does not run.
    log: path of tritonserver's log.
    """

    state: str
    since: str
    restarts: int
    reloads: int
    reason: str
    engine: str
    grpc_url: str
    http_url: str
    metrics_url: str
    pid: int
    started: int
    server_pid: int
    log: str


def utc_now() -> str:
    """Return the time in UTC, ISO 8601, to the millisecond."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


def path(state_dir: Path, grpc_port: int) -> Path:
    """Return the path of the status file of the supervisor on ``grpc_port``."""
    return state_dir / f"status-{grpc_port}.json"


def write(file: Path, status: Status) -> None:
    """Write ``status`` atomically."""
    failpoint.write_to_disk()
    fresh = file.with_name(f".{file.name}.{os.getpid()}")
    fresh.write_text(json.dumps(asdict(status), indent=2) + "\n")
    fresh.replace(file)


def read(file: Path) -> Status | None:
    """Read the status in ``file``, with state "dead" or "hung" if its supervisor is; None if there is none."""
    try:
        status = Status(**json.loads(file.read_text()))
        silent_s = time.time() - file.stat().st_mtime
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:  # cut off, or of another version
        print(f"no status in {file}: {error}", file=sys.stderr)
        return None
    if status.state == State.FAILED.value:
        return status
    if start_ticks(status.pid) != status.started:
        return replace(status, state="dead", reason="its supervisor was killed")
    if silent_s > HUNG_S:
        return replace(status, state="hung", reason=f"its supervisor has not run for {silent_s:.0f} s")
    return status


def read_all(state_dir: Path) -> list[Status]:
    """Read the status of every supervisor that keeps its state in ``state_dir``, sorted by file name."""
    found = (read(file) for file in sorted(state_dir.glob("status-*.json")))
    return [status for status in found if status is not None]


def describe(status: Status) -> str:
    """Return one line for people."""
    counts = f"{status.restarts} restarts, {status.reloads} reloads"
    reason = f": {status.reason.splitlines()[0]}" if status.reason else ""
    return f"{status.grpc_url}  {status.engine}  {status.state} since {status.since}  ({counts}){reason}"
