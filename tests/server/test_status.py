"""The status file."""

import os
import subprocess
from dataclasses import replace

import pytest

from server import status
from server.process import start_ticks

STATUS = status.Status(
    state="ready",
    since="2026-01-01T00:00:00.000+00:00",
    restarts=1,
    reloads=2,
    reason="",
    engine="demo",
    grpc_url="127.0.0.1:8001",
    http_url="http://127.0.0.1:8000",
    metrics_url="http://127.0.0.1:8002/metrics",
    pid=os.getpid(),
    started=start_ticks(os.getpid()),
    server_pid=0,
    log="log",
)


def test_a_written_status_is_read_and_listed(tmp_path):
    file = status.path(tmp_path, 8001)
    assert status.read(file) is None
    status.write(file, STATUS)
    assert status.read(file) == STATUS and status.read_all(tmp_path) == [STATUS]
    assert [path.name for path in tmp_path.iterdir()] == ["status-8001.json"]
    file.unlink()
    assert status.read_all(tmp_path) == []


@pytest.mark.parametrize("text", ["", "[]", '{"state": "ready", "extra": 1}'])
def test_a_file_that_is_no_status_does_not_hide_the_others(tmp_path, capsys, text):
    status.write(status.path(tmp_path, 8001), STATUS)
    status.path(tmp_path, 9001).write_text(text)
    assert status.read_all(tmp_path) == [STATUS]
    assert "no status in" in (told := capsys.readouterr().err) and "status-9001.json" in told


def test_a_killed_supervisor_is_dead_also_when_its_pid_is_reused(tmp_path):
    file = status.path(tmp_path, 8001)
    gone = subprocess.Popen(["true"])
    gone.wait()
    for pid, started in ((gone.pid, 1), (os.getpid(), STATUS.started - 1)):
        status.write(file, replace(STATUS, pid=pid, started=started))
        assert status.read(file).state == "dead"
    status.write(file, replace(STATUS, pid=gone.pid, state="failed", reason="no weights"))
    assert status.read(file).state == "failed"


def test_a_supervisor_that_does_not_run_is_hung(tmp_path):
    file = status.path(tmp_path, 8001)
    status.write(file, STATUS)
    os.utime(file, (1, 1))
    assert status.read(file).state == "hung" and "has not run for" in status.read(file).reason
    status.write(file, replace(STATUS, state="failed"))
    os.utime(file, (1, 1))
    assert status.read(file).state == "failed"


def test_the_description_has_state_counts_and_reason():
    line = status.describe(replace(STATUS, state="failed", reason="no weights\nmore"))
    assert "failed since" in line and "1 restarts, 2 reloads" in line and line.endswith(": no weights")
