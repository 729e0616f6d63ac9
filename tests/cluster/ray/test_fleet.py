"""A fleet under a real Ray: it scales, rolls out and loses processes while streams go on, and no stream is cut."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from cluster import __main__ as command
from cluster.ray import fleet
from contract.errors import Unavailable
from server import ports
from tests.stream_load import Load

ROOT = Path(__file__).resolve().parents[3]
PYTHON = ROOT / ".venv-fleet" / "bin" / "python"


def test_a_fleet_that_does_not_run_cannot_be_changed(tmp_path):
    with pytest.raises(Unavailable, match="no fleet runs in"):
        fleet.change(tmp_path, {}, {})
    (tmp_path / "fleet.json").write_text('{"ray": "127.0.0.1:1"}')  # of one that was killed
    with pytest.raises(Unavailable, match="no fleet runs in"):
        fleet.change(tmp_path, {}, {})


def test_the_command_says_what_is_missing_where_there_is_no_ray(monkeypatch, capsys):
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None)
    assert command.main(["fleet"]) == 2
    assert "make setup-fleet" in capsys.readouterr().err


def test_tokens_are_for_their_owner_alone_and_stay(tmp_path):
    path = fleet._token(tmp_path / "token")
    assert path.stat().st_mode & 0o777 == 0o600 and len(path.read_text()) == 64
    assert fleet._token(path).read_text() == path.read_text()


def test_a_gateway_that_does_not_answer_names_no_replica():
    assert fleet.registered("127.0.0.1:1", "token") == {}


class Running:
    """A fleet in a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.http_port, self.grpc_port, monitoring_port = ports.free(3)
        self.folder, self.output = folder, folder / "output"
        environ = {
            **os.environ,
            "TRIDENT_GATEWAY_MODEL": "demo",  # make exports the model that it has built
            "TRIDENT_GATEWAY_HTTP_PORT": str(self.http_port),
            "TRIDENT_GATEWAY_GRPC_PORT": str(self.grpc_port),
            "TRIDENT_GATEWAY_MONITORING_PORT": str(monitoring_port),
            "TRIDENT_GATEWAY_CONTINUATIONS": "0",  # which would hide a stream that a drain has cut
        }
        self.before = set(psutil.pids())
        with self.output.open("wb") as output:
            command = self._command("fleet", "--engine", "demo", "--min", "1", "--max", "1", "--orphan-s", "5")
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


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    if not PYTHON.exists():
        pytest.skip("Ray is not installed; `make setup-fleet` makes .venv-fleet with it")
    running = Running(tmp_path_factory.mktemp("fleet"))
    try:
        while "Ctrl-C" not in running.output.read_text() and running.process.poll() is None:
            time.sleep(0.05)
        yield running
        running.process.send_signal(signal.SIGINT)
        assert running.process.wait(90) == 0, running.output.read_text()
        left = [one for one in psutil.process_iter(["cmdline"]) if str(running.folder) in str(one.info["cmdline"])]
        assert not left
    finally:
        running.process.kill()
        running.process.wait()


@pytest.mark.slow
async def test_no_stream_is_lost_whatever_happens_to_the_fleet(running: Running):
    await running.until(lambda: len(running.in_use()) == 1)
    load = Load()
    async with load.running(running.http_port, running.grpc_port, streams=2):
        await asyncio.to_thread(running.change, "--min", "3", "--max", "3")
        await running.until(lambda: len(running.in_use()) == 3)
        assert not load.failed, running.said()

        before = running.in_use()
        await running.kill("ray::ServeReplica")  # its server serves on for a while
        await running.until(lambda: len(running.in_use() - before) == 1 and len(running.in_use()) == 3)
        assert not load.failed, running.said()

        await asyncio.to_thread(running.change, "--min", "1", "--max", "1")
        await running.until(lambda: len(running.in_use()) == 1)
        assert not load.failed, running.said()

        # Killed while replicas stop, the controller takes those for running ones when it is back, and stops others.
        await running.until(
            lambda: bool(re.search(r" running: 1 running; at the gateway: \S+ serves$", running.said()))
        )
        old = running.in_use()
        await running.kill("ray::ServeController")
        await asyncio.to_thread(running.change, "--environ", "TRIDENT_MODEL_REPOSITORY=/nowhere")
        await running.until(lambda: "deploy_failed" in running.output.read_text())
        assert running.in_use() == old and not load.failed, running.said()

        await asyncio.to_thread(running.change, "--environ", f"TRIDENT_MODEL_REPOSITORY={ROOT / 'model_repository'}")
        await running.until(lambda: bool(running.in_use()) and not running.in_use() & old)
    assert not load.failed and load.ended > 20, running.said()


@pytest.mark.slow
def test_a_change_that_cannot_be_is_refused_and_changes_nothing(running: Running):
    wrong = {("--engine", "none-such"): "there is no engine", ("--min", "3", "--max", "2"): "min: must be at least 0"}
    for words, problem in wrong.items():
        command = running._command("change", *words)
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode == 2 and problem in done.stderr
