"""Which Python runs which command."""

import sys
from pathlib import Path

import pytest

from build.base import layout
from build.quantise import environment
from build.recipe import commands
from contract.errors import Unavailable


def test_without_the_build_environment_it_says_how_to_make_it(monkeypatch, tmp_path):
    monkeypatch.setattr(environment, "BUILD_PYTHON", tmp_path / "python")
    monkeypatch.setattr(environment.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Unavailable, match="run `make setup-build` once"):
        environment.run_by([commands.BUILD_PYTHON, "-m", "build.quantise.quantize"])
    shown = environment.run_by([commands.PYTHON, "-m", "build.quality.evaluation"])
    assert layout.ROOT / shown[0] == Path(sys.executable)  # relative to the repository, where it lies inside
    assert shown[1:] == ["-m", "build.quality.evaluation"]


def test_a_command_of_another_program_is_left_as_it_is():
    assert environment.run_by(["docker", "run"]) == ["docker", "run"]
