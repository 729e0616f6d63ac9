"""The reaper with real processes: all descendants of its command end with the supervisor."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from server import reaper as reapers
from server.process import REAPER, is_running

# A child, a child that left its session and group, and a file like the Python backend's.
FAMILY = """
import os, subprocess, sys, time
from pathlib import Path
children = [subprocess.Popen(["sleep", "60"]), subprocess.Popen(["sleep", "60"], start_new_session=True)]
Path("/dev/shm", sys.argv[1] + "region").touch()
print(os.getpid(), *[child.pid for child in children], file=sys.stderr, flush=True)
code = sys.stdin.read()  # standard input is empty: it is not the reaper's pipe
time.sleep(60) if len(sys.argv) < 3 else os._exit(int(sys.argv[2]))
"""


@pytest.fixture
def prefix():
    return f"trident_test_{os.getpid()}_"


def start_reaper(prefix, *command):
    return subprocess.Popen(
        [sys.executable, "-I", "-S", REAPER, prefix, *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def start_family(prefix, *more):
    reaper = start_reaper(prefix, sys.executable, "-c", FAMILY, prefix, *more)
    pid = int(reaper.stdout.readline())
    pids = [int(word) for word in reaper.stderr.readline().split()]
    assert pids[0] == pid
    return reaper, pids


def is_clean(prefix, pids):
    return not any(Path(f"/proc/{pid}").exists() for pid in pids) and not list(Path("/dev/shm").glob(f"{prefix}*"))


def test_closing_standard_input_ends_all_descendants_and_removes_their_files(prefix):
    reaper, pids = start_family(prefix)
    assert not is_clean(prefix, pids)
    reaper.communicate(timeout=60)
    assert reaper.returncode == 128 + signal.SIGKILL and is_clean(prefix, pids)


def test_the_exit_of_the_command_ends_its_descendants_and_keeps_its_code(prefix):
    reaper, pids = start_family(prefix, "7")
    assert reaper.wait(60) == 7 and is_clean(prefix, pids)
    reaper.communicate()


def test_a_command_killed_by_a_signal_exits_with_128_plus_its_number(prefix):
    reaper, pids = start_family(prefix)
    os.kill(pids[0], signal.SIGSEGV)
    assert reaper.wait(60) == 128 + signal.SIGSEGV and is_clean(prefix, pids)
    reaper.communicate()


def test_killing_the_reaper_kills_the_command(prefix):
    reaper, pids = start_family(prefix)
    reaper.kill()
    deadline_s = time.monotonic() + 60
    while is_running(pids[0]) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert not is_running(pids[0])
    for pid in pids[1:]:
        os.kill(pid, signal.SIGKILL)
    reaper.communicate()
    Path("/dev/shm", f"{prefix}region").unlink()


def test_signals_meant_for_the_supervisor_do_not_reach_the_command(prefix):
    reaper, pids = start_family(prefix)
    for signal_number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        reaper.send_signal(signal_number)
    time.sleep(0.1)
    assert reaper.poll() is None and all(Path(f"/proc/{pid}").exists() for pid in pids)
    reaper.communicate(timeout=60)
    assert is_clean(prefix, pids)


def test_a_command_that_cannot_be_run_is_reported(prefix):
    reaper = start_reaper(prefix, "/no/such/server")
    assert reaper.wait(60) == 127
    _, stderr = reaper.communicate()
    assert "cannot run /no/such/server: No such file or directory" in stderr


def test_environment_folders_of_servers_that_exited_are_removed(tmp_path):
    for name in ("python_env_a1B2c3", "python_env_used", "another"):
        (tmp_path / name).mkdir()
    (tmp_path / "python_env_used" / "model").touch()
    reapers.remove_environments(str(tmp_path), 3600.0)
    assert len(list(tmp_path.iterdir())) == 3  # a server that started an hour ago may have made them
    reapers.remove_environments(str(tmp_path), 0.0)
    assert {path.name for path in tmp_path.iterdir()} == {"python_env_used", "another"}


def test_the_age_of_the_oldest_running_server_is_measured(tmp_path):
    shutil.copy(shutil.which("sleep"), tmp_path / "tritonserver")
    with subprocess.Popen([tmp_path / "tritonserver", "60"]) as server:
        while Path(f"/proc/{server.pid}/comm").read_text() != "tritonserver\n":
            time.sleep(0.01)
        first = reapers.oldest_server_s()
        time.sleep(0.02)
        assert 0 <= first < reapers.oldest_server_s()
        server.kill()
