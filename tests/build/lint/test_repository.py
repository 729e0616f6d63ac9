"""How a model repository is read: versions and variants."""

import shutil

from build.lint import repository
from tests.fakes.small_repository import DETOKENIZER, engine_text, faults, put, texts


def test_a_folder_without_a_configuration_or_a_version_is_named(tmp_path):
    put(tmp_path, texts())
    (tmp_path / "extra").mkdir()
    (tmp_path / "odd" / "config.pbtxt").mkdir(parents=True)
    shutil.rmtree(tmp_path / "tokenizer" / "1")
    messages = [message for *_, message in faults(tmp_path)]
    assert "it has no config.pbtxt, so Triton would guess one" in messages
    assert "config.pbtxt must be a readable file: Is a directory" in messages
    assert any("no version folder (1/)" in message for message in messages)


def test_a_variant_is_read_as_triton_would(tmp_path):
    put(tmp_path, texts())
    (tmp_path / "detokenizer" / "configs").mkdir()
    (tmp_path / "detokenizer" / "configs" / "fast.pbtxt").write_text(DETOKENIZER.replace("count: 1", "count: 4"))
    assert repository.config_names(tmp_path) == ["", "fast"]
    assert faults(tmp_path) == []
    assert any("with 4 instances" in row[3] for row in faults(tmp_path, "fast"))
    assert any("with 4 instances" in row[3] for row in faults(tmp_path, "fast")) and faults(tmp_path, "other") == []


def test_the_packed_ensemble_is_not_read_beside_a_variant_that_the_ensemble_alone_has(tmp_path):
    put(tmp_path, texts() | {"ensemble_packed": texts()["ensemble"]})
    (tmp_path / "ensemble" / "configs").mkdir()
    (tmp_path / "ensemble" / "configs" / "gpu.pbtxt").write_text(texts()["ensemble"])
    assert "ensemble_packed" in repository.read(tmp_path, "other").models
    assert "ensemble_packed" not in repository.read(tmp_path, "gpu").models
    (tmp_path / "ensemble_packed" / "configs").mkdir()
    (tmp_path / "ensemble_packed" / "configs" / "gpu.pbtxt").write_text(texts()["ensemble"])
    assert "ensemble_packed" in repository.read(tmp_path, "gpu").models


def test_a_number_that_is_no_data_type_is_named(tmp_path):
    configs = texts() | {"engine": engine_text().replace("TYPE_UINT64", "99", 1)}
    assert any("'seed' is data_type 99" in row[3] for row in faults(put(tmp_path, configs)))
