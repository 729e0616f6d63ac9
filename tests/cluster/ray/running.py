"""A fleet of `make fleet` in a process of its own, for tests."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from cluster.ray import fleet
from server import ports

ROOT = Path(__file__).resolve().parents[3]
PYTHON = ROOT / ".venv-fleet" / "bin" / "python"
RULES = """[defaults]
up_cooldown_s = 1.0
down_cooldown_s = 5.0
start_s = 5.0
slow_start_s = 1.0
tokens_per_s = 10.0
time_of_day = false
"""


class Running:
    """A fleet in a process of its own."""

    def __init__(self, folder: Path, **environ: str) -> None:
        self.http_port, self.grpc_port, monitoring_port = ports.free(3)
        self.folder, self.output = folder, folder / "output"
        environ = {
            **os.environ,
            "TRIDENT_GATEWAY_MODEL": "demo",  # make exports the model that it has built
            "TRIDENT_GATEWAY_HTTP_PORT": str(self.http_port),
            "TRIDENT_GATEWAY_GRPC_PORT": str(self.grpc_port),
            "TRIDENT_GATEWAY_MONITORING_PORT": str(monitoring_port),
            **environ,
        }
        (folder / "rules.toml").write_text(RULES)
        self.before = set(psutil.pids())
        with self.output.open("wb") as output:
            words = ("--engine", "demo", "--min", "1", "--max", "1", "--scaling", str(folder / "rules.toml"))
            command = self._command("fleet", *words, "--orphan-s", "90")
            self.process = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=output, stderr=output)

    def _command(self, *words: str) -> list[str]:
        return [str(PYTHON), "-m", "cluster", *words, "--folder", str(self.folder)]

    def change(self, *words: str) -> None:
        done = subprocess.run(self._command("change", *words), cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr

    def in_use(self) -> set[str]:
        """The addresses of the replicas that get requests."""
        assert self.process.poll() is None, self.output.read_text()
        states = fleet.registered(f"127.0.0.1:{self.http_port}", (self.folder / "admin-token").read_text())
        return {address for address, state in states.items() if state == "serves"}

    def workers(self, title: str) -> list[int]:
        """The pids of Ray's processes with this title."""
        mine = (process for process in psutil.process_iter(["pid", "cmdline"]) if process.pid not in self.before)
        return [one.pid for one in mine if " ".join(one.info["cmdline"] or ()).startswith(title)]

    def find(self, victim: str) -> int:
        """The pid of a process: supervisor, tritonserver, gateway, raylet, or of one of Ray's with this title."""
        mine = set(psutil.pids()) - self.before
        if victim == "gateway":
            return next(pid for pid in mine if cmdline(pid)[1:3] == ["-m", "gateway"])
        if victim == "raylet":
            return next(pid for pid in mine if cmdline(pid) and cmdline(pid)[0].endswith("/raylet"))
        if victim in ("supervisor", "tritonserver"):
            supervisor = next(pid for pid in mine if cmdline(pid)[1:3] == ["-m", "server"])
            children = psutil.Process(supervisor).children(recursive=True)
            return supervisor if victim == "supervisor" else next(c.pid for c in children if c.name() == victim)
        return self.workers(victim)[0]

    async def kill(self, title: str) -> None:
        await self.until(lambda: bool(self.workers(title)))
        os.kill(self.workers(title)[0], signal.SIGKILL)

    def said(self) -> str:
        """What it printed, without the gateway's lines for each request."""
        return "\n".join(line for line in self.output.read_text().splitlines() if '"gateway.request"' not in line)

    async def until(self, condition: Callable[[], bool], patience_s: float = 90.0) -> None:
        deadline_s = time.monotonic() + patience_s
        while not await asyncio.to_thread(condition):
            if time.monotonic() > deadline_s:
                pytest.fail(self.said())
            await asyncio.sleep(0.05)


def cmdline(pid: int) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).cmdline()
    return []
