"""Finding stub processes and reporting their exits, with real processes that have a stub's name and arguments."""

import asyncio
import os
import shutil
import subprocess

import psutil
import pytest

from server import stubs
from server.process import start_ticks
from server.stubs import Stub


@pytest.fixture
def start(tmp_path):
    """``start(model, instance, server_pid)``: a process with the command line of a stub that sleeps."""
    executable = tmp_path / stubs.EXECUTABLE
    shutil.copy(shutil.which("bash"), executable)
    started = []

    def start(model, instance, server_pid, name=executable):
        # bash -c SCRIPT would be another command line, so the script stands where a stub has its model.
        script = tmp_path / model / "1" / "model.py"
        script.parent.mkdir(parents=True, exist_ok=True)
        if not script.exists():  # a running shell reads it: it must not change
            script.write_text("read line\n")
        arguments = [name, script, "shm", "1", "1", str(server_pid), "/b", "336", instance, "DEFAULT"]
        started.append(subprocess.Popen(arguments, executable=executable, stdin=subprocess.PIPE))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_only_running_stubs_of_the_given_server_are_found(start):
    tokenizer, engine = start("tokenizer", "tokenizer_0_1", 7), start("engine", "engine_0_0", 7)
    start("engine", "engine_0_0", 8)
    start("engine", "engine_0_1", 7, name="grep")
    zombie = start("engine", "engine_0_2", 7)
    zombie.kill()
    os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
    assert stubs.find(7) == [
        Stub(engine.pid, "engine", "engine_0_0", start_ticks(engine.pid)),
        Stub(tokenizer.pid, "tokenizer", "tokenizer_0_1", start_ticks(tokenizer.pid)),
    ]


def test_a_stub_is_replaced_only_by_a_younger_one_of_its_instance():
    exited = Stub(10, "tokenizer", "tokenizer_0_0", 500)
    assert stubs.is_replaced(exited, [Stub(12, "tokenizer", "tokenizer_0_0", 900)])
    assert not stubs.is_replaced(exited, [Stub(12, "tokenizer", "tokenizer_0_1", 900)])
    assert not stubs.is_replaced(exited, [Stub(9, "tokenizer", "tokenizer_0_0", 400)])


def test_every_exit_is_reported_once_also_of_zombies_and_earlier_exits_but_not_of_removed_stubs():
    async def watch():
        exits = []
        processes = {name: subprocess.Popen(["sleep", "600"]) for name in ("killed", "zombie", "removed", "running")}
        exited = subprocess.Popen(["true"])
        exited.wait()
        processes["zombie"].kill()
        os.waitid(os.P_PID, processes["zombie"].pid, os.WEXITED | os.WNOWAIT)
        assert psutil.Process(processes["zombie"].pid).status() == psutil.STATUS_ZOMBIE
        watched = {name: Stub(process.pid, name, name, 0) for name, process in (processes | {"exited": exited}).items()}
        watcher = stubs.ExitWatcher(exits.append)
        watcher.add(watched.values())
        watcher.add([watched["running"], watched["killed"]])
        watcher.remove([watched["removed"]])
        processes["killed"].kill()
        processes["removed"].kill()
        while len(exits) < 3:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        assert watcher.watched == [watched["running"]]
        watcher.close()
        processes["running"].kill()
        for process in processes.values():
            process.wait()
        return sorted(stub.model for stub in exits)

    assert asyncio.run(asyncio.wait_for(watch(), 60)) == ["exited", "killed", "zombie"]
