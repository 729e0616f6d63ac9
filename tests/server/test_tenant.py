"""The command that runs beside the server."""

import asyncio
import os
import signal
import subprocess
import sys
import time

import pytest

from server import tenant
from server.process import is_alive
from server.settings import ROOT
from server.tenant import Tenant

pytestmark = pytest.mark.slow


def run(command, evict_once=None, drain_s=0.0, **offered):
    """The exit code of ``command``, which ends by itself or is evicted once there is the file ``evict_once``."""

    async def live():
        ended = asyncio.Event()
        tenant = Tenant(command, offered, ended.set, drain_s)
        while not (ended.is_set() if evict_once is None else evict_once.exists()):
            await asyncio.sleep(0.01)
        return await tenant.evict()

    return asyncio.run(asyncio.wait_for(live(), 60))


def test_it_sees_what_is_offered_and_its_code_is_kept():
    assert run(["sh", "-c", 'test "$TRIDENT_URL" = here && exit 3'], TRIDENT_URL="here") == 3


@pytest.mark.parametrize(
    "on_term, obey_s, code", [("exit 5", 60, 5), ("", 0.1, 128 + signal.SIGKILL)], ids=["it obeys", "it must be killed"]
)
def test_an_evicted_command_is_asked_and_then_killed(on_term, obey_s, code, tmp_path, monkeypatch):
    monkeypatch.setattr(tenant, "OBEY_S", obey_s)
    script = f"trap '{on_term}' TERM; touch {tmp_path}/ready; while :; do sleep 0.05; done"
    assert run(["sh", "-c", script], tmp_path / "ready") == code


def test_a_command_that_drains_has_the_drains_time_on_top(tmp_path, monkeypatch):
    monkeypatch.setattr(tenant, "OBEY_S", 0.0)
    script = f"trap 'sleep 0.5; exit 5' TERM; touch {tmp_path}/ready; while :; do sleep 0.05; done"
    assert run(["sh", "-c", script], tmp_path / "ready", drain_s=60.0) == 5


def test_a_signal_is_told_as_shells_do():
    assert run(["sh", "-c", "kill -USR1 $$"]) == 128 + signal.SIGUSR1


def test_it_is_told_to_terminate_when_the_supervisor_is_killed():
    script = """
import asyncio, os
from server.tenant import Tenant
async def live():
    Tenant(["sleep", "60"], {}, lambda: None)
    print(open(f"/proc/self/task/{os.getpid()}/children").read().split()[0], flush=True)
    await asyncio.sleep(60)
asyncio.run(live())
"""
    supervisor = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE)
    pid = int(supervisor.stdout.readline())
    os.kill(supervisor.pid, signal.SIGKILL)
    supervisor.communicate()
    deadline_s = time.monotonic() + 60
    while is_alive(pid) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert not is_alive(pid)
