"""The command that runs beside the server, as a real process."""

import asyncio
import os
import signal
import subprocess
import sys
import time

import pytest

from server import child_command
from server.child_command import ChildCommand
from server.process import is_running
from server.settings import ROOT

pytestmark = pytest.mark.slow


def run(command, terminate_once=None, drain_s=0.0, **variables):
    """Return the exit code of ``command``, which is terminated once the file ``terminate_once`` exists."""

    async def serve():
        exited = asyncio.Event()
        child = ChildCommand(command, variables, exited.set, drain_s)
        while not (exited.is_set() if terminate_once is None else terminate_once.exists()):
            await asyncio.sleep(0.01)
        return await child.terminate()

    return asyncio.run(asyncio.wait_for(serve(), 60))


def test_it_has_the_added_variables_and_its_exit_code_is_returned():
    assert run(["sh", "-c", 'test "$TRIDENT_URL" = here && exit 3'], TRIDENT_URL="here") == 3


@pytest.mark.parametrize(
    "on_term, grace_s, code",
    [("exit 5", 60, 5), ("", 0.1, 128 + signal.SIGKILL)],
    ids=["exits on SIGTERM", "ignores SIGTERM"],
)
def test_a_terminated_command_gets_sigterm_and_then_sigkill(on_term, grace_s, code, tmp_path, monkeypatch):
    monkeypatch.setattr(child_command, "TERM_GRACE_S", grace_s)
    script = f"trap '{on_term}' TERM; touch {tmp_path}/ready; while :; do sleep 0.05; done"
    assert run(["sh", "-c", script], tmp_path / "ready") == code


def test_the_drain_time_is_added_to_the_grace_period(tmp_path, monkeypatch):
    monkeypatch.setattr(child_command, "TERM_GRACE_S", 0.0)
    script = f"trap 'sleep 0.5; exit 5' TERM; touch {tmp_path}/ready; while :; do sleep 0.05; done"
    assert run(["sh", "-c", script], tmp_path / "ready", drain_s=60.0) == 5


def test_a_command_killed_by_a_signal_returns_128_plus_its_number():
    assert run(["sh", "-c", "kill -USR1 $$"]) == 128 + signal.SIGUSR1


def test_it_gets_sigterm_when_the_supervisor_is_killed():
    script = """
import asyncio, os
from server.child_command import ChildCommand
async def serve():
    ChildCommand(["sleep", "60"], {}, lambda: None)
    print(open(f"/proc/self/task/{os.getpid()}/children").read().split()[0], flush=True)
    await asyncio.sleep(60)
asyncio.run(serve())
"""
    supervisor = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE)
    pid = int(supervisor.stdout.readline())
    os.kill(supervisor.pid, signal.SIGKILL)
    supervisor.communicate()
    deadline_s = time.monotonic() + 60
    while is_running(pid) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert not is_running(pid)
