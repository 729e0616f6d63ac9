"""The keeper with real processes: whatever a command starts ends with its supervisor."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from server import keeper as keepers
from server.process import KEEPER, is_alive

# A child, a child that left its session and group, and a file like the Python backend's.
FAMILY = """
import os, subprocess, sys, time
from pathlib import Path
children = [subprocess.Popen(["sleep", "60"]), subprocess.Popen(["sleep", "60"], start_new_session=True)]
Path("/dev/shm", sys.argv[1] + "region").touch()
print(os.getpid(), *[child.pid for child in children], file=sys.stderr, flush=True)
code = sys.stdin.read()  # our standard input is empty: the keeper's pipe is not ours
time.sleep(60) if len(sys.argv) < 3 else os._exit(int(sys.argv[2]))
"""


@pytest.fixture
def prefix():
    return f"trident_test_{os.getpid()}_"


def keep(prefix, *command):
    return subprocess.Popen(
        [sys.executable, "-I", "-S", KEEPER, prefix, *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def keep_family(prefix, *more):
    keeper = keep(prefix, sys.executable, "-c", FAMILY, prefix, *more)
    pid = int(keeper.stdout.readline())
    pids = [int(word) for word in keeper.stderr.readline().split()]
    assert pids[0] == pid
    return keeper, pids


def nothing_is_left(prefix, pids):
    return not any(Path(f"/proc/{pid}").exists() for pid in pids) and not list(Path("/dev/shm").glob(f"{prefix}*"))


def test_when_the_supervisors_pipe_closes_all_descendants_and_files_go(prefix):
    keeper, pids = keep_family(prefix)
    assert not nothing_is_left(prefix, pids)
    keeper.communicate(timeout=10)
    assert keeper.returncode == 128 + signal.SIGKILL and nothing_is_left(prefix, pids)


def test_when_the_command_ends_the_rest_of_its_family_goes_and_its_code_is_kept(prefix):
    keeper, pids = keep_family(prefix, "7")
    assert keeper.wait(10) == 7 and nothing_is_left(prefix, pids)
    keeper.communicate()


def test_a_command_that_dies_of_a_signal_is_told_as_shells_do(prefix):
    keeper, pids = keep_family(prefix)
    os.kill(pids[0], signal.SIGSEGV)
    assert keeper.wait(10) == 128 + signal.SIGSEGV and nothing_is_left(prefix, pids)
    keeper.communicate()


def test_a_killed_keeper_takes_the_command_along(prefix):
    keeper, pids = keep_family(prefix)
    keeper.kill()
    deadline_s = time.monotonic() + 10
    while is_alive(pids[0]) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert not is_alive(pids[0])
    for pid in pids[1:]:
        os.kill(pid, signal.SIGKILL)
    keeper.communicate()
    Path("/dev/shm", f"{prefix}region").unlink()


def test_signals_meant_for_the_supervisor_do_not_reach_the_command(prefix):
    keeper, pids = keep_family(prefix)
    for signal_number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        keeper.send_signal(signal_number)
    time.sleep(0.1)
    assert keeper.poll() is None and all(Path(f"/proc/{pid}").exists() for pid in pids)
    keeper.communicate(timeout=10)
    assert nothing_is_left(prefix, pids)


def test_a_command_that_cannot_be_run_is_said(prefix):
    keeper = keep(prefix, "/no/such/server")
    assert keeper.wait(10) == 127
    _, said = keeper.communicate()
    assert "cannot run /no/such/server: No such file or directory" in said


def test_environment_folders_of_servers_that_are_gone_are_removed(tmp_path):
    for name in ("python_env_a1B2c3", "python_env_used", "another"):
        (tmp_path / name).mkdir()
    (tmp_path / "python_env_used" / "model").touch()
    keepers.remove_environments(str(tmp_path), 3600.0)
    assert len(list(tmp_path.iterdir())) == 3  # a server that lives since an hour may have made them
    keepers.remove_environments(str(tmp_path), 0.0)
    assert {path.name for path in tmp_path.iterdir()} == {"python_env_used", "another"}


def test_the_age_of_a_living_server_is_known_to_all(tmp_path):
    shutil.copy(shutil.which("sleep"), tmp_path / "tritonserver")
    with subprocess.Popen([tmp_path / "tritonserver", "60"]) as server:
        while Path(f"/proc/{server.pid}/comm").read_text() != "tritonserver\n":
            time.sleep(0.01)
        first = keepers.oldest_server_s()
        time.sleep(0.02)
        assert 0 <= first < keepers.oldest_server_s()
        server.kill()
