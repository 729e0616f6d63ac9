"""What decides whether an engine has to be built again."""

from build.base import layout
from build.recipe import provenance


def test_the_builder_is_the_hash_of_the_named_sources():
    first = provenance.versions(["model/graph.py"])
    assert first == provenance.versions(["model/graph.py"])
    assert first["builder"] != provenance.versions(["model/graph.py", "model/gptq.py"])["builder"]
    assert first["trident"] in (layout.ROOT / "pyproject.toml").read_text()


def test_a_folder_is_hashed_by_names_and_contents(tmp_path):
    (tmp_path / "a").write_text("1")
    before = provenance.files_sha256(tmp_path)
    (tmp_path / "a").rename(tmp_path / "b")
    renamed = provenance.files_sha256(tmp_path)
    (tmp_path / "b").write_text("2")
    assert len({before, renamed, provenance.files_sha256(tmp_path)}) == 3


def test_a_calibration_set_that_is_not_here_has_no_hash():
    assert provenance.texts_sha256("cnn_dailymail") is None
