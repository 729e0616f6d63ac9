"""Time that moves when it is told to, and a real Redis where there is one."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest


class SteppedClock:
    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def clock() -> SteppedClock:
    return SteppedClock()


@pytest.fixture(scope="session")
def redis_socket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The Unix socket of a redis-server (or valkey-server) of our own, which keeps nothing and may be slow: a machine
    that keeps it from its core for a quarter of a second would make it one that is away."""
    binary = shutil.which("redis-server") or shutil.which("valkey-server")
    if binary is None:
        pytest.skip("neither redis-server nor valkey-server is on PATH (Debian: apt-get install redis-server)")
    folder = tmp_path_factory.mktemp("redis")
    path = folder / "s"
    nothing_kept = ["--save", "", "--appendonly", "no", "--dir", str(folder)]
    command = [binary, "--port", "0", "--unixsocket", str(path), *nothing_kept]
    with (
        pytest.MonkeyPatch.context() as patch,
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT) as process,
    ):
        patch.setattr("gateway.admission.shared_state.TIMEOUT_S", 30.0)
        try:
            _wait_for(path, process)
            yield path
        finally:
            process.terminate()


def _wait_for(path: Path, process: subprocess.Popen) -> None:
    give_up = time.monotonic() + 60
    while time.monotonic() < give_up:
        assert process.poll() is None, "redis-server ended while it was started"
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(path))
                return
            except OSError:
                time.sleep(0.02)
    raise AssertionError("redis-server does not listen")
