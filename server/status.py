"""How a supervisor and its server are, as a small JSON file for people and tools.

``.triton/status-<grpc port>.json`` exists from start to clean stop; after a failure it stays and says why.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

from server.health import State


@dataclass(frozen=True)
class Status:
    """state: see health.State, or "dead" if its supervisor is gone. since: UTC, ISO 8601. reason: one sentence or "".

    pid and started (clock ticks since boot) are the supervisor's; server_pid is tritonserver's, 0 while there is none.
    """

    state: str
    since: str
    restarts: int
    revivals: int
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
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


def path(state_dir: Path, grpc_port: int) -> Path:
    return state_dir / f"status-{grpc_port}.json"


def write(file: Path, status: Status) -> None:
    """Whole or not at all: a reader never sees half a file."""
    fresh = file.with_name(f".{file.name}.{os.getpid()}")
    fresh.write_text(json.dumps(asdict(status), indent=2) + "\n")
    fresh.replace(file)


def read(file: Path) -> Status | None:
    """The status in ``file``, "dead" if its supervisor is; None if there is no such file."""
    try:
        status = Status(**json.loads(file.read_text()))
    except FileNotFoundError:
        return None
    if status.state != State.FAILED.value and start_ticks(status.pid) != status.started:
        return replace(status, state="dead", reason="its supervisor was killed")
    return status


def read_all(state_dir: Path) -> list[Status]:
    """Of every supervisor that keeps its state in ``state_dir``, by file name."""
    found = (read(file) for file in sorted(state_dir.glob("status-*.json")))
    return [status for status in found if status is not None]


def remove(file: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        file.unlink()


def start_ticks(pid: int) -> int | None:
    """When the process ``pid`` started, in clock ticks since boot; None if there is none."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])
    except (FileNotFoundError, ProcessLookupError):
        return None


def describe(status: Status) -> str:
    """One line for people."""
    counts = f"{status.restarts} restarts, {status.revivals} revivals"
    why = f": {status.reason.splitlines()[0]}" if status.reason else ""
    return f"{status.grpc_url}  {status.engine}  {status.state} since {status.since}  ({counts}){why}"
