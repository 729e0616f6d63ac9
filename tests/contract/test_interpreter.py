"""Printed commands start the interpreter that printed them."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from contract import interpreter

ROOT = Path(__file__).resolve().parents[2]
_SHOW = "import os; print(os.environ.get('GRPC_VERBOSITY'), os.environ.get('GRPC_EXPERIMENTS'))"


def _link(folder: Path) -> Path:
    folder.mkdir(parents=True)
    link = folder / "python"
    link.symlink_to(sys.executable)
    return link


@pytest.fixture
def command(monkeypatch):
    """``command(executable, directory, path)``: what is printed where these are the interpreter's surroundings."""

    def command(executable: Path, directory: Path, path: str) -> str:
        monkeypatch.chdir(directory)
        monkeypatch.setenv("PATH", path)
        monkeypatch.setattr(sys, "executable", str(executable))
        printed = interpreter.command()
        monkeypatch.undo()
        return printed

    return command


@pytest.mark.parametrize("name", ["plain", "with blank", "it's", "$HOME"])
def test_an_interpreter_below_the_working_directory_is_a_relative_path_that_a_shell_can_run(tmp_path, name, command):
    python = _link(tmp_path / name / "bin")
    printed = command(python, tmp_path, "")
    assert not Path(shlex.split(printed)[0]).is_absolute()
    ran = subprocess.run(f"{printed} -c 'print(40 + 2)'", shell=True, cwd=tmp_path, capture_output=True, text=True)
    assert ran.stdout == "42\n"


def test_an_interpreter_elsewhere_is_an_absolute_path(tmp_path, command):
    python = _link(tmp_path / "elsewhere")
    assert command(python, ROOT, "") == str(python)


def test_an_activated_environment_is_just_python(tmp_path, command):
    python = _link(tmp_path / "bin")
    assert command(python, ROOT, str(tmp_path / "bin")) == "python"


def test_another_python_on_the_path_is_not_taken_for_this_one(tmp_path, command):
    _link(tmp_path / "other")
    python = _link(tmp_path / "bin")
    assert command(python, tmp_path, str(tmp_path / "other")) == "bin/python"


@pytest.mark.parametrize("module", ["benchmarks", "clients", "gateway", "server"])
def test_a_python_without_our_packages_gets_a_sentence_and_no_traceback(module):
    bare = [os.path.realpath(sys.executable), "-I", "-S", "-c"]
    start = f"import sys, runpy; sys.path.insert(0, {str(ROOT)!r}); sys.argv = ['-m']; runpy.run_module({module!r})"
    ran = subprocess.run([*bare, start], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert ran.returncode == 1
    assert "Traceback" not in ran.stderr
    assert f".venv/bin/python -m {module}" in ran.stderr and "make setup" in ran.stderr


@pytest.mark.slow
@pytest.mark.parametrize("module", ["benchmarks", "build.engine", "clients", "gateway", "server"])
def test_ctrl_c_during_the_imports_ends_a_command_without_a_traceback(module, tmp_path):
    for name in ("grpc", "numpy"):
        (tmp_path / f"{name}.py").write_text("raise KeyboardInterrupt")
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", module]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environ, timeout=60)
    assert (ran.returncode, ran.stdout, ran.stderr) == (-signal.SIGINT, "", "")


def environment_after(statement: str, argv0: str, **given: str) -> str:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("GRPC_")}
    code = f"import sys; sys.argv = [{argv0!r}]\n{statement}\n{_SHOW}"
    return subprocess.run(
        [sys.executable, "-c", code], env=clean | given, capture_output=True, text=True
    ).stdout.strip()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("statement", "argv0", "shown"),
    [
        ("import clients", "program.py", "None None"),
        ("import clients", "-m", "NONE None"),
        ("import server", "-m", "NONE None"),
        ("import gateway", "program.py", "ERROR -event_engine_client,-event_engine_listener"),
    ],
)
def test_commands_are_silent_and_programs_that_import_the_client_keep_grpcs_log(statement, argv0, shown):
    assert environment_after(statement, argv0) == shown


def test_what_is_set_already_stays():
    given = {"GRPC_VERBOSITY": "DEBUG", "GRPC_EXPERIMENTS": "none"}
    assert environment_after("import gateway", "-m", **given).splitlines()[-1] == "DEBUG none"
