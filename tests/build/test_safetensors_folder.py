"""What other programs read is what the build reads, in bf16."""

import json

import numpy as np
import pytest

from build import safetensors_folder
from build.base import gguf_folder, layout, program
from build.base.checkpoint import open_checkpoint
from build.base.numerics import round_to_bf16
from tests.fakes import checkpoints, gguf_models

LLAMA = checkpoints.CONFIGS["llama_gqa"]


@pytest.mark.parametrize("stored", ["F32", "Q4_1"])
def test_weights_are_those_of_the_build_rounded_to_bf16(tmp_path, monkeypatch, stored):
    monkeypatch.setattr(layout, "FETCHED", tmp_path / "cache")
    if stored == "F32":
        checkpoints.write(given := tmp_path / "given", LLAMA, dtype=stored)
        opened = open_checkpoint(given)
    else:
        given = gguf_models.write(tmp_path / "given.gguf", LLAMA, stored)
        opened = open_checkpoint(gguf_folder.unpacked(given))
    out = tmp_path / "out"
    assert safetensors_folder.main([str(given), "--into", str(out)]) == 0
    written = open_checkpoint(out)
    assert written.architecture == opened.architecture and written.eos_token_ids == opened.eos_token_ids
    told = {"torch_dtype": "bfloat16", "eos_token_id": [checkpoints.EOS], "bos_token_id": opened.bos_token_id}
    assert written.config == {**opened.config, **told}
    assert written.tensors.keys() == opened.tensors.keys()
    for name, tensor in opened.tensors.items():
        np.testing.assert_array_equal(written.tensors[name].f32(), round_to_bf16(tensor.f32()))
    assert [path.name for path in out.glob("*.safetensors")] == ["model.safetensors"]
    assert json.loads((out / "tokenizer.json").read_text()) == json.loads(
        (opened.folder / "tokenizer.json").read_text()
    )


def ended(*arguments: str) -> int:
    return program.run(lambda: safetensors_folder.main(list(arguments)), "error")


def test_what_cannot_be_read_or_written_is_one_sentence(tmp_path, capsys):
    assert ended("nobody's", "--into", str(tmp_path / "out")) == 1
    assert "error: model: there is no folder or .gguf file nobody's" in capsys.readouterr().err
    checkpoints.write(tmp_path / "given", LLAMA)
    (tmp_path / "file").write_text("")
    assert ended(str(tmp_path / "given"), "--into", str(tmp_path / "file")) == 1
    assert f"error: {tmp_path / 'file'} cannot be written: " in capsys.readouterr().err


@pytest.mark.slow  # it runs pip
def test_a_wheel_that_cannot_be_had_is_one_sentence(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(layout, "FETCHED", tmp_path / "cache")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert ended("pypi:nosuch", "--into", str(tmp_path / "out")) == 1
    assert capsys.readouterr().err.startswith("error: the wheel nosuch cannot be had from the package index")
