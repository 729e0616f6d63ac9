import time

import pytest

from benchmarks import environments
from benchmarks.environments import Environment
from contract.errors import NotFound
from server.process import is_running

pytestmark = pytest.mark.slow  # makes virtual environments


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(environments, "FOLDER", tmp_path)
    return tmp_path


def test_an_environment_is_made_once_and_again_when_other_things_are_wanted(folder):
    wanted = Environment("one", (), (("{python}", "-c", "open('made', 'a').write('x')"),))
    assert not wanted.ready()
    wanted.ensure()
    wanted.ensure()
    assert wanted.ready() and wanted.program("python").exists() and (folder / "one" / "made").read_text() == "x"
    assert not Environment("one", (), (("{python}", "--version"),)).ready()


def test_an_installation_goes_on_where_it_failed_and_what_takes_too_long_ends_with_its_children(folder, monkeypatch):
    once = ("{python}", "-c", "open('steps', 'a').write('x')")
    waits = "import os, subprocess, sys, time; open('pid', 'w').write(str(os.getpid())); time.sleep(600)"
    spawns = f"import os, subprocess, sys; os.path.exists('built') or subprocess.run([sys.executable, '-c', {waits!r}])"
    Environment("slow", (), (once,)).ensure()
    slow = Environment("slow", (), (once, ("{python}", "-c", spawns)))
    with monkeypatch.context() as patched, pytest.raises(NotFound, match="timed out after 5"):
        patched.setattr(environments, "TIMEOUT_S", 5)
        slow.ensure()
    pid, limit_s = int((folder / "slow" / "pid").read_text()), time.monotonic() + 60
    while is_running(pid):
        assert time.monotonic() < limit_s
        time.sleep(0.05)
    (folder / "slow" / "built").touch()
    slow.ensure()
    assert slow.ready() and (folder / "slow" / "steps").read_text() == "x"


def test_what_cannot_be_installed_is_named_with_the_installers_own_words():
    missing = Environment("two", (("--no-index", "no-such-package-at-all"),))
    with pytest.raises(NotFound, match="pip install .* failed: ERROR: .*no-such-package-at-all"):
        missing.ensure()
    with pytest.raises(NotFound, match="exit\\(7\\)` failed"):
        Environment("three", (), (("{python}", "-c", "exit(7)"),)).ensure()
    assert not missing.ready()
