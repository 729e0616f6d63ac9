"""Kills at every point, and two builders at once: the folder is whole or it is not there."""

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from build.base import layout
from build.package.engine_folder import only_builder, replacement

# A build that writes two files; argv: the folder, and after how many file system calls it kills itself.
SCRIPT = """
import os, pathlib, shutil, signal, sys
from build.package import engine_folder

calls = int(sys.argv[2])

def dying(function):
    def call(*arguments, **options):
        global calls
        if calls == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        calls -= 1
        return function(*arguments, **options)
    return call

for name in ("mkdir", "rename", "write_text"):
    setattr(pathlib.Path, name, dying(getattr(pathlib.Path, name)))
engine_folder.shutil.rmtree = dying(shutil.rmtree)
folder = pathlib.Path(sys.argv[1])
with engine_folder.only_builder(folder, print), engine_folder.replacement(folder) as partial:
    (partial / "weights").write_text("new")
    (partial / "manifest.json").write_text("new")
"""


def write(folder: Path, text: str) -> None:
    for name in ("weights", "manifest.json"):
        (folder / name).write_text(text)


def contents(folder: Path) -> set[str]:
    return {path.read_text() for path in folder.iterdir()} if folder.exists() else set()


@pytest.mark.parametrize("had_one", [True, False])
def test_a_kill_at_any_point_leaves_the_old_engine_or_the_new_one_whole(tmp_path, had_one):
    folder = tmp_path / "demo"
    outcomes = []
    for calls in range(12):
        for path in tmp_path.iterdir():
            assert path.name == ".demo.lock" or path == folder  # the last build cleaned up behind the killed one
        if had_one:
            with only_builder(folder, print), replacement(folder) as partial:
                write(partial, "old")
        command = [sys.executable, "-c", SCRIPT, str(folder), str(calls)]
        done = subprocess.run(command, cwd=layout.ROOT, timeout=30)
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL
        with only_builder(folder, print):
            outcomes.append(contents(folder))
    else:
        pytest.fail("the build never came to its end")
    assert contents(folder) == {"new"}
    before = {"old"} if had_one else set()
    assert all(found in (before, {"new"}) for found in outcomes)
    # Writing and stepping aside come before the new one counts, tidying after: both sides were killed.
    assert outcomes[:4] == [before] * 4 and {"new"} in outcomes


def test_a_build_that_fails_leaves_what_was_there(tmp_path):
    folder = tmp_path / "demo"
    with only_builder(folder, print), replacement(folder) as partial:
        write(partial, "old")
    with pytest.raises(ZeroDivisionError), only_builder(folder, print), replacement(folder) as partial:
        write(partial, "new")
        _ = 1 / 0
    assert contents(folder) == {"old"} and not list(tmp_path.glob("demo.partial-*"))


def test_another_engines_leftovers_are_not_touched(tmp_path):
    for name in ("demo-2.partial-7", "other.partial-7", "demo.partial-7", "demo.partial-8"):
        (tmp_path / name).mkdir()
    with only_builder(tmp_path / "demo", print):
        assert sorted(p.name for p in tmp_path.iterdir() if p.is_dir()) == ["demo-2.partial-7", "other.partial-7"]


def test_a_name_with_wildcards_only_means_itself(tmp_path):
    (tmp_path / "demo.partial-7").mkdir()
    with only_builder(tmp_path / "d[e]mo", print), only_builder(tmp_path / "*", print):
        assert (tmp_path / "demo.partial-7").exists()


def test_a_second_builder_waits_and_says_so(tmp_path):
    folder = tmp_path / "demo"
    waiting, seen = threading.Event(), []

    def second() -> None:
        with only_builder(folder, lambda line: (seen.append(line), waiting.set())):
            seen.append(contents(folder))

    thread = threading.Thread(target=second)
    with only_builder(folder, print):
        thread.start()
        assert waiting.wait(60)
        with replacement(folder) as partial:
            write(partial, "first")
    thread.join(60)
    assert seen == ["another build of demo is running; waiting for it", {"first"}]
