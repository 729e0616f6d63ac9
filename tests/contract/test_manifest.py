"""The manifest is what stands between a damaged folder and a server."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from contract.errors import EngineFailed, NotFound
from contract.manifest import Adapter, EngineManifest, hash_files, load, verify
from tests.fakes import manifests

ROOT = Path(__file__).resolve().parents[2]


def manifest(files: dict[str, str], **changes: object) -> EngineManifest:
    return manifests.manifest(files=files, **changes)


def engine(folder: Path, **changes: object) -> Path:
    """A folder with two files and their manifest."""
    (folder / "sub").mkdir(parents=True)
    (folder / "openvino_model.bin").write_bytes(b"weights")
    (folder / "sub" / "config.json").write_text("{}")
    manifest(hash_files(folder), **changes).save(folder)
    return folder


def rewrite(folder: Path, **changes: object) -> None:
    table = json.loads((folder / "manifest.json").read_text())
    table |= changes
    (folder / "manifest.json").write_text(json.dumps({k: v for k, v in table.items() if v != "REMOVED"}))


def test_a_saved_manifest_reads_back_equal(tmp_path):
    folder = engine(tmp_path / "tiny")
    assert verify(folder) == manifest(hash_files(folder))


def test_optional_parts_read_back_too(tmp_path):
    gpu = {"kind": "trtllm", "sm": 90, "image": "some/image:1", "kv_cache_tokens": None, "evaluation": {"kl": 0.01}}
    found = verify(engine(tmp_path / "tiny", **gpu))
    assert (found.sm, found.image, found.kv_cache_tokens, found.evaluation) == (90, "some/image:1", None, {"kl": 0.01})
    adapters = (Adapter("poet", "a" * 64, 8),)
    found = verify(engine(tmp_path / "adapted", adapters=adapters, adapter_first_token_id=1))
    assert (found.adapters, found.adapter_first_token_id) == (adapters, 1)


def test_an_engine_built_before_a_field_was_recorded_has_none_of_it(tmp_path):
    folder = engine(tmp_path / "tiny")
    rewrite(folder, memory_bytes="REMOVED", adapters="REMOVED", adapter_first_token_id="REMOVED")
    assert (load(folder).memory_bytes, load(folder).adapters, load(folder).adapter_first_token_id) == (None, (), None)


def test_every_file_of_the_folder_is_listed_but_the_manifest(tmp_path):
    assert sorted(verify(engine(tmp_path / "tiny")).files) == ["openvino_model.bin", "sub/config.json"]


def test_a_missing_engine_names_the_ones_that_are_built(tmp_path):
    engine(tmp_path / "demo")
    engine(tmp_path / "qwen2.5")
    engine(tmp_path / "demo.partial-12")
    with pytest.raises(NotFound, match=r"no engine at .*/other; .*ENGINE=other.*; built are: demo, qwen2.5$"):
        load(tmp_path / "other")


def test_a_folder_without_a_manifest_is_half_built(tmp_path):
    (tmp_path / "tiny").mkdir()
    with pytest.raises(EngineFailed, match=r"half-built \(it has no manifest.json\); build it with `make build-engine"):
        verify(tmp_path / "tiny")


def test_a_removed_file_is_named(tmp_path):
    folder = engine(tmp_path / "tiny")
    (folder / "sub" / "config.json").unlink()
    with pytest.raises(EngineFailed, match="incomplete: sub/config.json is missing"):
        verify(folder)


def test_one_flipped_bit_is_found(tmp_path):
    folder = engine(tmp_path / "tiny")
    (folder / "openvino_model.bin").write_bytes(b"weighty")
    with pytest.raises(EngineFailed, match="damaged: openvino_model.bin is not the file that was built"):
        verify(folder)


def test_a_digest_of_the_callers_own_is_used(tmp_path):
    asked = []
    folder = engine(tmp_path / "tiny")
    with pytest.raises(EngineFailed, match="damaged"):
        verify(folder, lambda path: asked.append(path.name) or "0" * 64)
    assert asked == ["openvino_model.bin"]


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", '{"format": 1, "name": '])
def test_a_manifest_that_is_no_json_object_is_damaged(tmp_path, text):
    folder = engine(tmp_path / "tiny")
    (folder / "manifest.json").write_text(text)
    with pytest.raises(EngineFailed, match=r"manifest.json.*build it with"):
        load(folder)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("format", 2, "its format is 2; this version reads 1"),
        ("name", "REMOVED", "name is missing"),
        ("colour", "red", "unknown field colour"),
        ("kind", "gguf", "kind: must be one of cpu, trtllm, llmapi"),
        ("max_seq_len", 0, "max_seq_len: must be a positive integer, got 0"),
        ("max_batch_size", True, "max_batch_size: must be a positive integer"),
        ("eos_token_ids", 3, "eos_token_ids: must be a list of token ids, got 3"),
        ("eos_token_ids", [-1], "eos_token_ids: must be a list of token ids"),
        ("pad_token_id", "x", "pad_token_id: must be a token id or null, got 'x'"),
        ("checkpoint_sha256", "ab", "checkpoint_sha256: must be 64 hex digits, got 'ab'"),
        ("files", {}, "files: must be a table of sha256 by relative path, got {}"),
        ("files", {"../../etc/passwd": "a" * 64}, "files: must be a table of sha256 by relative path"),
        ("files", {"/etc/passwd": "a" * 64}, "files: must be a table of sha256 by relative path"),
        ("recipe", [], "recipe: must be a table, got []"),
        ("evaluation", 0.5, "evaluation: must be a table or null, got 0.5"),
        ("image", "", "image: must be a non-empty string or null, got ''"),
        ("adapters", [{"name": "a"}], "adapters: must be a list of objects with name, sha256 and rank"),
        ("adapter_first_token_id", -1, "adapter_first_token_id: must be a token id or null, got -1"),
        ("sm", 9.0, "sm: must be a positive integer or null, got 9.0"),
        ("kv_cache_tokens", 0, "kv_cache_tokens: must be a positive integer or null, got 0"),
    ],
)
def test_a_wrong_field_is_named_with_what_is_allowed(tmp_path, field, value, says):
    folder = engine(tmp_path / "tiny")
    rewrite(folder, **{field: value})
    with pytest.raises(EngineFailed) as caught:
        load(folder)
    assert f"manifest.json: {says}" in str(caught.value)


def test_saving_leaves_no_partial_file(tmp_path):
    folder = engine(tmp_path / "tiny")
    assert sorted(p.name for p in folder.iterdir()) == ["manifest.json", "openvino_model.bin", "sub"]


@pytest.mark.slow
def test_it_needs_nothing_but_the_standard_library():
    code = "import sys; import contract.manifest; print([m for m in ('numpy', 'openvino') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_of_many_engines_the_nearest_are_named_first(tmp_path):
    for name in ("demo", *(f"engine-{number}" for number in range(6))):
        engine(tmp_path / name)
    with pytest.raises(NotFound, match=r"; built are: engine-3, [\w.-]+, [\w.-]+; `ls .*` lists all 7$"):
        load(tmp_path / "engine-33")
