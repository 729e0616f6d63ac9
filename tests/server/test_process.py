"""Processes under the reaper, with real ones."""

import asyncio
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from contract.errors import EngineFailed
from server import process
from server.process import TritonProcess


def wait_for_zombie(child):
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)


def test_a_zombie_does_not_run_and_is_listed_as_a_child():
    child = subprocess.Popen(["sleep", "600"])
    assert process.is_running(child.pid) and child.pid not in process.zombie_children(os.getpid())
    child.kill()
    wait_for_zombie(child)
    assert not process.is_running(child.pid) and child.pid in process.zombie_children(os.getpid())
    child.wait()
    assert not process.is_running(child.pid) and process.zombie_children(child.pid) == []


@pytest.mark.parametrize(("command", "code"), [("exit 3", 3), ("kill -9 $$", 137), ("exit 0", 0)])
def test_a_zombie_tells_how_it_ended(command, code):
    child = subprocess.Popen(["sh", "-c", command])
    wait_for_zombie(child)
    assert process.exit_code(child.pid) == code
    child.wait()
    assert process.exit_code(child.pid) is None and process.exit_code(os.getpid()) is None


def test_start_ticks_tell_processes_apart():
    first = subprocess.Popen(["sleep", "600"])
    time.sleep(2 / os.sysconf("SC_CLK_TCK"))
    second = subprocess.Popen(["sleep", "600"])
    assert process.start_ticks(first.pid) < process.start_ticks(second.pid)
    for child in (first, second):
        child.kill()
        child.wait()
        assert process.start_ticks(child.pid) is None


def test_kill_ends_a_stopped_process_and_ignores_one_that_exited():
    child = subprocess.Popen(["sleep", "600"])
    os.kill(child.pid, signal.SIGSTOP)
    process.kill(child.pid)
    assert child.wait(60) == -signal.SIGKILL
    process.kill(child.pid)


@pytest.fixture
def run(tmp_path):
    """``run(scenario, *command)``: the result of ``await scenario(process)`` with a process under the reaper."""

    def run(scenario, *command):
        async def start():
            started = TritonProcess.start(command, os.environ, tmp_path / "log", f"trident_test_{os.getpid()}_")
            try:
                return await asyncio.wait_for(scenario(started), 60)
            finally:
                await started.kill()

        return asyncio.run(start())

    return run


@pytest.mark.parametrize("command, code", [("exit 3", 3), ("kill -SEGV $$", 128 + signal.SIGSEGV)])
def test_the_exit_code_is_the_commands(run, command, code):
    async def scenario(started):
        return await started.exited

    assert run(scenario, "/bin/sh", "-c", command) == code


def test_output_is_appended_to_the_log(run, tmp_path):
    (tmp_path / "log").write_text("before\n")

    async def scenario(started):
        await started.exited

    run(scenario, "/bin/sh", "-c", "echo out; echo error >&2")
    assert (tmp_path / "log").read_text() == "before\nout\nerror\n"


def test_terminate_sends_sigterm_and_kill_ends_the_descendants(run):
    async def terminate(started):
        while psutil.Process(started.pid).name() != "sleep":  # until then it ignores signals, as the reaper does
            await asyncio.sleep(0.01)
        started.terminate()
        return await started.exited

    assert run(terminate, "/bin/sleep", "600") == 128 + signal.SIGTERM

    async def kill(started):
        while not (children := psutil.Process(started.pid).children()):
            await asyncio.sleep(0.01)
        return await started.kill(), [started.pid, children[0].pid]

    code, pids = run(kill, sys.executable, "-c", "import subprocess; subprocess.run(['sleep', '600'])")
    assert code == 128 + signal.SIGKILL and not any(process.is_running(pid) for pid in pids)


def test_a_killed_reaper_ends_the_process(run):
    async def scenario(started):
        process.kill(psutil.Process(started.pid).ppid())
        return await started.exited

    assert run(scenario, "/bin/sleep", "600") == 128 + signal.SIGKILL


def test_a_reaper_that_does_not_start_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(process, "REAPER", tmp_path / "missing.py")

    async def start():
        TritonProcess.start(["/bin/true"], os.environ, tmp_path / "log", "trident_test_")

    with pytest.raises(EngineFailed, match="the reaper of tritonserver exited with code 2"):
        asyncio.run(start())
