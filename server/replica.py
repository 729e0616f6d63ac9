"""Public API: a running server as a context manager, with the supervisor in a process of its own.

with server.running("demo") as replica:
    print(replica.grpc_url)
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from contract.errors import EngineFailed
from server import ports, stubs, triton_log
from server import status as status_file
from server.child_command import with_parent_death_signal
from server.recovery import State
from server.settings import PORT_FIELDS, ROOT, Settings
from server.status import Status

POLL_INTERVAL_S = 0.02
STOP_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Replica:
    """A running server. process: the supervisor. output: file of what the supervisor prints."""

    settings: Settings
    process: subprocess.Popen[bytes]
    output: Path

    @property
    def grpc_url(self) -> str:
        """``HOST:PORT``."""
        return self.settings.grpc_url

    @property
    def http_url(self) -> str:
        return self.settings.http_url

    @property
    def metrics_url(self) -> str:
        return self.settings.metrics_url

    @property
    def pid(self) -> int:
        """Process id of the supervisor."""
        return self.process.pid

    @property
    def status(self) -> Status:
        """Content of the status file. Raises EngineFailed: there is none, because the supervisor has stopped."""
        if (found := self._read_status()) is None:
            raise EngineFailed(f"the supervisor {self.pid} has no status file")
        return found

    @property
    def server_pid(self) -> int:
        """Process id of tritonserver; a restart changes it."""
        return self.status.server_pid

    def stubs(self, model: str | None = None) -> list[stubs.Stub]:
        """Return the running stub processes of ``model``, or of all models."""
        return [stub for stub in stubs.find(self.server_pid) if model in (None, stub.model)]

    def log(self) -> str:
        """Return tritonserver's log since the supervisor started."""
        return triton_log.path(self.settings.state_dir, self.settings.grpc_port).read_text(errors="replace")

    def wait_until_ready(self, restarts: int = 0, reloads: int = 0, timeout_s: float = 120.0) -> Status:
        """Wait until the server is ready after at least that many restarts and model reloads.
        Raises EngineFailed: it is not ready within ``timeout_s``, or the supervisor exited.
        """
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            found = self._read_status()
            if found and found.pid == self.pid and found.state == State.READY.value:
                if found.restarts >= restarts and found.reloads >= reloads:
                    return found
            if self.process.poll() is not None:
                break
            time.sleep(POLL_INTERVAL_S)
        raise EngineFailed(f"the server is not ready:\n{self.output.read_text(errors='replace')}")

    def _read_status(self) -> Status | None:
        return status_file.read(status_file.path(self.settings.state_dir, self.settings.grpc_port))

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """Send SIGTERM, and SIGKILL after ``timeout_s`` beyond the drain; return the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout_s + self.settings.drain_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


@contextmanager
def running(
    engine: str = "demo",
    *,
    listen: tuple[int, int, int] | None = None,
    env: Mapping[str, str] | None = None,
    **overrides: object,
) -> Iterator[Replica]:
    """Start a server, wait until it is ready, and stop it when the block ends.

    listen: gRPC, HTTP and metrics port; default: free ports.
    env: variables for supervisor, server and models, added to this process's environment.
    overrides: any other field of :class:`~server.settings.Settings`, e.g. ``model_repository``.
    Raises EngineFailed: it does not become ready; the message has the supervisor's output.
    """
    environ = {**os.environ, **(env or {})}
    for name, port in zip(PORT_FIELDS, listen or ports.free(3), strict=True):
        overrides[name] = port
    overrides.setdefault("admin_key", secrets.token_hex(16))
    if not environ.get(Settings.variable("drain_s")):
        overrides.setdefault("drain_s", 2.0)  # a caller that leaves streams open does not need their text
    settings = Settings.from_environment(environ, engine=engine, **overrides)
    settings.make_state_dir()
    output = settings.state_dir / f"supervisor-{settings.grpc_port}.out"
    environ |= {Settings.variable(name): str(value) for name, value in {"engine": engine, **overrides}.items()}
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), environ.get("PYTHONPATH"))))
    with output.open("wb") as file:
        command = with_parent_death_signal([sys.executable, "-m", "server"])
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, env=environ
        )
    replica = Replica(settings, process, output)
    try:
        replica.wait_until_ready(timeout_s=settings.start_timeout_s)
        yield replica
    finally:
        replica.stop()
