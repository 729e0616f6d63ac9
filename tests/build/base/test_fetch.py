"""Where a model comes from, and the sentence when it cannot come from there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from build.base import layout
from build.base.fetch import fetch, local_path
from contract.errors import InvalidArgument
from tests.fakes import hub

pytestmark = pytest.mark.slow


def test_a_folder_is_taken_as_it_is_absolute_or_from_here(tmp_path, monkeypatch):
    (tmp_path / "some" / "model").mkdir(parents=True)
    assert fetch(str(tmp_path / "some" / "model")) == tmp_path / "some" / "model"
    monkeypatch.chdir(tmp_path)
    assert fetch("some/model") == tmp_path / "some" / "model"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert fetch("~/some/model") == tmp_path / "some" / "model"


def test_a_relative_folder_is_looked_for_in_the_repository_first(tmp_path, monkeypatch):
    monkeypatch.setattr(layout, "ROOT", tmp_path / "repository")
    for place in ("repository", "here"):
        (tmp_path / place / "m").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    assert local_path("m") == tmp_path / "repository" / "m"


def test_a_file_is_not_a_checkpoint(tmp_path):
    (tmp_path / "model.bin").write_bytes(b"")
    message = r"model: .*model.bin is a file; give the folder that holds config.json, or a .gguf file"
    with pytest.raises(InvalidArgument, match=message):
        fetch(str(tmp_path / "model.bin"))
    (tmp_path / "model.gguf").write_bytes(b"")
    with pytest.raises(InvalidArgument, match=r"model.gguf is truncated, damaged or no GGUF file"):
        fetch(str(tmp_path / "model.gguf"))


@pytest.mark.parametrize("name", ["a/b/c", "nowhere", "/nowhere/at/all", "../up", "a//b"])
def test_what_is_neither_folder_nor_hub_id_is_said(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidArgument, match=f"there is no folder or .gguf file {name}, and it is no hub id"):
        fetch(name)


def fetched(home, *arguments: str, **environment: str) -> tuple[str, str]:
    """(the folder that is printed, last line of the complaint) of the program: the hub's client reads its settings
    once, so each call needs a process of its own."""
    cleared = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    done = subprocess.run(
        [sys.executable, "-m", "build.base.fetch", *arguments],
        cwd=layout.ROOT,
        env=cleared | {"HF_HOME": str(home)} | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.stdout.strip(), (done.stderr.strip().splitlines() or [""])[-1]


NEEDED = ["config.json", "model-00001-of-00001.safetensors", "model.safetensors.index.json", "tokenizer.json"]
NOT_NEEDED = ["README.md", "pytorch_model.bin", "original/consolidated.safetensors", "consolidated.safetensors"]


def test_only_the_files_an_engine_needs_are_downloaded_and_only_once(tmp_path):
    files = {name: name.encode() for name in NEEDED + NOT_NEEDED}
    with hub.serving("an-owner/a-model", files) as (endpoint, downloaded):
        first, _ = fetched(tmp_path, "an-owner/a-model", HF_ENDPOINT=endpoint)
        again, _ = fetched(tmp_path, "an-owner/a-model", HF_ENDPOINT=endpoint)
    assert sorted(downloaded) == NEEDED
    assert first == again and sorted(p.name for p in Path(first).iterdir()) == NEEDED
    offline, _ = fetched(tmp_path, "an-owner/a-model", HF_HUB_OFFLINE="1")
    assert offline == first


def test_a_gated_model_asks_for_a_token_and_takes_it(tmp_path):
    with hub.serving("an-owner/a-model", {"config.json": b"{}"}, gated=True) as (endpoint, _):
        folder, complaint = fetched(tmp_path, "an-owner/a-model", HF_ENDPOINT=endpoint)
        assert folder == ""
        assert complaint.endswith("an-owner/a-model is gated: accept its licence on the hub and set HF_TOKEN")
        folder, _ = fetched(tmp_path, "an-owner/a-model", HF_ENDPOINT=endpoint, HF_TOKEN="secret")
        assert (Path(folder) / "config.json").exists()


def test_an_unknown_model_or_revision_is_one_sentence(tmp_path):
    with hub.serving("an-owner/a-model", {"config.json": b"{}"}) as (endpoint, _):
        _, complaint = fetched(tmp_path, "an-owner/other", HF_ENDPOINT=endpoint)
        expected = "an-owner/other is neither a local folder nor on the hub (a private one needs HF_TOKEN)"
        assert complaint.endswith(expected)
        _, complaint = fetched(tmp_path, "an-owner/a-model", "--revision", "v9", HF_ENDPOINT=endpoint)
        assert complaint.endswith("the hub has an-owner/a-model but no revision v9")


def test_a_hub_id_offline_is_one_sentence(tmp_path):
    _, complaint = fetched(tmp_path, "an-owner/a-model", HF_HUB_OFFLINE="1")
    expected = "model: an-owner/a-model is neither a local folder nor in the hub's cache, and HF_HUB_OFFLINE is set"
    assert complaint.endswith(expected)


def test_a_hub_that_is_away_is_one_sentence(tmp_path):
    with hub.serving("an-owner/a-model", {}) as (endpoint, _):
        pass
    _, complaint = fetched(tmp_path, "an-owner/a-model", HF_ENDPOINT=endpoint)
    expected = "an-owner/a-model is neither a local folder nor in the hub's cache, and the hub cannot be reached"
    assert complaint.endswith(expected)


@pytest.mark.parametrize("own_folder", [False, True])
def test_a_file_damaged_on_disk_is_noticed_and_fetched_again(tmp_path, own_folder):
    files = {"config.json": b'{"a": 1}', "model.safetensors": b"weights", "README.md": b"no"}
    into = ["--into", str(tmp_path / "into")] if own_folder else []
    with hub.serving("some/model", files) as (endpoint, downloaded):
        folder, said = fetched(tmp_path, "some/model", *into, HF_ENDPOINT=endpoint)
        assert sorted(downloaded) == ["config.json", "model.safetensors"], said
        path = Path(folder) / "model.safetensors"
        path.resolve().write_bytes(b"wreckage")
        assert fetched(tmp_path, "some/model", *into, HF_ENDPOINT=endpoint)[0] == folder
        assert path.read_bytes() == b"weights" and downloaded.count("model.safetensors") == 2
        assert downloaded.count("config.json") == 1
    path.resolve().write_bytes(b"wreckage")
    folder, said = fetched(tmp_path, "some/model", *into, HF_ENDPOINT=endpoint, HF_HUB_OFFLINE="1")
    assert folder == "" and said.startswith("error: model: ")


def test_a_moved_branch_leaves_none_of_its_old_files_in_our_folder(tmp_path, monkeypatch):
    into = ["--into", str(tmp_path / "into")]
    files = {"config.json": b"{}", "model.safetensors": b"whole", "tokenizer.json": b"{}"}
    with hub.serving("some/model", files) as (endpoint, _):
        fetched(tmp_path, "some/model", *into, HF_ENDPOINT=endpoint)
        del files["model.safetensors"]
        files["model-00001-of-00001.safetensors"] = b"shard"
        monkeypatch.setattr(hub, "COMMIT", "f" * 40)
        folder, said = fetched(tmp_path, "some/model", *into, HF_ENDPOINT=endpoint)
    there = sorted(path.name for path in Path(folder).iterdir() if path.is_file())
    assert there == ["config.json", "model-00001-of-00001.safetensors", "tokenizer.json"], said
