"""A replica of Serve with a stand-in for the supervisor: it starts, stops, and outlives its worker."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from cluster.ray import ownership, replica
from cluster.ray.replica import TritonReplica, environment_of

# Runs what follows `--`, as the supervisor does, and says when that ended.
SUPERVISOR = """#!/bin/sh
status="$TRIDENT_STATE_DIR/status-$$"
echo "{\\"state\\": \\"ready\\", \\"started\\": $(cut -d' ' -f22 /proc/$$/stat)}" >"$status"
[ -z "$BROKEN" ] || { echo "no such engine" >&2; exit 1; }
env >"$TRIDENT_STATE_DIR/environ"
while [ "$1" != -- ]; do shift; done; shift
TRIDENT_STATUS_FILE="$status" "$@"
sleep "${DRAIN:-0}"
echo "$?" >"$TRIDENT_STATE_DIR/ended"
"""


@pytest.fixture
def python(tmp_path) -> str:
    path = tmp_path / "python"
    path.write_text(SUPERVISOR)
    path.chmod(0o755)
    return str(path)


def start(tmp_path: Path, python: str, orphan_s: float = 0.2, **environ: str) -> TritonReplica:
    variables = {"TRIDENT_STATE_DIR": str(tmp_path), "TRIDENT_HOST": "127.0.0.1", **environ}
    return TritonReplica(str(tmp_path), python, "demo", variables, orphan_s)


def ended(tmp_path: Path, patience_s: float = 20.0) -> bool:
    deadline_s = time.monotonic() + patience_s
    while not (tmp_path / "ended").exists() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return (tmp_path / "ended").exists()


def test_a_replica_that_serve_stops_is_told_and_waited_for(tmp_path, python):
    one = start(tmp_path, python, orphan_s=1000)
    asyncio.run(one.check_health())
    assert not ended(tmp_path, 0.05)
    one.__del__()
    with pytest.raises(RuntimeError, match="is stopping"):
        asyncio.run(one.check_health())
    assert (tmp_path / "ended").read_text() == "0\n" and not list(tmp_path.glob("replica-*"))
    one.__del__()


def test_a_server_that_does_not_start_says_why(tmp_path, python):
    with pytest.raises(RuntimeError, match="no such engine"):
        start(tmp_path, python, BROKEN="1")


def test_a_server_outlives_its_worker_for_a_while(tmp_path, python):
    environ = {"TRIDENT_STATE_DIR": str(tmp_path), "TRIDENT_HOST": "127.0.0.1"}
    program = (
        "import os, signal; from cluster.ray.replica import TritonReplica as T\n"
        f"T({str(tmp_path)!r}, {python!r}, 'demo', {environ!r}, 0.3)\n"
        "os.killpg(os.getpid(), signal.SIGKILL)"  # as Ray ends the process group of a worker
    )
    command = [sys.executable, "-c", program]
    worker = subprocess.run(command, cwd=Path(replica.__file__).parents[2], start_new_session=True)
    assert worker.returncode == -9 and not (tmp_path / "ended").exists()
    assert ended(tmp_path)


def orphan(tmp_path: Path, python: str, engine: str = "demo", orphan_s: float = 3, **environ: str) -> None:
    """Start a server whose worker dies."""
    variables = {"TRIDENT_STATE_DIR": str(tmp_path), "TRIDENT_HOST": "127.0.0.1", **environ}
    program = (
        "import os, signal; from cluster.ray.replica import TritonReplica as T\n"
        f"T({str(tmp_path)!r}, {python!r}, {engine!r}, {variables!r}, {orphan_s})\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", program], cwd=Path(replica.__file__).parents[2], start_new_session=True)


def test_a_server_whose_worker_died_is_adopted_by_the_next_and_by_no_other(tmp_path, python):
    orphan(tmp_path, python)
    one, other = start(tmp_path, python, 3), start(tmp_path, python, 3)
    assert len(list(tmp_path.glob("status-*"))) == 2 and one._owned.pid != other._owned.pid
    asyncio.run(one.check_health())
    one.__del__()
    assert ended(tmp_path)
    other.__del__()
    assert not list(tmp_path.glob("replica-*.owner"))


def test_a_server_of_another_kind_is_not_adopted(tmp_path, python):
    orphan(tmp_path, python, "old")
    (tmp_path / "engines" / "demo").mkdir(parents=True)
    orphan(tmp_path, python)
    (tmp_path / "engines" / "demo" / "manifest.json").write_text("{}")  # built anew
    one = start(tmp_path, python)
    assert len(list(tmp_path.glob("status-*"))) == 3
    one.__del__()


@pytest.mark.slow
def test_an_adopted_server_has_its_time_without_a_worker_again(tmp_path, python):
    orphan(tmp_path, python, orphan_s=1)
    orphan(tmp_path, python, orphan_s=1)  # adopts it, and dies
    time.sleep(0.6)
    assert len(list(tmp_path.glob("status-*"))) == 1 and not ended(tmp_path, 0.0)
    assert ended(tmp_path)


def test_a_server_is_adopted_while_the_program_beside_it_looks_at_its_file(tmp_path, python):
    orphan(tmp_path, python)
    (file,) = tmp_path.glob("replica-*.owner")
    with file.open() as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        threading.Timer(0.2, fcntl.flock, [looking, fcntl.LOCK_UN]).start()
        one = start(tmp_path, python, 3)
    assert len(list(tmp_path.glob("status-*"))) == 1
    one.__del__()


def test_a_server_of_another_kind_on_the_same_gpu_is_drained_first(tmp_path, python, monkeypatch):
    orphan(tmp_path, python, "old", CUDA_VISIBLE_DEVICES="0,1")
    ownership.adopted(tmp_path, "replica-other-", "0,1")
    (tmp_path / "ended").unlink()
    orphan(tmp_path, python, "old", 0.0, CUDA_VISIBLE_DEVICES="0,1", DRAIN="0.3")
    time.sleep(0.1)  # it drains already
    one = start(tmp_path, python, CUDA_VISIBLE_DEVICES="1,2")
    assert ended(tmp_path, 0.0)
    one.__del__()


def has_ended(pid: int) -> bool:
    """Return whether a process is gone, or a zombie that init has not reaped yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_a_server_whose_supervisor_hangs_is_killed(tmp_path, python):
    orphan(tmp_path, python, "old")
    (old,) = tmp_path.glob("status-*")
    os.utime(old, (1, 1))
    one = start(tmp_path, python)
    os.kill(one._owned.pid, signal.SIGSTOP)
    assert has_ended(int(old.name.removeprefix("status-"))) and one._owned.state == "ready"
    os.utime(one._owned._status_file, (1, 1))
    assert one._owned.state == "hung"
    one.__del__()
    assert has_ended(one._owned.pid)


def test_a_worker_ends_when_its_supervisor_does(tmp_path, python, monkeypatch):
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    one = start(tmp_path, python)
    one._owned.stop()
    deadline_s = time.monotonic() + 20
    while not codes and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert codes == [1]
    one._stopping.set()  # or its collection would stop it again


def test_it_is_ill_only_when_its_supervisor_has_had_time_to_mend_it(tmp_path, python, monkeypatch):
    one = start(tmp_path, python)
    one._owned._status_file.write_text('{"state": "restarting"}')
    asyncio.run(one.check_health())
    monkeypatch.setattr(replica, "UNWELL_S", 0.0)
    with pytest.raises(RuntimeError, match="restarting"):
        asyncio.run(one.check_health())
    one._owned._status_file.unlink()
    with pytest.raises(RuntimeError, match="without a status file"):
        asyncio.run(one.check_health())
    one._owned._status_file.write_text('{"state": "ready"}')
    asyncio.run(one.check_health())
    one.__del__()


def test_the_server_sees_nothing_of_rays_environment_and_only_its_own_gpus():
    worker = {"RAY_ADDRESS": "a", "PYTHONPATH": "p", "PATH": "/bin"}
    assert environment_of(worker, {"A": "1"}) == {"CUDA_VISIBLE_DEVICES": "", "PATH": "/bin", "A": "1"}
    assert environment_of({"CUDA_VISIBLE_DEVICES": "2,3"}, {})["CUDA_VISIBLE_DEVICES"] == "2,3"
