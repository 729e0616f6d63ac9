"""Finding stubs in /proc and hearing of their deaths; the processes are real, the stubs are not."""

import asyncio
import os
import subprocess
from pathlib import Path

from server import stubs
from server.stubs import Stub


def write_process(proc, pid, argv, started):
    (proc / str(pid)).mkdir()
    (proc / str(pid) / "cmdline").write_bytes(b"\0".join(word.encode() for word in argv) + b"\0")
    fields = ["S"] + ["0"] * 18 + [str(started)] + ["0"] * 30
    (proc / str(pid) / "stat").write_text(f"{pid} (triton_python (b) {' '.join(fields)}\n")


def stub_argv(model, instance, server_pid):
    path = f"/models/{model}/1/model.py"
    return ["/b/triton_python_backend_stub", path, "shm", "1", "1", str(server_pid), "/b", "336", instance, "DEFAULT"]


def test_only_stubs_of_the_asked_server_are_found(tmp_path):
    write_process(tmp_path, 10, stub_argv("tokenizer", "tokenizer_0_1", 7), 500)
    write_process(tmp_path, 11, stub_argv("engine", "engine_0_0", 7), 400)
    write_process(tmp_path, 12, stub_argv("engine", "engine_0_0", 8), 400)
    write_process(tmp_path, 13, ["grep", "triton_python_backend_stub"], 400)
    (tmp_path / "14").mkdir()  # ended while we looked
    write_process(tmp_path, 15, [""], 400)  # a zombie has no command line
    assert stubs.find(7, tmp_path) == [
        Stub(11, "engine", "engine_0_0", 400),
        Stub(10, "tokenizer", "tokenizer_0_1", 500),
    ]


def test_a_stub_is_replaced_only_by_a_younger_one_of_its_instance():
    dead = Stub(10, "tokenizer", "tokenizer_0_0", 500)
    assert stubs.replaced(dead, [Stub(12, "tokenizer", "tokenizer_0_0", 900)])
    assert not stubs.replaced(dead, [Stub(12, "tokenizer", "tokenizer_0_1", 900)])
    assert not stubs.replaced(dead, [Stub(9, "tokenizer", "tokenizer_0_0", 400)])


def test_every_death_is_told_once_also_of_zombies_and_of_those_long_gone_but_not_of_the_forgotten():
    async def watch():
        deaths = []
        killed, zombie, forgotten, living = (subprocess.Popen(["sleep", "600"]) for _ in range(4))
        gone = subprocess.Popen(["true"])
        gone.wait()
        zombie.kill()
        os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
        assert "\nState:\tZ" in Path(f"/proc/{zombie.pid}/status").read_text()
        found = {name: Stub(process.pid, name, name, 0) for name, process in locals().items() if name in NAMES}
        watch = stubs.Watch(deaths.append)
        watch.add(found.values())
        watch.add([found["living"], found["killed"]])
        watch.forget([found["forgotten"]])
        killed.kill()
        forgotten.kill()
        while len(deaths) < 3:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        assert watch.watched == [found["living"]]
        watch.close()
        living.kill()
        for process in (killed, zombie, forgotten, living):
            process.wait()
        return sorted(stub.model for stub in deaths)

    assert asyncio.run(asyncio.wait_for(watch(), 60)) == ["gone", "killed", "zombie"]


NAMES = ("killed", "zombie", "forgotten", "living", "gone")
