"""A running server as a context manager, for tests and tools: the real supervisor in a process of its own."""

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
from server import log, ports, status, stubs
from server.command import ADMIN_HEADER
from server.health import State
from server.settings import PORT_FIELDS, ROOT, Settings
from server.tenant import leashed

LOOK_EVERY_S = 0.02
STOP_PATIENCE_S = 60.0


@dataclass(frozen=True)
class Replica:
    """What ``running`` gives. ``output`` is the file of what the supervisor printed."""

    settings: Settings
    process: subprocess.Popen[bytes]
    output: Path

    @property
    def grpc_url(self) -> str:
        """``host:port``."""
        return self.settings.grpc_url

    @property
    def http_url(self) -> str:
        return self.settings.http_url

    @property
    def metrics_url(self) -> str:
        return self.settings.metrics_url

    @property
    def admin_headers(self) -> dict[str, str]:
        """HTTP headers that unlock Triton's management APIs."""
        return {ADMIN_HEADER: self.settings.admin_key}

    @property
    def pid(self) -> int:
        """Of the supervisor."""
        return self.process.pid

    @property
    def status(self) -> status.Status:
        """How the supervisor says it is. EngineFailed if it says nothing any more."""
        found = status.read(status.path(self.settings.state_dir, self.settings.grpc_port))
        if found is None:
            raise EngineFailed(f"the supervisor {self.pid} has no status file")
        return found

    @property
    def server_pid(self) -> int:
        """Of tritonserver; another one after a restart."""
        return self.status.server_pid

    def stubs(self, model: str | None = None) -> list[stubs.Stub]:
        """The living stub processes, of one model or of all."""
        return [stub for stub in stubs.find(self.server_pid) if model in (None, stub.model)]

    def log(self) -> str:
        """tritonserver's log since the supervisor started."""
        return log.path(self.settings.state_dir, self.settings.grpc_port).read_text(errors="replace")

    def wait_until_ready(self, restarts: int = 0, revivals: int = 0, timeout_s: float = 120.0) -> status.Status:
        """Returns when it is ready after at least so many restarts and revivals. EngineFailed if that does not come."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            found = status.read(status.path(self.settings.state_dir, self.settings.grpc_port))
            if found and found.pid == self.pid and found.state == State.READY.value:
                if found.restarts >= restarts and found.revivals >= revivals:
                    return found
            if self.process.poll() is not None:
                break
            time.sleep(LOOK_EVERY_S)
        raise EngineFailed(f"the server is not ready:\n{self.output.read_text(errors='replace')}")

    def stop(self, timeout_s: float = STOP_PATIENCE_S) -> int:
        """Ends it with SIGTERM; returns the exit code, also if it has ended before. SIGKILL if it takes too long."""
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
    """A server that is ready; stopped when the block ends.

    listen: gRPC, HTTP and metrics port; free ones if left out. env: variables for supervisor, server and models, on
    top of ours. overrides: any other field of :class:`~server.settings.Settings`, e.g. ``model_repository``,
    ``engines_dir``, ``drain_s``. Raises EngineFailed with what the supervisor said if it does not become ready.
    """
    environ = {**os.environ, **(env or {})}
    for name, port in zip(PORT_FIELDS, listen or ports.free(3), strict=True):
        overrides[name] = port
    overrides.setdefault("admin_key", secrets.token_hex(16))
    if not environ.get(Settings.variable("drain_s")):
        overrides.setdefault("drain_s", 2.0)  # who leaves streams open here is not waiting for their text
    settings = Settings.from_environment(environ, engine=engine, **overrides)
    settings.state_dir.mkdir(parents=True, exist_ok=True)
    output = settings.state_dir / f"supervisor-{settings.grpc_port}.out"
    environ |= {Settings.variable(name): str(value) for name, value in {"engine": engine, **overrides}.items()}
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), environ.get("PYTHONPATH"))))
    with output.open("wb") as file:
        command = leashed([sys.executable, "-m", "server"])
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, env=environ
        )
    replica = Replica(settings, process, output)
    try:
        replica.wait_until_ready(timeout_s=settings.start_timeout_s)
        yield replica
    finally:
        replica.stop()
