"""The command that runs beside the server."""

import asyncio
import os
import signal
import subprocess
import sys
import time

import pytest

from server.process import is_alive
from server.settings import ROOT
from server.tenant import Tenant

pytestmark = pytest.mark.slow


def run(command, evict=True, **offered):
    async def live():
        ended = asyncio.Event()
        tenant = Tenant(command, offered, ended.set)
        if not evict:
            await asyncio.wait_for(ended.wait(), 10)
        return await tenant.evict()

    return asyncio.run(live())


def test_it_sees_what_is_offered_and_its_code_is_kept():
    assert run(["sh", "-c", 'test "$TRIDENT_URL" = here && exit 3'], evict=False, TRIDENT_URL="here") == 3


@pytest.mark.parametrize(
    "on_term, code", [("exit 5", 5), ("", 128 + signal.SIGKILL)], ids=["it obeys", "it must be killed"]
)
def test_an_evicted_command_is_asked_and_then_killed(on_term, code):
    assert run(["sh", "-c", f"trap '{on_term}' TERM; while :; do sleep 0.05; done"]) == code


def test_a_signal_is_told_as_shells_do():
    assert run(["sh", "-c", "kill -USR1 $$"], evict=False) == 128 + signal.SIGUSR1


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
    deadline_s = time.monotonic() + 10
    while is_alive(pid) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert not is_alive(pid)
